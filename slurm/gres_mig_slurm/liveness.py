"""Whether the job that a record names still lives on this node: its step daemons first, then the controller."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from gres_mig import log, machine
from gres_mig.models import Record
from gres_mig_slurm import controller, slurm_conf
from gres_mig_slurm.controller import Refused, Seen, Unreachable

_ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
_SKEW_S = 60
"""How far the clocks of node and controller may differ before an earlier run is taken for this one."""


class Liveness:
    """Answers for the records of one pass; the controller is asked until it does not answer, then no more.

    True and None keep an instance; only False, on which both the step daemons and the controller agree, gives it
    back. `node` is the name Slurm has for this node, where it is known; `spool` the folder of its step daemons.
    """

    def __init__(self, *, node: str = "", spool: str = "", pyslurm: str = "") -> None:
        self._node, self._pyslurm = node, pyslurm
        self._spool = spool or slurm_conf.spool_dir(node)
        self._names = frozenset({node} if node else ())
        self._silent = False

    def alive(self, record: Record) -> bool | None:
        """Whether the record's owner, `slurm:CLUSTER:JOBID`, lives on this node; None is unknown."""
        job_id = int(record.owner.name.rpartition(":")[2])
        return self._lives(job_id, lambda job: self._runs_here(job, record))

    def is_over(self, job_id: int) -> bool:
        """Whether a job has ended for good, wherever it was: one that waits, even to run again, has not."""
        return self._lives(job_id, lambda job: job.state not in _ENDED) is False

    def _lives(self, job_id: int, judge: Callable[[Seen], bool]) -> bool | None:
        """What the step daemons say, else `judge` of what the controller says; None where nobody knows."""
        stepd = self._has_stepd(job_id)
        if stepd is not False or self._silent:
            return True if stepd else None
        try:
            job = controller.seen(job_id, pyslurm=self._pyslurm)
            return job is not None and judge(job)
        except (Unreachable, Refused) as error:
            # Whoever waits for a controller that is down waits once.
            self._silent = True
            log.warning("whether job %d lives is not known: %s", job_id, error)
            return None

    def _has_stepd(self, job_id: int) -> bool | None:
        """Whether one of the job's step daemons answers; this works while slurmd and slurmctld are down."""
        try:
            folder = os.open(self._spool, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            self._silent = True
            log.warning(
                "SlurmdSpoolDir %s: %s: no job of this node is known to have ended", self._spool, error.strerror
            )
            return None
        try:
            with os.scandir(folder) as entries:
                return any(_answers(folder, e.name) for e in entries if _is_step_of(e.name, job_id))
        finally:
            os.close(folder)

    def _runs_here(self, job: Seen, record: Record) -> bool:
        if job.state == "PENDING" or job.state in _ENDED:
            return False
        if record.owner.submitted and job.submitted and job.submitted != record.owner.submitted:
            # A requeue, or a job id that came round again: another run.
            return False
        if not record.owner.submitted and job.started > _wall_clock(record.begin) + _SKEW_S:
            return False
        if not self._names:
            self._names = controller.names_of_host(socket.gethostname())
            if not self._names:
                raise Refused(f"no node of the cluster has the host name {socket.gethostname()}")
        return not self._names.isdisjoint(controller.hosts(job.nodes)) if job.nodes else True


def _is_step_of(name: str, job_id: int) -> bool:
    # NODE_JOB.STEP, or NODE_JOB.STEP.COMPONENT; a node's name may hold an underscore and a dot.
    _, underscore, step = name.rpartition("_")
    return bool(underscore) and step.startswith(f"{job_id}.") and step.replace(".", "").isdigit()


def _answers(folder: int, name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            # Through the folder's descriptor: a socket's path may have 107 bytes only.
            probe.connect(f"/proc/self/fd/{folder}/{name}")
        except (ConnectionRefusedError, FileNotFoundError):
            # A step daemon that was killed leaves its socket behind.
            return False
        except OSError:
            # One that is too busy to answer is there.
            return True
    return True


def _wall_clock(begin: int) -> float:
    return time.time() - (machine.now_ns() - begin) / 1e9

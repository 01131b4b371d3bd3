"""What prolog and epilog share: whose hook it is, this node's settings, the log, the time limit, a fault told."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from gres_mig import answers, config, log, machine
from gres_mig.errors import Busy, GresMigError, NodeFault
from gres_mig.files import replace_whole
from gres_mig.models import Owner, Settings
from gres_mig.owners import parse_owner
from gres_mig.values import Value, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn, TypeVar

    T = TypeVar("T")

NODE_FAULT, FAILED, NOT_ROOT = 4, 70, 77
"""Exit codes that the shell part of the hooks knows; 0 is done, anything else a Python that could not begin."""

WORK_S = 25.0
"""Most time for the work on this node: with 4 s for the question before it and 3 s for each of five commands to the
controller after it, a hook is over within 45 s."""

TELL_S = 12.0
"""Most time for telling others, when a hook's own work is done."""

LOCK_WAIT_S = 15.0
"""Most time for GPUs on which others make or destroy instances; a shorter `lock_wait` counts."""


class Hook(Value):
    """One run of a hook, as its shell part describes it."""

    job_id: int
    node: str
    cluster: str
    config_path: str
    handover: str
    """The folder of the hand-overs."""
    begin: int
    """When the shell part began, nanoseconds since boot: runs of one job are told apart by it."""

    def owner(self, *, uid: int = 0, submitted: int = 0) -> Owner:
        """The job as an owner; without a submit time, every job of that id."""
        return parse_owner(f"slurm:{self.cluster}:{self.job_id}", uid=uid, submitted=submitted)

    def settings(self) -> Settings:
        """This node's settings, for somebody who may change it."""
        settings = answers.for_root(self._configured(), "a hook")
        return replace(settings, lock_wait_s=min(settings.lock_wait_s, LOCK_WAIT_S))

    @property
    def run_dir(self) -> str:
        """Where this node's locks are."""
        return self._configured().run_dir

    def _configured(self) -> Settings:
        # A simulated node's own folder is known only when its file has been read.
        return config.load(self.config_path, name=self.node, kept_in=os.path.dirname(self.handover))


def from_arguments(given: Sequence[str]) -> Hook:
    """The hook that `JOBID NODE CLUSTER CONFIG HANDOVER PID` describes; PID is the shell's that began it."""
    job_id, node, cluster, config_path, handover, pid = given
    begin = machine.begun_ns(int(pid))
    if not begin:
        # As if it began only now, what it makes would outlive an epilog that came meanwhile.
        raise NodeFault(f"the hook of job {job_id} on {node} was ended from outside; nothing was changed")
    return Hook(int(job_id), node, cluster, config_path, handover, begin)


def run(name: str, hook: Callable[[], int]) -> NoReturn:
    """Run a hook with its log and end with its exit code."""
    log.send_to(_write)
    if os.geteuid() != 0:
        _write(log.ERROR, f"{name}: only root runs it; nothing was changed")
        sys.exit(NOT_ROOT)
    try:
        code = hook()
    except NodeFault as error:
        log.error("%s: %s", name, error)
        sys.exit(FAILED)
    except Exception as error:  # noqa: BLE001 - the edge of a process
        as_fault(error)
        sys.exit(FAILED)
    # Who reads that may be gone, and nothing here depends on it.
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # To take the interpreter down tidily would make every job wait for it, twice.
    os._exit(code)


def as_fault(error: Exception) -> NodeFault:
    """That error as a fault of this node; one that nobody expected is logged with its traceback."""
    if isinstance(error, NodeFault):
        return error
    import traceback

    log.error("%s", "".join(traceback.format_exception(error)))
    what = f"internal error: {type(error).__name__}: {error}"
    return NodeFault(what, hint="see: journalctl -t gres-mig", code="INTERNAL")


def within_limit(work: Callable[[], T], limit_s: float = WORK_S) -> T:
    """What `work` returns; `Busy` when that takes too long. What then is still made is undone by the epilog."""

    def over(number: int, frame: FrameType | None) -> None:
        raise Busy(f"this node was busy for more than {limit_s:g} s", hint="ask again")

    signal.signal(signal.SIGALRM, over)
    # And each second after it: a step that takes it for an error of its own leaves the next one no time either.
    signal.setitimer(signal.ITIMER_REAL, limit_s, 1.0)
    try:
        return work()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def apart(work: Callable[[], None]) -> None:
    """Do that in a process of its own, for which no job waits; where there can be none, it is not done."""
    try:
        if os.fork():
            return
    except OSError as error:
        log.warning("no further process can be made: %s", error.strerror)
        return
    try:
        # slurmd ends a hook's process group with the hook, and waits until nobody has its output open.
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        within_limit(work, TELL_S)
    except Exception as error:  # noqa: BLE001 - the edge of a process
        log.warning("%s", as_fault(error))
    finally:
        os._exit(0)


def tell_fault(hook: Hook, error: NodeFault) -> bool:
    """Say that this node cannot do its work: to the log, to `status`, and to the controller, which then drains it.

    False when the controller did not listen; then only the hook's exit code drains the node.
    """
    from gres_mig_slurm import controller

    text = f"{error.code}: {error}"
    log.error("job %d on %s: %s", hook.job_id, hook.node, text)
    with suppress(OSError, GresMigError):
        replace_whole(os.path.join(hook.run_dir, "last-fault"), f"job {hook.job_id} on {hook.node}: {text}\n")
    try:
        controller.drain(hook.node, f"gres-mig: {text}; then: scontrol update nodename={hook.node} state=resume")
    except GresMigError as unanswered:
        log.warning("%s", unanswered)
        return False
    return True


_LEVELS = {log.INFO: 6, log.WARNING: 4, log.ERROR: 3}


def _write(level: int, lines: str) -> None:
    import syslog

    syslog.openlog("gres-mig", syslog.LOG_PID, syslog.LOG_DAEMON)
    for line in lines.splitlines():
        # slurmd keeps what its hooks print, at its debug level; one that was killed reads it no more.
        with suppress(OSError):
            print(f"gres-mig: {line}", file=sys.stderr)
        syslog.syslog(_LEVELS[level], line)

"""Slurm's controller, asked and told through Slurm's own commands, each with a time limit."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Sequence
from functools import cache

from gres_mig.errors import NodeFault
from gres_mig.values import Value
from gres_mig_slurm import slurm_conf
from gres_mig_slurm.job import FORMAT, Job

LIMIT_S = 3.0
"""For one command; by itself it waits 9 to 18 s for a controller that is down (22.05)."""

_NEXT_SECOND_S = 2
"""So that two times which are cut to seconds differ, also where the clocks of controller and node do a little."""

_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_UNKNOWN_JOB = "Invalid job id specified"

# Fields that no user writes, as in `job.FORMAT`.
_SEEN = (
    "JobID:12|,State:16|,SubmitTime:12|,StartTime:12|,EligibleTime:12|,NodeList:8000|,ArrayJobID:12|,"
    "admin_comment:1000|"
)

_BEGIN = re.compile(r"(?:^|\s)gres-mig:begin:([0-9]{1,12})(?=\s|$)")
_LONGEST_COMMENT = 900
"""What is longer may be cut off where it is read, so nothing is written to it."""

# `import pyslurm` ends its process where it finds no slurm.conf, so it has a process of its own, and its interpreter
# is the admin's: a pyslurm works with one version of Slurm only.
_PYSLURM = """\
import sys, pyslurm
job = pyslurm.Job.load(int(sys.argv[1]))
print(job.id, job.state, *(int(t or 0) for t in (job.submit_time, job.start_time, job.eligible_time)),
      job.allocated_nodes or "", sep="|")
"""


class Unreachable(NodeFault):
    """The controller did not answer, or not in time; what it would have said is unknown."""

    code = "SLURM"


class Refused(NodeFault):
    """The controller answered, and did not do what it was told."""

    code = "SLURM"


class Seen(Value):
    """A job as the controller sees it; times are seconds since the epoch, 0 where there is none."""

    job_id: int
    state: str
    """In full, such as PENDING."""
    submitted: int
    """Of this run: a requeue sets it anew (22.05, 24.11)."""
    started: int
    eligible: int
    """Its begin time, the user's or ours."""
    nodes: str
    """A host list, such as `n[1-3]`; empty while no node is allocated."""
    admin_comment: str = ""

    @property
    def given_begin(self) -> int:
        """The begin time that one of our nodes gave it last; 0: none did. Another one is its user's.

        A job can be delayed on one node after the other, and each wakes it when it has a place.
        """
        found = _BEGIN.search(self.admin_comment)
        return int(found[1]) if found else 0


def requeue(job: Job) -> None:
    """End this run of a batch job without a fault of its own; one submitted with --no-requeue stays so."""
    # "incomplete": one that its user has cancelled meanwhile would be started again otherwise.
    command = ("requeue", "incomplete", job.reference)
    if job.requeueable:
        _tell(*command)
        return
    _tell("update", f"JobId={job.reference}", "Requeue=1")
    try:
        _tell(*command)
    finally:
        _tell("update", f"JobId={job.reference}", "Requeue=0")


def delay(job: Job, seconds: int) -> int:
    """Let a job that was just requeued begin no sooner, nor before its pause is over; the begin time, in epoch seconds.

    Without it the job waits for cred_expire + 1 s, which is 121 s by default.
    """
    begin = int(time.time()) + max(seconds, pause_s())
    # As seconds since the epoch: the controller may be in another time zone.
    _tell("update", f"JobId={job.reference}", f"StartTime=uts{begin}", *_marked(job.admin_comment, begin))
    return begin


def start_at(reference: str, begin: float, admin_comment: str) -> int:
    """Let a pending job begin as soon as there is room from that time on; the begin time it has now."""
    whole = math.ceil(begin)
    when = f"uts{whole}" if begin > time.time() else "now"
    _tell("update", f"JobId={reference}", f"StartTime={when}", *_marked(admin_comment, whole))
    return whole


def pause_s() -> int:
    """How long after its end here a job must not begin here again.

    A slurmd of 22.05 that still knows the credential of a job's last run may take the new run for the old one, when
    it looked through its credentials less than 2 s ago: then it starts the script without the prolog. Seen when two
    requeued jobs began in one second. 24.11 forgets the old credential at once, but counts in whole seconds: a run that
    begins in the second in which the last one ended is refused for it, and the job fails ("Job credential revoked").
    """
    return _NEXT_SECOND_S if _version() >= (24, 5) else slurm_conf.requeue_delay_s() + 1


@cache
def _version() -> tuple[int, int]:
    """Slurm's, whose programs do not change under a process; (0, 0) where they do not say it."""
    found = re.search(r"(\d+)\.(\d+)", _run("scontrol", "--version"))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def notify(job: Job, text: str) -> None:
    """Say something to the user of an srun or salloc."""
    _tell("notify", job.reference, text)


def notify_and_cancel(job: Job, text: str) -> None:
    """Say something to the user of an srun or salloc, which cannot be requeued, and end it."""
    try:
        notify(job, text)
    finally:
        _run("scancel", job.reference)


def drain(node: str, reason: str) -> None:
    """Let no further job start on a node until an admin has looked."""
    _tell("update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")


def seen(job_id: int, *, pyslurm: str = "") -> Seen | None:
    """The job as it is now; None when the controller has no such job, `Unreachable` when nobody knows.

    `pyslurm` is an interpreter that has pyslurm, if any; where that cannot tell, squeue is asked.
    """
    return (_by_pyslurm(job_id, pyslurm) if pyslurm else None) or _by_squeue(job_id)


def all_seen(job_ids: Sequence[int]) -> dict[int, Seen]:
    """Those of these jobs that the controller has, in one question for most of them."""
    text = _squeue(",".join(map(str, job_ids)))
    found = {row.job_id: row for line in (text or "").splitlines() if (row := _row(line))}
    for job_id in job_ids:
        if job_id not in found and (one := seen(job_id)):
            found[job_id] = one
    return {job_id: found[job_id] for job_id in job_ids if job_id in found}


def names_of_host(hostname: str) -> frozenset[str]:
    """The Slurm nodes that a host is."""
    found = re.findall(r"^NodeName=(\S+) .*? NodeHostName=(\S+)", _run("scontrol", "-o", "show", "node"), re.MULTILINE)
    return frozenset(name for name, host in found if _short(host) == _short(hostname))


def rows(job_id: int) -> str:
    """What squeue says of a job and of those it is listed with, for `job.parse`."""
    return _run("squeue", "--noheader", "--all", "--states=all", f"--jobs={job_id}", f"--Format={FORMAT}")


def features(node: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The features that a node may have, and those of them that are active now."""
    text = shown("node", node)
    available, active = (re.search(rf"\b{key}Features=(\S*)", text) for key in ("Available", "Active"))
    return _words(available), _words(active)


def activate(node: str, names: Sequence[str]) -> None:
    """Let exactly these of a node's features be active; jobs that wait for one of them are looked at at once."""
    _tell("update", f"NodeName={node}", f"ActiveFeatures={','.join(names)}")


def shown(*what: str) -> str:
    """What `scontrol show` says of something, one thing a line."""
    return _run("scontrol", "-o", "show", *what)


def hosts(hostlist: str) -> frozenset[str]:
    """The nodes of a host list, in Slurm's own grammar; the controller is not asked."""
    if "[" not in hostlist:
        return frozenset(hostlist.split(",") if hostlist else ())
    return frozenset(_run("scontrol", "show", "hostnames", hostlist).split())


def _short(hostname: str) -> str:
    return hostname.partition(".")[0]


def _by_squeue(job_id: int) -> Seen | None:
    text = _squeue(str(job_id))
    if text is None:
        return None
    # The id of an array, which is its last task's, shows every task.
    rows = [row for line in text.splitlines() if (row := _row(line))]
    mine = next((row for row in rows if row.job_id == job_id), None)
    # That task can be forgotten while others of the array run.
    if mine is None and not any(_array_of(line) == job_id for line in text.splitlines()):
        # "No such job" has its own words; an empty list was once how a controller that is down looked (22.05, --json).
        raise Unreachable(f"squeue says nothing of job {job_id}")
    return mine


def _squeue(jobs: str) -> str | None:
    """Its rows; None where the controller has none of these jobs."""
    try:
        return _run("squeue", "--noheader", "--all", "--states=all", f"--jobs={jobs}", f"--Format={_SEEN}")
    except Refused as error:
        if _UNKNOWN_JOB in error.message:
            return None
        raise


def _by_pyslurm(job_id: int, python: str) -> Seen | None:
    try:
        row = _row(_run(python, "-I", "-c", _PYSLURM, str(job_id)).strip())
    except (Refused, Unreachable):
        return None
    return row if row and row.job_id == job_id else None


def _row(line: str) -> Seen | None:
    fields = [field.strip() for field in line.split("|")]
    if len(fields) < 6 or not fields[0].isdigit():
        return None
    submitted, started, eligible = (int(field) if field.isdigit() else 0 for field in fields[2:5])
    comment = "|".join(fields[7:]).rstrip("| ")
    if comment == "(null)":
        # How 24.11 shows that there is none.
        comment = ""
    return Seen(int(fields[0]), fields[1].upper(), submitted, started, eligible, fields[5], comment)


def _words(found: re.Match[str] | None) -> tuple[str, ...]:
    return tuple(word for word in (found[1] if found else "").split(",") if word not in ("", "(null)"))


def _array_of(line: str) -> int:
    """The array of which that row is a task; 0 where it says nothing of one."""
    fields = [field.strip() for field in line.split("|")]
    return int(fields[6]) if len(fields) > 6 and fields[0].isdigit() and fields[6].isdigit() else 0


def _marked(comment: str, begin: int) -> tuple[str, ...]:
    """What says to all our nodes, in words that no user can write, that this begin time is no user's."""
    text = f"{_BEGIN.sub('', comment)} gres-mig:begin:{begin}".strip()
    return (f"AdminComment={text}",) if len(text) < _LONGEST_COMMENT else ()


def _tell(*words: str) -> None:
    _run("scontrol", *words)


def _run(*command: str) -> str:
    # A hook pays this import only when it has something to say.
    import subprocess

    what = " ".join([word for word in command if not word.startswith("-")][:2])
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            env=_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Unreachable(f"{what}: slurmctld does not answer within {LIMIT_S:g} s") from error
    except OSError as error:
        raise Refused(f"{what}: {error.strerror}") from error
    if done.returncode == 0:
        return done.stdout
    said = (done.stderr or done.stdout).strip().replace("\n", "; ") or f"it ended with {done.returncode}"
    kind = Unreachable if "Unable to contact" in said else Refused
    raise kind(f"{what}: {said}")


def _environment() -> dict[str, str]:
    """Nothing of the caller's that changes what Slurm's commands do or print."""
    kept = {"SLURM_CONF": os.environ["SLURM_CONF"]} if "SLURM_CONF" in os.environ else {}
    return {"PATH": os.environ.get("PATH") or _PATH, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", **kept}

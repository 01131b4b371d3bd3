"""A job as its controller knows it, and what it asked of migmem; pure.

Read from chosen fields of squeue, not from `scontrol show job`: a job's name or comment may hold any text, another
job's line included, and root acts on what is read here.
"""

from __future__ import annotations

import re
import reprlib

from gres_mig.errors import BadRequest
from gres_mig.models import Request
from gres_mig.sizes import MAX_MIB, format_mib
from gres_mig.values import Value

FORMAT = (
    "JobID:12|,ArrayJobID:12|,ArrayTaskID:12|,HetJobID:12|,UserID:12|,SubmitTime:12|,RestartCnt:9|,BatchFlag:2|,"
    "Requeue:2|,StateCompact:4|,BatchHost:255|,tres-per-node:2000|,tres-per-task:2000|,admin_comment:1000|"
)
"""What `squeue --noheader --Format` is asked for, with SLURM_TIME_FORMAT=%s; hooks/prolog.sh asks for the same."""

_NONE = frozenset({"", "N/A", "(null)", "None"})
_ENTRY = re.compile(r"(?:gres[:/])?migmem(?:[:=](.*))?")
_COUNT = re.compile(r"([0-9]{1,15})([kKmMgGtTpP]?)")
_GATED = re.compile(r"(?:^|\s)gres-mig:1:\S+ gres-mig:gated(?:\s|$)")
_ORIGINAL = re.compile(r"(?:^|\s)gres-mig:1:(\S+)")


class Job(Value):
    """One run of a job; a task of an array, or a component of a heterogeneous job, is a job of its own."""

    job_id: int
    array_job_id: int
    array_task_id: str
    """Empty when it is no task of an array."""
    het_job_id: int
    """0 when it is no component of a heterogeneous job."""
    uid: int
    submitted: int
    """Seconds since the epoch; a requeue sets it anew."""
    restarts: int
    batch: bool
    """It has a script; otherwise an srun or salloc waits for it."""
    requeueable: bool
    state: str
    """As squeue abbreviates it: R, PD, CG, …"""
    batch_host: str
    tres_per_node: str
    tres_per_task: str
    admin_comment: str

    @property
    def reference(self) -> str:
        """What names this job alone: the id of an array's last task is the id of the whole array."""
        return f"{self.array_job_id}_{self.array_task_id}" if self.array_task_id else str(self.job_id)

    @property
    def gated(self) -> bool:
        """The submit plugin lets it begin only on nodes that say that they have a place for it."""
        return _GATED.search(self.admin_comment) is not None

    def __str__(self) -> str:
        return f"job {self.reference}"


def parse(rows: str, job_id: int) -> Job | None:
    """The job of that id among squeue's rows; an array's id brings the rows of all its tasks."""
    for row in rows.splitlines():
        fields = [field.strip() for field in row.split("|", len(Job.field_names()) - 1)]
        if len(fields) == len(Job.field_names()) and fields[0] == str(job_id):
            return _job(fields)
    return None


def request(job: Job) -> Request | None:
    """What the job asked for on each of its nodes; None when that is no migmem.

    Never what it was allocated: `--exclusive` allocates all there is. The submit plugin rounds the count up to its
    price and keeps what the user wrote in AdminComment, which no user can set.
    """
    counted = _counted(job.tres_per_node)
    if counted is None:
        if _counted(job.tres_per_task) is not None:
            raise BadRequest("migmem was asked for by task", hint="ask by node: --gres=migmem:8000")
        return None
    original = _ORIGINAL.search(job.admin_comment)
    text = original[1] if original else counted
    isolation, _, size = text.rpartition(":")
    memory_mib = _mib(size) if isolation in ("", "mig") else None
    if memory_mib == 0:
        return None
    if job.het_job_id:
        raise BadRequest("a heterogeneous job cannot have migmem", hint="submit its components as jobs of their own")
    if memory_mib is None and not original:
        raise BadRequest(f"migmem:{reprlib.repr(text)[1:-1]} is no size", hint="write MiB, such as --gres=migmem:8000")
    return Request(0, profile=text) if memory_mib is None else Request(memory_mib, isolation=isolation)


def _job(fields: list[str]) -> Job:
    given = ["" if field in _NONE else field for field in fields]
    whole = [int(field) if field.isdigit() else 0 for field in given]
    return Job(
        job_id=whole[0],
        array_job_id=whole[1],
        array_task_id=given[2] if given[2].isdigit() else "",
        het_job_id=whole[3],
        uid=whole[4],
        submitted=whole[5],
        restarts=whole[6],
        batch=whole[7] == 1,
        requeueable=whole[8] == 1,
        state=given[9],
        batch_host=given[10],
        tres_per_node=given[11],
        tres_per_task=given[12],
        admin_comment=given[13].rstrip("|").rstrip(),
    )


def _counted(tres: str) -> str | None:
    """The count of migmem among generic resources; of several the last one, which is what Slurm 22.05 counts."""
    found = [match for entry in tres.split(",") if (match := _ENTRY.fullmatch(entry))]
    return (found[-1][1] or "1") if found else None


def _mib(text: str) -> int | None:
    """MiB of a count in Slurm's units, where K is 1,024 of what is counted; None when it is no count."""
    match = _COUNT.fullmatch(text)
    if match is None:
        return None
    mib: int = int(match[1]) << 10 * " KMGTP".index(match[2].upper() or " ")
    if mib > MAX_MIB:
        raise BadRequest(f"migmem:{text} is more than {format_mib(MAX_MIB)}", hint="migmem counts MiB: 8000, or 8K")
    return mib

"""What the prolog hands to the tasks of a job: one small file for each job on a node, in lines of KEY=VALUE."""

from __future__ import annotations

import os
import re
import time

from gres_mig import answers, log
from gres_mig.errors import StateError
from gres_mig.files import make_folder
from gres_mig.models import Allocation, Settings
from gres_mig.sizes import format_mib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gres_mig_slurm.liveness import Liveness

MAX_TEXT = 400

_NAME = r"\.?([1-9][0-9]{0,9})\..+"
"""A hand-over, or with a dot before it what a prolog left that was killed while it wrote one; no hook compiles it."""


def given(allocation: Allocation, *, told_by: str) -> tuple[str, ...]:
    """The instance; `told_by` is `batch` where the job's script tells its user, else `step`."""
    text = (
        f"{allocation.profile_name} ({format_mib(allocation.memory_mib)}) for {allocation.request} "
        f"on {allocation.gpu_uuid}"
    )
    variables = (f"{name}={value}" for name, value in answers.environment(allocation).items())
    return "STATE=given", f"TOLD_BY={told_by}", _text(text), *variables


def failed(text: str) -> tuple[str, ...]:
    """No task of this run starts; each says why."""
    return "STATE=failed", _text(text)


def unknown() -> tuple[str, ...]:
    """Nobody has said in time what was asked for."""
    return ("STATE=unknown",)


def none() -> tuple[str, ...]:
    """Nothing was asked for."""
    return ("STATE=none",)


def folder_of(settings: Settings) -> str:
    """Where the hand-overs of a node are."""
    return os.path.join(settings.run_dir, "slurm")


def path(folder: str, job_id: int, node: str) -> str:
    """Where a job's hand-over on a node is."""
    return os.path.join(folder, f"{job_id}.{node}")


def write(folder: str, job_id: int, node: str, lines: tuple[str, ...]) -> None:
    """Put the hand-over there whole, root's and readable to all.

    A file of the user's own could be changed, and filled until no hand-over can be written any more; what it says,
    nvidia-smi -L tells everybody.
    """
    file = path(folder, job_id, node)
    temporary = os.path.join(folder, f".{job_id}.{node}.{os.getpid()}")
    content = "".join(f"{_plain(line)}\n" for line in lines).encode()
    try:
        make_folder(folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(temporary, flags, 0o444), "wb") as stream:
            os.fchmod(stream.fileno(), 0o444)
            stream.write(content)
        os.replace(temporary, file)
    except OSError as error:
        raise StateError(f"writing {file}: {error.strerror}") from error


def remove(folder: str, job_id: int, node: str) -> None:
    """Take it away; gone already is fine."""
    file = path(folder, job_id, node)
    try:
        os.unlink(file)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StateError(f"removing {file}: {error.strerror}") from error


def sweep(settings: Settings, liveness: Liveness) -> None:
    """Take away those of jobs that are over and whose epilog never came: their node died, or has none.

    Never one of a job that lives, begins or waits to run again, nor while nobody knows.
    """
    for file, before, job_id in _found(folder_of(settings)):
        # Of a young one the controller may not know yet that it began, or after a cold start that there is such a job.
        if time.time() - before.st_mtime >= settings.young_s and liveness.is_over(job_id):
            _unlink_same(file, before)


def _found(folder: str) -> list[tuple[str, os.stat_result, int]]:
    try:
        with os.scandir(folder) as entries:
            return [
                (entry.path, entry.stat(follow_symlinks=False), int(match[1]))
                for entry in entries
                if (match := re.fullmatch(_NAME, entry.name))
            ]
    except FileNotFoundError:
        # No job has begun since the boot, or one's epilog was quicker; then the next pass finds the others.
        return []
    except OSError as error:
        raise StateError(f"looking through {folder}: {error.strerror}") from error


def _unlink_same(file: str, before: os.stat_result) -> None:
    """Unless a prolog has written it anew since: its admin can requeue a job that is over."""
    try:
        now = os.stat(file, follow_symlinks=False)
        if (now.st_ino, now.st_mtime_ns) == (before.st_ino, before.st_mtime_ns):
            os.unlink(file)
            log.info("removed %s, for its job is over and had no epilog here", file)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StateError(f"removing {file}: {error.strerror}") from error


def _plain(line: str) -> str:
    """One line of printable text, since a shell reads it and Slurm prints it."""
    return "".join(c if c.isprintable() else " " for c in line)


def _text(text: str) -> str:
    # Slurm cuts off what a task prolog says where its buffer ends; a variable that is cut off means something else.
    return f"TEXT={text}"[:MAX_TEXT]

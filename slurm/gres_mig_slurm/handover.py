"""What the prolog hands to the tasks of a job: one small file for each job on a node, in lines of KEY=VALUE."""

from __future__ import annotations

import os

from gres_mig import answers
from gres_mig.errors import StateError
from gres_mig.files import make_folder
from gres_mig.models import Allocation
from gres_mig.sizes import format_mib

MAX_TEXT = 400


def given(allocation: Allocation, *, told_by: str) -> tuple[str, ...]:
    """The instance; `told_by` is `batch` where the job's script tells its user, else `step`."""
    text = (
        f"{allocation.profile_name} ({format_mib(allocation.memory_mib)}) for {allocation.request} "
        f"on {allocation.gpu_uuid}"
    )
    variables = (f"{name}={value}" for name, value in answers.environment(allocation).items())
    return "STATE=given", f"TOLD_BY={told_by}", f"TEXT={text}", *variables


def failed(text: str) -> tuple[str, ...]:
    """No task of this run starts; each says why."""
    return "STATE=failed", f"TEXT={text}"


def unknown() -> tuple[str, ...]:
    """Nobody has said in time what was asked for."""
    return ("STATE=unknown",)


def none() -> tuple[str, ...]:
    """Nothing was asked for."""
    return ("STATE=none",)


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


def _plain(line: str) -> str:
    """One line of printable text, since a shell reads it and Slurm prints it."""
    return "".join(c if c.isprintable() else " " for c in line)[:MAX_TEXT]

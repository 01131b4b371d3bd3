"""Whether others than root could change what root's hooks run: a file, every folder above it, every link's target."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator

from gres_mig.errors import ConfigError
from gres_mig.files import on_the_way
from gres_mig.values import Value


class Flaw(Value):
    """One way in for somebody else, with the command that closes it."""

    text: str
    todo: str


def flaws(*paths: str, sticky: bool = False) -> Iterator[Flaw]:
    """Of each path and all that leads to it; a sticky folder such as /tmp is one too, for anybody makes files in it.

    With `sticky` it is none, for nobody replaces root's files in it: enough for a program that reads no others there.
    """
    seen: set[str] = set()
    for path in paths:
        for part in on_the_way(os.path.abspath(path)):
            if part not in seen:
                seen.add(part)
                yield from of(part, sticky=sticky)


def of(path: str, *, sticky: bool = False) -> Iterator[Flaw]:
    """Of that one file or folder."""
    try:
        status = os.stat(path)
    except PermissionError:
        # Somebody else than root looks, and may not enter.
        return
    except OSError as error:
        yield Flaw(f"{path}: {error.strerror}", "run: gres-mig slurm setup --write")
        return
    if status.st_uid != 0:
        text = f"{path} belongs to uid {status.st_uid}, who could have root run anything"
        yield Flaw(text, f"run: chown root:root {shlex.quote(path)}")
    kept = sticky and stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & 0o022 and not kept:
        text = f"{path} can be written by others than root (mode {stat.S_IMODE(status.st_mode):04o})"
        yield Flaw(text, f"run: chmod go-w {shlex.quote(path)}")


def require(*paths: str) -> None:
    """Raise where root's hooks would run what somebody else can change."""
    flaw = next(flaws(*paths), None)
    if flaw:
        hint = f"{flaw.todo}; or install gres-mig where only root can write: python3 -m venv /opt/gres-mig"
        raise ConfigError(f"root's hooks would run {paths[0]}, but {flaw.text}", hint=hint)

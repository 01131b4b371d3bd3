"""Files that are to be written: compared with what is there first, then replaced whole, with a copy kept."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import time

from gres_mig.errors import ConfigError
from gres_mig.values import Value


class File(Value):
    """A file as it is and as it is to be."""

    path: str
    text: str
    before: str | None
    """What is there now; None: nothing."""
    mode: int = 0o644
    ours: bool = True
    """Root's, and replaced without more ado; of the site's own the owner stays, and a copy is kept."""
    right: bool = True
    """Owner and mode are as they have to be."""
    edit: bool = True
    """Whether it is written; otherwise it is only shown as it would be."""

    @property
    def state(self) -> str:
        """`new`, `changed` or `unchanged`."""
        if self.before is None:
            return "new"
        return "unchanged" if self.before == self.text and self.right else "changed"


def planned(path: str, text: str, *, mode: int | None = None, edit: bool = True) -> File:
    """That file, to hold that text; with a mode it is ours, without one the site's, whose mode stays."""
    ours = mode is not None
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            before = file.read()
            status = os.fstat(file.fileno())
    except FileNotFoundError:
        return File(path, text, None, mode or 0o644, ours, edit=edit)
    except OSError as error:
        raise ConfigError(f"reading {path}: {error.strerror}") from error
    there = stat.S_IMODE(status.st_mode)
    right = not ours or (there == mode and status.st_uid == 0)
    return File(path, text, before, mode or there, ours, right, edit)


def write(file: File) -> str:
    """Write it whole; the path of the copy of what it replaces, or nothing."""
    # Through a link to where the file is: the link is the site's.
    path = os.path.realpath(file.path)
    temporary = f"{path}.{os.getpid()}"
    kept = ""
    try:
        _make_folders(os.path.dirname(path))
        if file.before is not None and not file.ours:
            kept = _copy_name(path)
            shutil.copy2(path, kept)
        with open(temporary, "w", encoding="utf-8", errors="surrogateescape") as stream:
            if file.before is not None and not file.ours:
                status = os.stat(path)
                os.fchown(stream.fileno(), status.st_uid, status.st_gid)
            os.fchmod(stream.fileno(), file.mode)
            stream.write(file.text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"writing {path}: {error.strerror}") from error
    return kept


def _make_folders(path: str) -> None:
    """Each folder that is missing, open to all whatever the umask: a task prolog is its user's to run."""
    if os.path.isdir(path):
        return
    _make_folders(os.path.dirname(path))
    os.mkdir(path)
    os.chmod(path, 0o755)


def _copy_name(path: str) -> str:
    name = f"{path}.bak-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    later = (f"{name}-{number}" for number in itertools.count(2))
    return next(free for free in itertools.chain([name], later) if not os.path.lexists(free))

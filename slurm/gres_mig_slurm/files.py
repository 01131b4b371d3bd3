"""Files that are to be written: compared with what is there first, then replaced whole, with a copy kept."""

from __future__ import annotations

import os
import stat

from gres_mig.errors import ConfigError
from gres_mig.files import keep_copy, replace_whole
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
    try:
        if file.before is None or file.ours:
            replace_whole(path, file.text, file.mode)
            return ""
        kept = keep_copy(path)
        status = os.stat(path)
        replace_whole(path, file.text, file.mode, (status.st_uid, status.st_gid))
    except OSError as error:
        raise ConfigError(f"writing {path}: {error.strerror}") from error
    return kept

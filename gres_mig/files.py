"""Folders and files that others look into: replaced whole, with their modes whatever the umask is."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


def make_folder(path: str, mode: int = 0o755) -> None:
    """Make that folder, where it is missing, and those above it, open to all."""
    if os.path.isdir(path):
        return
    make_folder(os.path.dirname(os.path.abspath(path)))
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        # Another process was quicker; what is there and no folder will show when it is used.
        return
    os.chmod(path, mode)


def replace_whole(path: str, text: str, mode: int = 0o644, owner: tuple[int, int] | None = None) -> None:
    """Replace a file an admin reads by that text, or make it; `owner` is uid and gid, the caller's if left out."""
    folder = os.path.dirname(path)
    make_folder(folder)
    temporary = f"{path}.{os.getpid()}"
    # A link that somebody put there is not followed: a folder may be another user's.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(temporary, flags, 0o600), "w", encoding="utf-8", errors="surrogateescape") as stream:
        if owner is not None:
            os.fchown(stream.fileno(), *owner)
        os.fchmod(stream.fileno(), mode)
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def keep_copy(path: str) -> str:
    """Copy a file beside itself under a name that is free; the copy's path."""
    import itertools
    import shutil
    import time

    name = f"{path}.bak-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    later = (f"{name}-{number}" for number in itertools.count(2))
    kept = next(free for free in itertools.chain([name], later) if not os.path.lexists(free))
    shutil.copy2(path, kept)
    return kept


def on_the_way(path: str, links: int = 40) -> Iterator[str]:
    """Every folder from / down to the path and the path itself, and the same of what each link on the way points to."""
    whole = "/"
    for name in ("", *path.split("/")):
        whole = os.path.join(whole, name)
        if not os.path.islink(whole):
            yield whole.rstrip("/") or "/"
        elif links:
            # Whoever may write the link's folder could point it elsewhere; that folder was yielded before it.
            yield from on_the_way(os.path.normpath(os.path.join(os.path.dirname(whole), os.readlink(whole))), links - 1)

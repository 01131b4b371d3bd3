"""The service's place on a node: one copy at a time, and one path that every client knows."""

from __future__ import annotations

import fcntl
import os
import shlex
import socket
import stat

from gres_mig.errors import Busy, StateError
from gres_mig.files import make_folder
from gres_mig.presence import SOCKET

_BACKLOG = 1024
"""So many that few clients are turned away by a full queue, and so few that it is gone through in no time."""


def only_one(run_dir: str) -> int:
    """The lock that one service of a node holds as long as it lives; `Busy` while another one does."""
    path = os.path.join(run_dir, "service.lock")
    try:
        make_folder(run_dir)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Who can open it for reading can hold a lock on it, and so keep the service from starting.
        os.fchmod(descriptor, 0o600)
    except OSError as error:
        raise StateError(f"locking {path}: {error.strerror}") from error
    try:
        # A record lock, which children do not inherit: one that hangs in a driver call must not keep the next
        # service from starting.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        raise Busy(f"the service of this node runs already (pid {holder})", hint="see: gres-mig status") from error
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def listen(run_dir: str) -> socket.socket:
    """A socket that listens at the path all clients know, in the place of the one that an ended service left.

    The path is never missing from the first start on, so that no client takes a restart for a node without service.
    What is there and is not an ended service's socket stays, and is an error.
    """
    folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    fresh = f"{SOCKET}.new"
    try:
        _refuse_what_others_change(run_dir, os.fstat(folder))
        for name in (SOCKET, fresh):
            _refuse_what_is_not_left_over(run_dir, folder, name)
        if _exists(folder, fresh):
            os.unlink(fresh, dir_fd=folder)
        # Through the folder's descriptor: a socket's path may have 107 bytes only.
        listening.bind(f"/proc/self/fd/{folder}/{fresh}")
        os.chmod(fresh, 0o666, dir_fd=folder)
        listening.listen(_BACKLOG)
        os.replace(fresh, SOCKET, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        listening.close()
        raise StateError(f"listening at {run_dir}/{SOCKET}: {error.strerror}") from error
    except BaseException:
        listening.close()
        raise
    finally:
        os.close(folder)
    return listening


def _refuse_what_others_change(path: str, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        raise StateError(
            f"{path} belongs to uid {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):04o}: "
            "who can change it could answer in the service's place",
            hint=f"run: chown root {shlex.quote(path)} && chmod 0755 {shlex.quote(path)}",
            code="CONFIG",
        )


def _refuse_what_is_not_left_over(run_dir: str, folder: int, name: str) -> None:
    path = os.path.join(run_dir, name)
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid not in (0, os.geteuid()):
        what = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no socket"
        if stat.S_ISSOCK(status.st_mode):
            what = f"a socket of uid {status.st_uid}"
        raise StateError(
            f"{path} is {what}: it was not left by the service and stays as it is",
            hint=f"see who made it, then run: rm {shlex.quote(path)}",
            code="CONFIG",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(f"/proc/self/fd/{folder}/{name}")
        except ConnectionRefusedError:
            return
        except BlockingIOError:
            # Its queue is full: somebody listens.
            pass
    raise Busy(f"another program answers at {path}", hint=f"see: ss -xlp src {shlex.quote(path)}")


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True

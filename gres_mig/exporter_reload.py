"""Has dcgm-exporter list the instances anew, by SIGHUP, and never twice in two seconds on one node."""

from __future__ import annotations

import fcntl
import os
import signal
import time

from gres_mig import log
from gres_mig.models import Settings

PROGRAM = "dcgm-exporter"

_PAUSE_S = 2.0
"""The exporter takes no second SIGHUP before that."""

CGROUP_TREES = ("", "unified", "systemd")
"""Where systemd keeps its services: version 2, both versions, version 1."""


class Reload:
    """What is asked for too early stays due, over processes too: the next change sees to it, or a reconcile."""

    def __init__(self, settings: Settings) -> None:
        self._where, self._root = settings.dcgm_sighup, settings.simulator or "/"
        self._due = os.path.join(settings.run_dir, "dcgm.due")
        self._lock = os.path.join(settings.run_dir, "dcgm.lock")

    def ask(self, *, changed: bool) -> None:
        """Send it, if anything changed since it was sent last."""
        if not self._where:
            return
        try:
            if changed:
                os.close(_opened(self._due))
            elif not os.path.exists(self._due):
                return
            descriptor = _opened(self._lock)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._send_unless_early(descriptor)
            finally:
                os.close(descriptor)
        except BlockingIOError:
            # Somebody is sending one; what came too late for that is still due.
            return
        except OSError as error:
            log.warning("sending SIGHUP to %s (%s): %s", PROGRAM, self._where, error)

    def _send_unless_early(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        # Empty: none was sent yet. A clock that was set back keeps nobody waiting.
        early = status.st_size > 0 and 0 <= time.time() - status.st_mtime < _PAUSE_S
        if early or not os.path.exists(self._due):
            return
        # Before the signal, so that a change after it is due again.
        os.unlink(self._due)
        os.pwrite(descriptor, b"\n", 0)
        for pid in pids(self._where, self._root):
            _send(pid)


def pids(where: str, root: str = "/") -> tuple[int, ...]:
    """The processes that a unit has, or that a file names."""
    if where.startswith("/"):
        with open(where, encoding="ascii", errors="replace") as file:
            words = file.read().split()[:1]
    else:
        words = _of_unit(where, root)
    return tuple(int(word) for word in words if word.isdigit())


def is_exporter(pid: int) -> bool:
    """Whether that process runs dcgm-exporter: by its file, for a process names itself as it likes."""
    try:
        path = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return False
    # So the kernel writes it of a program that was upgraded while it runs.
    return os.path.basename(path.removesuffix(" (deleted)")) == PROGRAM


def _of_unit(unit: str, root: str) -> list[str]:
    # From its cgroup, for a hook asks no other program, and systemctl least of all: it waits for whoever boots.
    for tree in CGROUP_TREES:
        try:
            with open(os.path.join(root, "sys/fs/cgroup", tree, "system.slice", unit, "cgroup.procs")) as file:
                return file.read().split()
        except FileNotFoundError:
            continue
    return []


def _send(pid: int) -> None:
    # Through a descriptor, so that it is the process that was looked at, not a later one with its pid.
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if is_exporter(pid):
            signal.pidfd_send_signal(process, signal.SIGHUP)
    except ProcessLookupError:
        # It ended just now; the next one lists all there is when it starts.
        return
    finally:
        os.close(process)


def _opened(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

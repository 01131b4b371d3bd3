"""Who calls: what the kernel of this host says of a connection, never what a request claims."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator

from gres_mig import machine
from gres_mig.errors import BadRequest, NodeFault, NotPermitted
from gres_mig.models import Process
from gres_mig.values import Value

NOBODY = -1
"""The account of all who own nothing."""

_NO_UID = 2**32 - 1
"""(uid_t) -1: the kernel knows no user."""

_NS_GET_PARENT = 0xB702
"""ioctl_ns(2)."""

_FRESH_S = 10.0
"""How old what was read of the file may be."""

_FEW = 1000
"""Fewer subordinate ids than that are a user's own, which a container may use: LXD wants `root:1000:1`."""

_ROOTS = frozenset({"root", "0", "lxd"})
"""Whose ranges say nothing of users: LXD's, of a milliard ids, are where directories have their users."""


class Peer(Value):
    """The process that connected, and its user as this host counts users."""

    pid: int
    uid: int
    start: int
    """In clock ticks since boot; 0: it has ended."""
    owns: bool
    """Whether it may have anything: not who has no user of his own on this host."""

    @property
    def process(self) -> Process:
        """To be a witness."""
        return Process(self.pid, self.start)

    @property
    def account(self) -> int:
        """On whose account its requests go: all who own nothing are one user."""
        return self.uid if self.owns else NOBODY


class Users:
    """Tells users from those who only look like one: unmapped ids and the subordinate ids of containers.

    Who is root in a container of his own comes as himself. His subordinate ids are 65,536 more, each of which would
    have limits of its own.
    """

    def __init__(self, proc: str = "/proc", subordinate: str = "/etc/subuid") -> None:
        with open(os.path.join(proc, "sys/fs/overflowuid"), encoding="ascii") as stream:
            self._overflow = int(stream.read())
        self._file, self._read_at, self._ranges = subordinate, -1.0, list[range]()

    def peer(self, connection: socket.socket) -> Peer:
        """Who connected; later, another process may have the connection, which changes nothing."""
        pid, uid = machine.peer_of(connection)
        found = machine.process(pid) if pid > 0 else None
        return Peer(pid, uid, found.start if found else 0, self._owns(pid, uid))

    def account(self, connection: socket.socket) -> int:
        """That of whoever connected; costs next to nothing."""
        pid, uid = machine.peer_of(connection)
        return uid if self._owns(pid, uid) else NOBODY

    def _owns(self, pid: int, uid: int) -> bool:
        return pid > 0 and uid not in (self._overflow, _NO_UID) and not self._is_subordinate(uid)

    def _is_subordinate(self, uid: int) -> bool:
        now = time.monotonic()
        if now - self._read_at > _FRESH_S or self._read_at < 0:
            self._read_at, self._ranges = now, list(_ranges(self._file))
        return any(uid in ids for ids in self._ranges)


def _ranges(file: str) -> Iterator[range]:
    with contextlib.suppress(FileNotFoundError), open(file, encoding="utf-8", errors="replace") as stream:
        for line in stream:
            name, _, numbers = line.strip().partition(":")
            first, _, count = numbers.partition(":")
            if name not in _ROOTS and first.isdecimal() and count.isdecimal() and int(count) >= _FEW:
                yield range(int(first), int(first) + int(count))


class Anybody:
    """Who connects where nobody can tell who it is."""

    def peer(self, connection: socket.socket) -> Peer:
        """Nobody."""
        return Peer(0, _NO_UID, 0, owns=False)

    def account(self, connection: socket.socket) -> int:
        """Everybody has the same."""
        return NOBODY


def reported(peer: Peer, number: int, at_ns: int) -> Process:
    """The process that the peer, in its own counting, calls `number`: its user's, and begun before it was reported.

    `at_ns` is when the report came (`machine.now_ns`): a later process only has got the number.
    """
    pid = _here(peer, number)
    found = machine.process(pid) if pid else None
    if found is None:
        raise BadRequest(f"there is no process {number}", hint="report a kernel once it runs")
    if _uids(pid) != (peer.uid, peer.uid):
        raise NotPermitted(f"process {number} is not your own")
    if machine.begun_ns(pid) > at_ns:
        raise BadRequest(f"process {number} began after it was reported: it is another one", hint="report it again")
    return found


def _here(peer: Peer, number: int) -> int:
    """The pid that this host has for it; 0 where there is none."""
    theirs = _namespace(f"/proc/{peer.pid}/ns/pid")
    if theirs is None:
        raise NotPermitted("whoever asked has ended")
    if theirs == _namespace("/proc/self/ns/pid"):
        return number
    depth = len(_pids(peer.pid)) - 1
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            pids = _pids(int(entry))
            if len(pids) > depth and pids[depth] == number and _is_below(int(entry), len(pids) - 1 - depth, theirs):
                return int(entry)
    return 0


def _is_below(pid: int, levels: int, namespace: tuple[int, int]) -> bool:
    """Whether a process is so many pid namespaces below that one."""
    try:
        descriptor = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        for _ in range(levels):
            above = fcntl.ioctl(descriptor, _NS_GET_PARENT)
            os.close(descriptor)
            descriptor = above
        status = os.fstat(descriptor)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return (status.st_dev, status.st_ino) == namespace


def _namespace(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError as error:
        hint = "it needs CAP_SYS_PTRACE; run: gres-mig setup --service --write"
        raise NodeFault(f"the service may not read {path}", hint=hint, code="NOPERM") from error
    return status.st_dev, status.st_ino


def _pids(pid: int) -> list[int]:
    """Its pid in each namespace, from this host's to its own."""
    return [int(word) for word in _status(pid, "NSpid:")]


def _uids(pid: int) -> tuple[int, ...]:
    """Real and effective; a setuid program is somebody else's, too."""
    return tuple(int(word) for word in _status(pid, "Uid:")[:2])


def _status(pid: int, field: str) -> list[str]:
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as stream:
            return next((line.split()[1:] for line in stream if line.startswith(field)), [])
    except (FileNotFoundError, ProcessLookupError):
        return []

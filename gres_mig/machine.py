"""What this machine says of itself: its boot, its clock, who is alive, who holds a device."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator

from gres_mig.models import Process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from socket import socket

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def boot_id(simulator: str = "") -> str:
    """The id of this boot; of the simulated node's boot where there is one."""
    if simulator:
        from gres_mig import simulator as simulated

        return simulated.boot_id(simulator)
    return _read(_BOOT_ID).strip()


def now_ns() -> int:
    """Nanoseconds since boot, suspended time included (CLOCK_BOOTTIME): what `Record.begin` is measured in."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def process(pid: int) -> Process | None:
    """The process that has this pid now; None when there is none or it is a zombie, which holds nothing."""
    try:
        # The command in field 2 may hold spaces and brackets; fields count from the last bracket.
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else Process(pid, int(fields[19]))


def this_process() -> Process:
    """This process, as a record names its maker."""
    found = process(os.getpid())
    assert found is not None
    return found


def begun_ns(pid: int) -> int:
    """When a process began, in the unit of `now_ns`; the kernel counts it in ticks of 10 ms, rounded down."""
    found = process(pid)
    return found.start * 1_000_000_000 // os.sysconf("SC_CLK_TCK") if found else 0


def alive(wanted: Process) -> bool:
    """Whether that very process, not a later one with its pid, is still there."""
    return process(wanted.pid) == wanted


def peer_of(connection: socket) -> tuple[int, int]:
    """Pid and uid of the other end of a unix socket, as this host counts them: fixed at connect, or at listen."""
    from socket import SO_PEERCRED, SOL_SOCKET
    from struct import Struct

    credentials = Struct("iII")
    pid, uid, _ = credentials.unpack(connection.getsockopt(SOL_SOCKET, SO_PEERCRED, credentials.size))
    return pid, uid


def device_nodes(minor: int, gi_id: int, ci_ids: Iterable[int], root: str = "/") -> tuple[str, ...]:
    """The device files through which a GPU instance is used: the GPU's own and the capability nodes.

    Capability minors come from /proc/driver/nvidia-caps/mig-minors, whose names do not depend on their formula.
    """
    wanted = {f"gpu{minor}/gi{gi_id}/access"} | {f"gpu{minor}/gi{gi_id}/ci{ci}/access" for ci in ci_ids}
    nodes = [os.path.join(root, f"dev/nvidia{minor}")]
    try:
        table = _read(os.path.join(root, "proc/driver/nvidia-caps/mig-minors"))
    except OSError:
        return tuple(nodes)
    for line in table.splitlines():
        name, _, number = line.rpartition(" ")
        if name in wanted:
            nodes.append(os.path.join(root, f"dev/nvidia-caps/nvidia-cap{number}"))
    return tuple(nodes)


def holders(nodes: Iterable[str]) -> tuple[Process, ...]:
    """Processes with one of these device files open, seen through /proc/*/fd; nvidia-smi does not list them all.

    A monitoring agent that only opened the device is in no process list of NVML (DCGM issues 95 and 276).
    """
    devices, paths = set(), set()
    for node in nodes:
        try:
            status = os.stat(node)
        except OSError:
            continue
        paths.add(os.path.realpath(node))
        if stat.S_ISCHR(status.st_mode):
            devices.add(status.st_rdev)
    pids = _pids() if paths else ()
    return tuple(holder for pid in pids if _opens(pid, devices, paths) and (holder := process(pid)))


def uid(pid: int) -> int | None:
    """Whose process that is; None when there is none."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def describe(pid: int) -> str:
    """`pid 4711 python3 (alice)`; what is known of it, if it is still there."""
    try:
        # A process names itself as it likes: nothing of it may move a terminal's cursor or begin a line.
        command = "".join(c if c.isprintable() else "?" for c in _read(f"/proc/{pid}/comm").strip())
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return f"pid {pid}"
    import pwd

    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = f"uid {uid}"
    return f"pid {pid} {command} ({user})"


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _pids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid())


def _opens(pid: int, devices: set[int], paths: set[str]) -> bool:
    try:
        entries = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for entry in entries:
        link = f"/proc/{pid}/fd/{entry}"
        try:
            target = os.readlink(link)
            # Device files may be reached by other names in a container: the device number decides there.
            if target in paths or (devices and target.startswith("/dev/") and os.stat(link).st_rdev in devices):
                return True
        except OSError:
            continue
    return False

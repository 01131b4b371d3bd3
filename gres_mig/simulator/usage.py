"""The C functions about who uses a GPU or a MIG device, and how much of its memory."""

from __future__ import annotations

from . import codes
from .codes import Refused
from .hardware import alive
from .memory import number, put, target, versioned
from .session import Device, Function, Session, answers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .schema import Holder

_NO_INSTANCE = 0xFFFFFFFF
_MEMORY_V2 = 0x02000028


def _memory(session: Session, device: Any, memory: Any) -> None:
    total, reserved, used = _memory_figures(session, device)
    into = target(memory)
    into.total, into.used, into.free = total, reserved + used, total - reserved - used


def _memory_v2(session: Session, device: Any, memory: Any) -> None:
    into = versioned(memory, _MEMORY_V2)
    total, reserved, used = _memory_figures(session, device)
    into.total, into.reserved, into.used, into.free = total, reserved, used, total - reserved - used


def _compute_processes(session: Session, device: Any, count: Any, processes: Any) -> None:
    found = session.device(device)
    _monitored(session, found)
    rows = [(h, gi, ci) for h, gi, ci in _holders(found) if h["listed"]]
    room = target(count)
    enough = number(room) >= len(rows)
    room.value = len(rows)
    if not enough or (rows and processes is None):
        raise Refused(codes.INSUFFICIENT_SIZE)
    for index, (holder, gi_id, ci_id) in enumerate(rows):
        row = processes[index]
        row.pid, row.usedGpuMemory = holder["pid"], holder["memory_mib"] << 20
        row.gpuInstanceId, row.computeInstanceId = gi_id, ci_id


def _no_processes(session: Session, device: Any, count: Any, processes: Any) -> None:
    _monitored(session, session.device(device))
    put(count, 0)


def _monitored(session: Session, found: Device) -> None:
    answers(found.gpu)
    if found.compute is None and found.gpu["mig"] and not session.hardware["settings"]["monitor"]:
        raise Refused(codes.NO_PERMISSION)


def _memory_figures(session: Session, device: Any) -> tuple[int, int, int]:
    found = session.device(device)
    _monitored(session, found)
    board = session.board(found.gpu)
    used = sum(holder["memory_mib"] << 20 for holder, _, _ in _holders(found))
    if found.instance:
        return board.by_id[found.instance["profile"]].memory_mib << 20, 0, used
    return board.memory_bytes, board.reserved_bytes, used


def _holders(found: Device) -> list[tuple[Holder, int, int]]:
    if found.instance and found.compute:
        return [(h, found.instance["id"], found.compute["id"]) for h in alive(found.compute["holders"])]
    rows = [(h, _NO_INSTANCE, _NO_INSTANCE) for h in alive(found.gpu["holders"])]
    for instance in found.gpu["instances"]:
        rows += [(h, instance["id"], _NO_INSTANCE) for h in alive(instance["holders"])]
        for compute in instance["compute"]:
            rows += [(h, instance["id"], compute["id"]) for h in alive(compute["holders"])]
    return rows


SYMBOLS: dict[str, Function] = {
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetMemoryInfo_v2": _memory_v2,
    "nvmlDeviceGetComputeRunningProcesses_v3": _compute_processes,
    "nvmlDeviceGetGraphicsRunningProcesses_v3": _no_processes,
    "nvmlDeviceGetMPSComputeRunningProcesses_v3": _no_processes,
}

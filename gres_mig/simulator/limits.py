"""The C functions that hold a cgroup to so much of a GPU's memory, which drivers have from 615 on.

As nvml.h of nvidia-nvml-dev 13.5.37 describes them; no board has been seen doing it.
"""

from __future__ import annotations

import os

from . import codes
from .hardware import alive
from .memory import target
from .session import Function, Session, answers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FIRST_DRIVER = 615
_MAX = 0xFFFFFFFFFFFFFFFF


def _set(session: Session, device: Any, limits: Any) -> None:
    index, gpu = session.gpu(device)
    into = target(limits)
    cgroup = os.fsdecode(into.nameSpace or b"")
    total = session.board(answers(gpu)).memory_bytes
    session.privileged()
    if into.softLimit > into.hardLimit or total < into.hardLimit != _MAX:
        raise codes.Refused(codes.INVALID_ARGUMENT)
    if gpu["mig"]:
        raise codes.Refused(codes.NOT_SUPPORTED)
    _opened(cgroup)
    with session.store.change() as hardware:
        there = hardware["gpus"][index].setdefault("limits", {})
        there.pop(cgroup, None)
        if into.hardLimit != _MAX:
            there[cgroup] = into.hardLimit


def _get(session: Session, device: Any, limits: Any) -> None:
    _, gpu = session.gpu(device)
    into = target(limits)
    cgroup = os.fsdecode(into.nameSpace or b"")
    answers(gpu)
    _opened(cgroup)
    if cgroup not in gpu.get("limits", {}):
        raise codes.Refused(codes.NOT_FOUND)
    into.softLimit, into.hardLimit = 0, gpu.get("limits", {})[cgroup]
    # Which process is in which cgroup is the machine's to know: all that use the GPU are counted.
    into.currentUsed = sum(holder["memory_mib"] << 20 for holder in alive(gpu["holders"]))


def _opened(cgroup: str) -> None:
    if not os.path.isdir(cgroup):
        raise codes.Refused(codes.OPERATING_SYSTEM)


SYMBOLS: dict[str, Function] = {
    "nvmlDeviceSetMemoryLimits_v1": _set,
    "nvmlDeviceGetMemoryLimits_v1": _get,
}

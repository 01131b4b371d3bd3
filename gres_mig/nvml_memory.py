"""What NVML says of a whole GPU's memory: what the driver keeps of it, and which process uses how much."""

from __future__ import annotations

from gres_mig.light import pynvml
from gres_mig.nvml import IN_USE, DriverError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CANNOT_TELL = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})


def reserved_mib(handle: Any, gpu_uuid: str) -> int:
    """What driver and firmware keep for themselves, rounded up; 0 where NVML is too old to say."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError as error:
        if error.value in _CANNOT_TELL:
            return 0
        raise DriverError(f"reading what the driver keeps of {gpu_uuid}", error) from error
    return -(-int(memory.reserved) >> 20)


def used_by_uuid_mib(gpu_uuid: str) -> dict[int, int]:
    """The same as `used_mib`, of the GPU of that UUID."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid)
    except pynvml.NVMLError as error:
        raise DriverError(f"opening {gpu_uuid}", error) from error
    return used_mib(handle, gpu_uuid)


def used_mib(handle: Any, gpu_uuid: str) -> dict[int, int]:
    """MiB by pid; a process that both computes and draws is in both lists, with all its memory in each."""
    found: dict[int, int] = {}
    for listing in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            rows = listing(handle)
        except pynvml.NVMLError as error:
            if error.value in _CANNOT_TELL:
                continue
            raise DriverError(f"listing processes on {gpu_uuid}", error) from error
        for row in rows:
            # None where NVML does not know, as in a container of another pid namespace: there all the same.
            found[row.pid] = max(found.get(row.pid, 0), (row.usedGpuMemory or 0) >> 20)
    return found


def in_use(doing: str) -> DriverError:
    """What the driver says of an instance that a process uses; of a slice nobody else says it."""
    return DriverError(doing, pynvml.NVMLError(IN_USE))

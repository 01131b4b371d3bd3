"""What the simulator's tests say through the real pynvml, in few words."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from ctypes import byref, c_uint
from pathlib import Path
from typing import Any

import pynvml

ROOT = Path(__file__).parent.parent


def code(call: Callable[[], object]) -> int:
    """The NVML code a call ends with."""
    try:
        call()
    except pynvml.NVMLError as error:
        return int(error.value)
    return 0


def create(gpu: Any, profile: int, start: int | None = None, size: int | None = None) -> Any:
    """A GPU instance, at a start or where the driver likes."""
    if start is None:
        return pynvml.nvmlDeviceCreateGpuInstance(gpu, profile)
    if size is None:
        size = placements(gpu, profile)[0][1]
    placement = pynvml.c_nvmlGpuInstancePlacement_t(start, size)
    return pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, profile, byref(placement))


def placements(gpu: Any, profile: int) -> list[tuple[int, int]]:
    """All legal (start, size) of a profile."""
    count = c_uint(0)
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, profile, None, byref(count))
    array = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, profile, array, byref(count))
    return [(p.start, p.size) for p in array]


def profiles(gpu: Any) -> list[Any]:
    """The v2 profile structures, by enumerating until INVALID_ARGUMENT."""
    found = []
    for enum in range(64):
        try:
            found.append(pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, enum))
        except pynvml.NVMLError_NotSupported:
            continue
        except pynvml.NVMLError_InvalidArgument:
            return found
    raise AssertionError("the enumeration never ends")


def instances(gpu: Any, profile: int) -> list[Any]:
    """The handles of the GPU instances of a profile."""
    array = (pynvml.c_nvmlGpuInstance_t * 16)()
    count = c_uint(0)
    pynvml.nvmlDeviceGetGpuInstances(gpu, profile, array, byref(count))
    return list(array[: count.value])


def mig_uuids(gpu: Any) -> list[str]:
    """The MIG devices by index."""
    found = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            found.append(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)))
        except pynvml.NVMLError_NotFound:
            break
    return found


def process(node: Path, script: str, **more: Any) -> subprocess.Popen[str]:
    """Another process with a session on that node; the script sees `pynvml`, `simulated` and `gpu`, the first GPU."""
    begin = (
        "import sys, pynvml, simulated\n"
        "from gres_mig import simulator\n"
        "simulator.install(sys.argv[1]); pynvml.nvmlInit()\n"
        "gpu = pynvml.nvmlDeviceGetHandleByIndex(0)\n"
    )
    command = [sys.executable, "-c", begin + script, str(node)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **more)

"""The driver's own memory limits for a cgroup (r615 and later), called through ctypes as nvml.h 13.5 declares them.

Never run on hardware: off unless the configuration says `experimental_driver_limit = true`.
"""

from __future__ import annotations

import os
from ctypes import Structure, byref, c_char_p, c_ulonglong

from gres_mig.errors import NodeFault
from gres_mig.files import make_folder
from gres_mig.light import pynvml
from gres_mig.models import Owner
from gres_mig.nvml import DriverError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SET, _GET = "nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1"
_NO_LIMIT = 0xFFFFFFFFFFFFFFFF
"""`NVML_DEVICE_MEMORY_LIMIT_MAX`."""
_OURS = "gres-mig"


class _Limits(Structure):
    """`nvmlSetMemoryLimits_v1_t`."""

    _fields_ = (("nameSpace", c_char_p), ("softLimit", c_ulonglong), ("hardLimit", c_ulonglong))


class _Found(Structure):
    """`nvmlGetMemoryLimits_v1_t`."""

    _fields_ = (*_Limits._fields_, ("currentUsed", c_ulonglong))


def flaw(root: str) -> str:
    """Why this driver limits nothing; empty when it does."""
    try:
        for symbol in (_SET, _GET):
            pynvml._nvmlGetFunctionPointer(symbol)  # noqa: SLF001 - the binding has no name for what is newer than it
    except pynvml.NVMLError:
        return f"the driver has no {_SET} (615 and later have it)"
    if not os.path.isfile(os.path.join(root, "sys/fs/cgroup/cgroup.controllers")):
        return f"{os.path.join(root, 'sys/fs/cgroup')} is no cgroup v2 hierarchy"
    return ""


def cgroup(root: str, owner: Owner) -> str:
    """The cgroup whose processes are the owner's: Slurm's own for a job, else one of ours, which the starter fills.

    A job's is named so up to Slurm 25.11, and later with `CgroupJobIdPaths=yes`; it may be made before Slurm does.
    """
    kind, *names = owner.name.split(":")
    below = f"{_OURS}/{'-'.join([kind, *names])}"
    if kind == "slurm":
        below = f"system.slice/slurmstepd.scope/job_{names[-1]}"
    return os.path.join(root, "sys/fs/cgroup", below)


def limit(handle: Any, folder: str, mib: int) -> None:
    """Make the cgroup where it is missing, hold it to so much of that GPU, and read it back."""
    try:
        make_folder(folder)
    except OSError as error:
        raise NodeFault(f"making {error.filename}: {error.strerror}", code="SLICE") from error
    _set(handle, folder, mib << 20)
    found = _Found(os.fsencode(folder))
    _call(f"reading back the memory limit of {folder}", _GET, handle, found)
    if found.hardLimit != mib << 20:
        raise NodeFault(f"the driver holds {folder} to {found.hardLimit >> 20:,} MiB, not to {mib:,} MiB", code="NVML")


def lift(handle: Any, folder: str) -> None:
    """Take the limit away and the cgroup too, if it is ours; gone already is fine."""
    if not os.path.isdir(folder):
        # With its cgroup a limit goes as well (nvml.h).
        return
    _set(handle, folder, _NO_LIMIT)
    if os.path.basename(os.path.dirname(folder)) == _OURS:
        try:
            os.rmdir(folder)
        except OSError as error:
            raise NodeFault(f"removing {folder}: {error.strerror}", code="SLICE") from error


def _set(handle: Any, folder: str, hard: int) -> None:
    # No soft limit: that one guarantees memory, which is what the records do.
    _call(f"limiting the memory of {folder}", _SET, handle, _Limits(os.fsencode(folder), 0, hard))


def _call(doing: str, symbol: str, handle: Any, limits: Structure) -> None:
    function = pynvml._nvmlGetFunctionPointer(symbol)  # noqa: SLF001 - as above
    code = function(handle, byref(limits))
    if code != pynvml.NVML_SUCCESS:
        raise DriverError(doing, pynvml.NVMLError(code))

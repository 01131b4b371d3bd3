"""The instance that this very process was given: what its environment says of it, and how much of it is in use."""

from __future__ import annotations

import os
import time

from gres_mig.errors import BadRequest, NodeFault
from gres_mig.sizes import format_mib
from gres_mig.values import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


class NoInstance(BadRequest):
    """This process was given no instance; a notebook shows just that line."""

    def _render_traceback_(self) -> list[str]:
        # IPython asks an exception for this instead of drawing the frames it came through.
        return [str(self)]


class Own(Value):
    """One's own instance; it is printed as two lines for a person."""

    uuid: str
    """The MIG device, as CUDA_VISIBLE_DEVICES names it; of a slice its GPU."""
    gpu_uuid: str
    profile: str
    memory_mib: int
    """What it holds."""
    requested: str
    """What was asked for: MiB, or a profile by name."""
    used_mib: int | None
    """None where NVML does not say it."""
    since: float | None
    """When it was asked for, seconds since 1970; a restart of a kernel changes nothing in it."""
    isolation: str = ""
    """What holds it to that: `mig`, `env`, `cooperative` or `driver-limit`."""
    note: str = ""
    """Why NVML does not say how much is in use."""

    @property
    def age_s(self) -> float | None:
        """For how long it is one's own."""
        return None if self.since is None else max(0.0, time.time() - self.since)

    def __repr__(self) -> str:
        from gres_mig.show import age

        asked = f" for {format_mib(int(self.requested))}" if self.requested.isdigit() else ""
        used = f"{format_mib(self.used_mib)} in use" if self.used_mib is not None else f"use not known ({self.note})"
        old = "" if self.age_s is None else f", {age(self.age_s)} old"
        where = f"{self.uuid} of {self.gpu_uuid}"
        if self.uuid == self.gpu_uuid:
            where = f"of {self.gpu_uuid}, isolation={self.isolation}"
        return f"{self.profile} ({format_mib(self.memory_mib)}){asked}, {used}{old}\n{where}"

    __str__ = __repr__


def own(variables: Mapping[str, str] | None = None) -> Own:
    """The instance that these variables name, this process's own if left out; `NoInstance` where they name none."""
    told = os.environ if variables is None else variables
    uuid = told.get("GRES_MIG_UUID")
    if not uuid:
        raise NoInstance(
            "this process has no GPU instance: GRES_MIG_UUID is not set",
            hint="in a notebook, choose a kernel with GPU memory; in a Slurm job, ask with --gres=migmem:8000",
        )
    used_mib, note = _used(uuid, told.get("GRES_MIG_SLICE", ""), told.get("GRES_MIG_NODE", ""))
    since, memory = told.get("GRES_MIG_SINCE", ""), told.get("GRES_MIG_MEMORY_MIB", "")
    return Own(
        uuid=uuid,
        gpu_uuid=told.get("GRES_MIG_GPU_UUID", ""),
        profile=told.get("GRES_MIG_PROFILE", ""),
        memory_mib=int(memory) if memory.isdigit() else 0,
        requested=told.get("GRES_MIG_REQUESTED", ""),
        used_mib=used_mib,
        since=float(since) if since.isdigit() else None,
        isolation=told.get("GRES_MIG_ISOLATION", ""),
        note=note,
    )


def _used(uuid: str, slice_: str, simulator: str) -> tuple[int | None, str]:
    # In this process and not in a child: whoever asks uses the instance himself, so one more session on it for a
    # moment keeps it from nothing, and a kernel has threads, which do not go over a fork.
    from gres_mig.nvml import Session

    try:
        with Session(simulator) as driver:
            return _used_of_slice(uuid, slice_) if slice_ else driver.used_mib(uuid), ""
    except NodeFault as error:
        return None, error.message


def _used_of_slice(gpu_uuid: str, slice_: str) -> int:
    # What the GPU says of itself is of all slices; which processes are of this one, their environment tells.
    from gres_mig import nvml_memory, slice_users

    users = slice_users.users(nvml_memory.used_by_uuid_mib(gpu_uuid), (), {slice_})
    return sum(user.memory_mib for user in users if user.slice == slice_)

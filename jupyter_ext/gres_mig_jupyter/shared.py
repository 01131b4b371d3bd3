"""One instance for several kernels: that of a Slurm job, or the one that a server has for all of its kernels."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from gres_mig import slice_hami, slice_users
from gres_mig.errors import BadRequest
from gres_mig.sizes import format_mib
from gres_mig.slice_models import Slicing


def of_job() -> dict[str, Any]:
    """The instance of the Slurm job that this server is in, as its hooks told of it."""
    told = os.environ
    environment = {name: value for name, value in told.items() if name.startswith("GRES_MIG_")}
    environment |= dict.fromkeys(("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"), told["GRES_MIG_UUID"])
    if slice_users.VARIABLE in told:
        # What holds a slice to its memory holds its kernels too, whatever their specs preload.
        names = [line.partition("=")[0] for line in slice_hami.variables(Slicing(), "", 0)]
        environment |= {name: told[name] for name in names if name in told}
    memory = told.get("GRES_MIG_MEMORY_MIB", "")
    profile = {"name": told.get("GRES_MIG_PROFILE", ""), "memory_mib": int(memory) if memory.isdigit() else 0}
    return {
        "state": "allocated",
        "profile": profile,
        "gpu_uuid": told.get("GRES_MIG_GPU_UUID"),
        "mig_uuid": told["GRES_MIG_UUID"],
        "environment": environment,
    }


def refuse_more(common: Mapping[str, Any], memory: str, profile: str, whose: Literal["job", "server"]) -> None:
    """Refuse a kernel that asks for more than the instance which it would share holds."""
    has, what = common["profile"], f"this {whose}'s instance"
    if memory and 0 < has["memory_mib"] < int(memory):
        raise BadRequest(
            f"this kernel asks for {format_mib(int(memory))}, and {what} holds {format_mib(has['memory_mib'])}",
            hint=f"choose another kernel, or start a larger {whose}",
        )
    if profile and profile.lower() != has["name"].lower():
        raise BadRequest(f"this kernel asks for {profile}, and {what} is {has['name']}")

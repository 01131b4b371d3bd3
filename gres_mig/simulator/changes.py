"""Makes and destroys instances in the hardware file, in the time a board takes and one at a time on each GPU."""

from __future__ import annotations

from collections.abc import Callable

from . import codes, faults, physics
from .codes import Refused
from .hardware import Store, alive
from .session import answers, partitioned

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    from .boards import ComputeProfile, GpuProfile
    from .schema import ComputeInstance, Gpu, GpuInstance, Hardware, Settings

    Made = TypeVar("Made")


def make_gpu_instance(store: Store, index: int, profile: GpuProfile, start: int | None) -> GpuInstance:
    """A GPU instance at `start`, or where the driver likes."""

    def make(hardware: Hardware, gpu: Gpu) -> GpuInstance:
        partitioned(gpu, codes.NOT_SUPPORTED)
        gi_id, at = physics.new_gpu_instance(store.board(gpu), gpu, profile, start)
        hardware["epoch"] += 1
        made: GpuInstance = {
            "id": gi_id,
            "profile": profile.id,
            "start": at,
            "size": profile.size,
            "epoch": hardware["epoch"],
            "holders": [],
            "compute": [],
        }
        gpu["instances"].append(made)
        return made

    return _change(store, index, make, lambda settings: settings["create_s"])


def make_compute_instance(
    store: Store, index: int, epoch: int, profile: ComputeProfile, start: int | None
) -> ComputeInstance:
    """A compute instance in the GPU instance of that epoch."""

    def make(hardware: Hardware, gpu: Gpu) -> ComputeInstance:
        instance = _instance(gpu, epoch)
        ci_id, at = physics.new_compute_instance(store.board(gpu), instance, profile, start)
        hardware["epoch"] += 1
        made: ComputeInstance = {
            "id": ci_id,
            "profile": profile.id,
            "start": at,
            "size": profile.slices,
            "uuid": physics.mig_uuid(gpu["uuid"], instance["id"], ci_id),
            "epoch": hardware["epoch"],
            "holders": [],
        }
        instance["compute"].append(made)
        return made

    return _change(store, index, make, lambda settings: settings["compute_s"])


def destroy_compute_instance(store: Store, index: int, epoch: int) -> None:
    """Refused while a process uses it."""

    def destroy(hardware: Hardware, gpu: Gpu) -> None:
        for instance in answers(gpu)["instances"]:
            for compute in instance["compute"]:
                if compute["epoch"] == epoch:
                    if alive(compute["holders"]):
                        raise Refused(codes.IN_USE)
                    instance["compute"].remove(compute)
                    return
        raise Refused(codes.INVALID_ARGUMENT)

    _change(store, index, destroy, lambda settings: settings["compute_s"])


def destroy_gpu_instance(store: Store, index: int, epoch: int) -> None:
    """Refused while it has a compute instance or anything is subscribed to it."""

    def destroy(hardware: Hardware, gpu: Gpu) -> None:
        instance = _instance(gpu, epoch)
        if instance["compute"] or alive(instance["holders"]):
            raise Refused(codes.IN_USE)
        gpu["instances"].remove(instance)

    _change(store, index, destroy, lambda settings: settings["destroy_s"])


def set_mig_mode(store: Store, index: int, mode: int) -> int:
    """What became of it, as NVML's activation status: in force, to come with a reset, or somebody is in the way."""

    def change(hardware: Hardware, gpu: Gpu) -> int:
        answers(gpu)["pending"] = mode
        if gpu["mig"] == mode:
            return codes.SUCCESS
        if gpu["instances"] or alive(gpu["holders"]):
            return codes.IN_USE
        if not store.board(gpu).resetless:
            return codes.RESET_REQUIRED
        gpu["mig"] = mode
        return codes.SUCCESS

    return _change(store, index, change, lambda settings: 0.0)


def _change(
    store: Store, index: int, change: Callable[[Hardware, Gpu], Made], time: Callable[[Settings], float]
) -> Made:
    with store.gpu_lock(index):
        hardware = store.read_copy()
        seconds = time(hardware["settings"])
        if seconds > 0:
            # A refusal is quick; what the driver does takes its time, and only then is it there.
            change(hardware, hardware["gpus"][index])
            faults.uninterrupted(seconds)
        with store.change() as hardware:
            return change(hardware, hardware["gpus"][index])


def _instance(gpu: Gpu, epoch: int) -> GpuInstance:
    for instance in answers(gpu)["instances"]:
        if instance["epoch"] == epoch:
            return instance
    raise Refused(codes.INVALID_ARGUMENT)

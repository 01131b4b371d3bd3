"""One process's NVML session: what its handles mean on the hardware as it is now."""

from __future__ import annotations

import os
from collections.abc import Callable

from . import codes, memory, physics
from .codes import Refused
from .hardware import Store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .boards import Board
    from .schema import ComputeInstance, Gpu, GpuInstance, Hardware

GPU, GPU_INSTANCE, COMPUTE_INSTANCE, MIG_DEVICE = 1, 2, 3, 4
DEAD = 0xFFFFFFFF
"""An epoch no instance ever has: the handle a lying create gives out."""

Function = Callable[..., None]


class Device:
    """What a device handle means: a GPU, or a MIG device of it."""

    def __init__(
        self,
        gpu_index: int,
        gpu: Gpu,
        instance: GpuInstance | None = None,
        compute: ComputeInstance | None = None,
    ) -> None:
        self.gpu_index = gpu_index
        self.gpu = gpu
        self.instance = instance
        self.compute = compute


class Session:
    """Reference counted like NVML's own; belongs to one process and one load of the driver."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.hardware: Hardware = store.read()
        self._pid = 0
        self._load = 0
        self._references = 0
        self._fd = -1
        self._snapshot: list[list[int]] | None = None

    def begin(self) -> None:
        """`nvmlInit`."""
        if self.hardware["mismatch"]:
            raise Refused(codes.LIB_RM_VERSION_MISMATCH)
        if not self.hardware["loaded"]:
            raise Refused(codes.DRIVER_NOT_LOADED)
        if not self._mine():
            self._close()
            self._pid, self._load, self._references = os.getpid(), self.hardware["load"], 0
        if not self._references:
            # Held open as the library holds /dev/nvidiactl: a forgotten session shows in /proc/PID/fd.
            self._fd = os.open(os.path.join(self.store.folder, "nvidiactl"), os.O_RDONLY | os.O_CLOEXEC)
            stale = self.hardware["settings"]["stale_sessions"]
            gpus = enumerate(self.hardware["gpus"])
            self._snapshot = [_mig_handles(index, gpu) for index, gpu in gpus] if stale else None
        self._references += 1

    def end(self) -> None:
        """`nvmlShutdown`."""
        if self._pid != os.getpid() or not self._references:
            raise Refused(codes.UNINITIALIZED)
        self._references -= 1
        if not self._references:
            self._close()

    def close(self) -> None:
        """Drop the session whatever its count, as the end of the process would."""
        self._references = 0
        self._close()

    def look(self) -> Hardware:
        """Read the hardware again for one call."""
        self.hardware = self.store.read()
        return self.hardware

    def check(self) -> None:
        """Whether calls are answered at all: a forked child has no session, nor has one from before a reload."""
        if not self._references or not self._mine():
            raise Refused(codes.UNINITIALIZED)
        if self.hardware["mismatch"]:
            raise Refused(codes.LIB_RM_VERSION_MISMATCH)

    def privileged(self) -> None:
        """Refuse a caller who may not change the partitioning."""
        permission = self.hardware["settings"]["permission"]
        allowed = permission == "anyone" or (os.geteuid() == 0 and permission != "no-one")
        if permission == "administrator":
            allowed = _is_administrator()
        if permission == "owner":
            # Without root a newcomer is root on a node of his own.
            allowed |= os.geteuid() == os.stat(self.store.folder).st_uid
        if not allowed or not os.access(self.store.folder, os.W_OK):
            raise Refused(codes.NO_PERMISSION)

    def board(self, gpu: Gpu) -> Board:
        """The board a GPU is."""
        return self.store.board(gpu)

    def device(self, handle: Any) -> Device:
        """A GPU or a MIG device."""
        kind, index, epoch = _parts(memory.address(handle))
        if kind == GPU:
            return Device(index, self._gpu(index))
        if kind != MIG_DEVICE:
            raise Refused(codes.INVALID_ARGUMENT)
        gpu = self._gpu(index)
        return Device(index, gpu, *_compute(gpu, epoch))

    def gpu(self, handle: Any) -> tuple[int, Gpu]:
        """A whole GPU: its index and itself."""
        kind, index, _ = _parts(memory.address(handle))
        if kind != GPU:
            raise Refused(codes.INVALID_ARGUMENT)
        return index, self._gpu(index)

    def gpu_instance(self, handle: Any) -> tuple[int, Gpu, GpuInstance]:
        """A GPU instance; one that was destroyed, or made again since, is an invalid argument."""
        kind, index, epoch = _parts(memory.address(handle))
        if kind == GPU_INSTANCE:
            gpu = self._gpu(index)
            for instance in gpu["instances"]:
                if instance["epoch"] == epoch:
                    return index, gpu, instance
        raise Refused(codes.INVALID_ARGUMENT)

    def compute_instance(self, handle: Any) -> tuple[int, Gpu, GpuInstance, ComputeInstance]:
        """A compute instance."""
        kind, index, epoch = _parts(memory.address(handle))
        if kind != COMPUTE_INSTANCE:
            raise Refused(codes.INVALID_ARGUMENT)
        gpu = self._gpu(index)
        return index, gpu, *_compute(gpu, epoch)

    def mig_handles(self, index: int, gpu: Gpu) -> list[int]:
        """The MIG devices by index; on a node with stale sessions those there were when this one began."""
        if self._snapshot is not None:
            return self._snapshot[index]
        return _mig_handles(index, gpu)

    def gpu_of(self, handle: Any) -> str:
        """The UUID of the GPU a handle belongs to, or an empty string: for faults and the log."""
        gpus, index = self.hardware["gpus"], self.index_of(handle)
        return gpus[index]["uuid"] if 0 <= index < len(gpus) else ""

    def index_of(self, handle: Any) -> int:
        """The index of the GPU a handle belongs to, whether it lives or not; -1 for NULL."""
        return _parts(memory.address(handle))[1]

    def _gpu(self, index: int) -> Gpu:
        gpus = self.hardware["gpus"]
        if not 0 <= index < len(gpus):
            raise Refused(codes.INVALID_ARGUMENT)
        return gpus[index]

    def _mine(self) -> bool:
        return self._pid == os.getpid() and self._load == self.hardware["load"]

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def handle(kind: int, index: int, epoch: int = 1) -> int:
    """The number an opaque handle is: never NULL, and never the same for two instances."""
    return kind << 56 | (index + 1) << 32 | epoch


def answers(gpu: Gpu) -> Gpu:
    """The GPU, unless it fell off the bus."""
    if gpu["lost"]:
        raise Refused(codes.GPU_IS_LOST)
    return gpu


def partitioned(gpu: Gpu, otherwise: int) -> Gpu:
    """The GPU, unless it is lost or its MIG mode is off."""
    if not answers(gpu)["mig"]:
        raise Refused(otherwise)
    return gpu


def _mig_handles(index: int, gpu: Gpu) -> list[int]:
    return [handle(MIG_DEVICE, index, compute["epoch"]) for _, compute in physics.mig_devices(gpu)]


def _is_administrator() -> bool:
    """Whom the kernel module takes for one: not root, but who has CAP_SYS_ADMIN (nv-linux.h, NV_IS_SUSER)."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as stream:
        effective = next((line.split()[1] for line in stream if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> 21 & 1)


def _parts(number: int) -> tuple[int, int, int]:
    return number >> 56, (number >> 32 & 0xFFFFFF) - 1, number & 0xFFFFFFFF


def _compute(gpu: Gpu, epoch: int) -> tuple[GpuInstance, ComputeInstance]:
    for instance in gpu["instances"]:
        for compute in instance["compute"]:
            if compute["epoch"] == epoch:
                return instance, compute
    raise Refused(codes.INVALID_ARGUMENT)

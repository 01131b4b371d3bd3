"""A stand-in for a job's program: opens one MIG device of a simulated node and works as long as it is the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pynvml

from gres_mig.errors import BadRequest, NodeFault

from .admin import Node
from .library import install


class Job:
    """A process with its MIG device open: while it is, the driver refuses to destroy it."""

    def __init__(self, mig_uuid: str) -> None:
        self.mig_uuid = mig_uuid
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(mig_uuid)

    def work(self) -> int:
        """One step of work, which needs the very instance that was opened; the answer is its memory in MiB."""
        try:
            return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).total) >> 20
        except pynvml.NVMLError as error:
            # A handle is good for the instance it was made for, not for the next one at its place.
            raise NodeFault(f"{self.mig_uuid} went away under its program: {error}") from error

    @property
    def place(self) -> tuple[str, int, int]:
        """GPU UUID, GPU instance id and compute instance id."""
        gpu = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self._handle)
        return (
            pynvml.nvmlDeviceGetUUID(gpu),
            pynvml.nvmlDeviceGetGpuInstanceId(self._handle),
            pynvml.nvmlDeviceGetComputeInstanceId(self._handle),
        )


@contextmanager
def opened(folder: Path | str, mig_uuid: str, *, memory_mib: int = 0) -> Iterator[Job]:
    """This process as a program on that MIG device, listed by NVML among its processes."""
    node = Node(folder)
    install(folder)
    pynvml.nvmlInit()
    try:
        try:
            job = Job(mig_uuid)
        except pynvml.NVMLError as error:
            raise BadRequest(f"no MIG device {mig_uuid} on this node", hint="see: gres-mig status") from error
        gpu_uuid, gi_id, ci_id = job.place
        node.hold(gpu_uuid, gi_id, ci_id, pid=os.getpid(), memory_mib=memory_mib)
        yield job
        node.let_go(gpu_uuid, gi_id, ci_id, pid=os.getpid())
    finally:
        pynvml.nvmlShutdown()

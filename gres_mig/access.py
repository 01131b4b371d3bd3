"""One GPU's hardware, reached only under its lock, only if it is managed, and under the caller's watch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gres_mig.errors import Busy, NodeFault, NotPermitted
from gres_mig.models import Gpu, Settings
from gres_mig.nvml import Session
from gres_mig.state import Store


class Access:
    """The way to the hardware of one node; `watch` hears which GPU is being worked on, "" when none is."""

    def __init__(self, settings: Settings, store: Store, watch: Callable[[str], None]) -> None:
        self._settings, self._store, self._watch = settings, store, watch

    @contextmanager
    def locked(self, gpu_uuid: str, deadline: float) -> Iterator[None]:
        """That GPU's lock, until `deadline` (monotonic seconds); `Busy` when it is passed."""
        with self._store.gpu_lock(gpu_uuid, max(0.0, deadline - time.monotonic())) as got:
            if not got:
                raise Busy(f"{gpu_uuid} was busy with other instances for too long", hint="ask again")
            yield

    @contextmanager
    def session(self, gpu_uuid: str) -> Iterator[tuple[Session, Gpu]]:
        """A fresh session and the GPU as it is now; `NotPermitted` where it is not managed."""
        self._watch(gpu_uuid)
        try:
            with Session(self._settings.simulator, self._watch) as driver:
                gpu = driver.gpu(gpu_uuid)
                if not self._settings.manages(gpu):
                    raise NotPermitted(
                        f"{gpu_uuid} is not managed by gres-mig; nothing on it is changed",
                        hint=f"add it to gpus in {self._settings.config_path or 'the configuration'}",
                    )
                yield driver, gpu
        finally:
            self._watch("")

    def look(self, *, everything: bool = False) -> tuple[Gpu, ...]:
        """The managed GPUs as they are now, or all of the node; no lock is held.

        A fenced GPU is named but not read: the call that got it fenced would not return this time either.
        """
        fences = self._store.read().fences

        def reading(gpu: Gpu) -> str:
            return f"fenced: {fences[gpu.uuid].reason}" if gpu.uuid in fences else ""

        self._watch("the driver")
        try:
            with Session(self._settings.simulator, self._watch) as driver:
                gpus = driver.gpus(lambda gpu: everything or not gpu.uuid or self._settings.manages(gpu), reading)
        finally:
            self._watch("")
        known = tuple(gpu for gpu in gpus if everything or self._settings.manages(gpu))
        if gpus and not known and self._settings.managed:
            # One that does not even say which it is: with the others there the node can work, alone it cannot.
            raise NodeFault(
                f"no managed GPU of this node can be seen: {gpus[0].trouble}",
                hint="run: gres-mig doctor",
                code="GPULOST" if gpus[0].lost else "NVML",
            )
        return known

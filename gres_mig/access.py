"""One GPU's hardware, reached only under its lock, only if it is managed, and under the caller's watch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from gres_mig.errors import Busy, NodeFault, NotPermitted
from gres_mig.models import Gpu, Record, Settings
from gres_mig.nvml import Session
from gres_mig.state import Store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gres_mig.exporter import JobMapping


class Access:
    """The way to the hardware of one node; `watch` hears which GPU is being worked on, "" when none is."""

    def __init__(self, settings: Settings, store: Store, watch: Callable[[str], None]) -> None:
        self._settings, self._store, self._watch = settings, store, watch
        self._mapping: JobMapping | None = None
        # Imports that are paid only where their settings say so, here and below: every job waits for them twice.
        if settings.dcgm_mapping or settings.dcgm_sighup:
            from gres_mig.exporter import JobMapping

            self._mapping = JobMapping(settings, store.read)

    def tell(self, gpu_uuid: str) -> None:
        """Let dcgm-exporter know who is on that GPU now, where it is told."""
        if self._mapping:
            self._mapping.show(gpu_uuid)

    @contextmanager
    def locked(self, gpu_uuid: str, deadline: float) -> Iterator[None]:
        """That GPU's lock, until `deadline` (monotonic seconds); `Busy` when it is passed."""
        with self._store.gpu_lock(gpu_uuid, max(0.0, deadline - time.monotonic())) as got:
            if not got:
                raise Busy(f"{gpu_uuid} was busy with other instances for too long", hint="ask again")
            # Before, for an instance that is made now may have the id of one that is still told there.
            self.tell(gpu_uuid)
            try:
                yield
            finally:
                if self._mapping:
                    self._mapping.leave(gpu_uuid)

    @contextmanager
    def session(self, gpu_uuid: str, record: Record | None = None) -> Iterator[tuple[Session, Gpu]]:
        """A fresh session and the GPU as it is now; `NotPermitted` where it is not managed.

        `record` is the one whose slice is to be made.
        """
        self._watch(gpu_uuid)
        try:
            with self._session(record) as driver:
                gpu = driver.gpu(gpu_uuid)
                if not self._settings.manages(gpu):
                    raise NotPermitted(
                        f"{gpu_uuid} is not managed by gres-mig; nothing on it is changed",
                        hint=f"add it to gpus in {self._settings.config_path or 'the configuration'}",
                    )
                self._saw([gpu])
                yield driver, gpu
        finally:
            self._watch("")

    def settle_mapping(self) -> None:
        """Set right what a crash left of the exporter's files; where a GPU's lock is held, its holder does that."""
        if self._mapping is None:
            return
        if self._mapping.is_of_unknown_gpus():
            with suppress(NodeFault):
                self.look()
        for gpu_uuid in self._mapping.wrong():
            with suppress(Busy), self.locked(gpu_uuid, time.monotonic()):
                # To take the lock is all: what is wrong is written then.
                continue
        self._mapping.reload()

    def look(self, *, everything: bool = False) -> tuple[Gpu, ...]:
        """The managed GPUs as they are now, or all of the node; no lock is held.

        A fenced GPU is named but not read: the call that got it fenced would not return this time either.
        """
        fences = self._store.read().fences

        def reading(gpu: Gpu) -> str:
            return f"fenced: {fences[gpu.uuid].reason}" if gpu.uuid in fences else ""

        self._watch("the driver")
        try:
            with self._session() as driver:
                gpus = driver.gpus(lambda gpu: everything or not gpu.uuid or self._settings.manages(gpu), reading)
        finally:
            self._watch("")
        self._saw(gpus)
        known = tuple(gpu for gpu in gpus if everything or self._settings.manages(gpu))
        if gpus and not known and (self._settings.managed or self._settings.slicing.gpus):
            # One that does not even say which it is: with the others there the node can work, alone it cannot.
            raise NodeFault(
                f"no managed GPU of this node can be seen: {gpus[0].trouble}",
                hint="run: gres-mig doctor",
                code="GPULOST" if gpus[0].lost else "NVML",
            )
        return known

    def _saw(self, gpus: Sequence[Gpu]) -> None:
        if self._mapping:
            self._mapping.saw(gpus)

    def _session(self, record: Record | None = None) -> Session:
        if not self._settings.slicing.gpus:
            return Session(self._settings.simulator, self._watch)
        from gres_mig.slice_session import SliceSession

        return SliceSession(self._settings, self._watch, self._store.read().records, record)

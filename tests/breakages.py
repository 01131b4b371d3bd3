"""The design broken on purpose: each of these must be found by the tests that kill and stop, or they are no tests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from gres_mig import access, allocator, nvml, settle, state
from gres_mig.models import Gpu, Instance, Intent, Record, Release, State
from gres_mig.values import replace


def skip_the_intent() -> None:
    """What is about to be made is known to its maker only, and recorded when it is there."""
    encode, decode, begin = state.encode, state.decode, allocator.Allocator.__init__
    mine: dict[str, Record] = {}

    def encode_without_intents(whole: State) -> bytes:
        mine.clear()
        mine.update({record.nonce: record for record in whole.records if isinstance(record, Intent)})
        return encode(replace(whole, records=tuple(r for r in whole.records if r.nonce not in mine)))

    def decode_with_mine(data: bytes) -> State:
        whole = decode(data)
        return replace(whole, records=(*whole.records, *mine.values()))

    def begin_with_none(self: allocator.Allocator, *arguments: Any, **named: Any) -> None:
        mine.clear()
        begin(self, *arguments, **named)

    state.encode, state.decode = encode_without_intents, decode_with_mine
    allocator.Allocator.__init__ = begin_with_none


def list_by_mig_device() -> None:
    """A look finds MIG devices, so that a GPU instance without a compute instance is not seen."""
    one, several = nvml.Session.gpu, nvml.Session.gpus

    def with_mig_devices(gpu: Gpu) -> Gpu:
        return replace(gpu, instances=tuple(instance for instance in gpu.instances if not instance.bare))

    def gpu(self: nvml.Session, uuid: str) -> Gpu:
        return with_mig_devices(one(self, uuid))

    def gpus(self: nvml.Session, *arguments: Any) -> tuple[Gpu, ...]:
        return tuple(with_mig_devices(each) for each in several(self, *arguments))

    nvml.Session.gpu = gpu
    nvml.Session.gpus = gpus


def own_by_uuid_only() -> None:
    """What is at a release's place is ours, unless it has a MIG UUID and the release another."""

    def judge(self: settle.Settler, nonce: str, found: Instance | None) -> settle.Outcome | Literal["ours"] | None:
        with self._store.transaction() as node:
            record = node.state.get(nonce)
            if not isinstance(record, Release):
                return None
            if found is None:
                return self._forget(node.save, node.state, record, "gone")
            if not found.bare and record.mig_uuid not in {"", *(c.mig_uuid for c in found.compute_instances)}:
                return self._forget(node.save, node.state, record, "foreign")
        return "ours"

    settle.Settler._judge = judge


def settle_without_the_gpu_lock() -> None:
    """Whoever settles what is recorded does not wait for the one that works on the GPU."""
    settle_under_lock, lock = allocator.Allocator._settle, access.Access.locked
    settling: list[object] = []

    def settle_at_once(self: allocator.Allocator, *arguments: Any, **named: Any) -> settle.Outcome | None:
        settling.append(self)
        try:
            return settle_under_lock(self, *arguments, **named)
        finally:
            settling.pop()

    def locked(self: access.Access, *arguments: Any, **named: Any) -> AbstractContextManager[None]:
        return nullcontext() if settling else lock(self, *arguments, **named)

    allocator.Allocator._settle = settle_at_once
    access.Access.locked = locked


BREAKAGES: dict[str, Callable[[], None]] = {
    "skip-the-intent": skip_the_intent,
    "list-by-mig-device": list_by_mig_device,
    "own-by-uuid-only": own_by_uuid_only,
    "settle-without-the-gpu-lock": settle_without_the_gpu_lock,
}

"""What the node has, from what was last published: its sizes with how many of each are free, and its GPUs' memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gres_mig import machine, placement, published, slices
from gres_mig.errors import NoCapacity, NodeFault
from gres_mig.models import Allocation, Gpu, Profile, Record, Release, Request, Settings, State
from gres_mig.placement import Room
from gres_mig.published import Published
from gres_mig.rooms import room
from gres_mig.state import Store
from gres_mig.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

Offer = tuple[Profile, int]
"""A size that a GPU has, and how many of it could be made there now."""


def shelf(settings: Settings) -> dict[str, Any]:
    """The sizes by model and memory; of each GPU its memory, what is held of it and what it could still give.

    It takes a millisecond or two and calls no driver, so that the service's loop does it itself.
    """
    last = last_seen(settings)
    rooms = [room(gpu, last.state) for gpu in last.gpus if settings.manages(gpu)]
    free_mib = max((slices.largest_mib(here, settings) for here in rooms if _shares(here)), default=0)
    offers = {here.gpu.uuid: list(_offers(here, settings, free_mib)) for here in rooms}
    return {
        "looked": last.looked or None,
        "sizes": list(_sizes([here.gpu for here in rooms], offers)),
        "gpus": [_gpu(here, offers[here.gpu.uuid], last.state, settings) for here in rooms],
    }


def last_seen(settings: Settings) -> Published:
    """What was last published, with what has gone since taken out of what the driver called full then."""
    boot_id = machine.boot_id(settings.simulator)
    last = published.read(Store(settings, boot_id), boot_id)
    return replace(last, gpus=tuple(_as_it_may_be(gpu, last.state) for gpu in last.gpus))


def _as_it_may_be(gpu: Gpu, state: State) -> Gpu:
    held = [i.profile_id for i in gpu.instances] + [r.profile_id for r in state.records if r.gpu_uuid == gpu.uuid]
    full = (p.id for p in gpu.profiles if p.id in gpu.full_profiles and held.count(p.id) >= p.instance_count)
    return replace(gpu, full_profiles=frozenset(full))


def _sizes(gpus: Sequence[Gpu], offers: Mapping[str, Sequence[Offer]]) -> Iterator[dict[str, Any]]:
    """By model and memory: what is made on one GPU takes nothing from another, so that the sum is what the node has."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for gpu in gpus:
        for profile, free in offers[gpu.uuid]:
            first = {"profile": profile.name, "memory_mib": profile.memory_mib, "model": gpu.model, "free": 0}
            found.setdefault((gpu.model, profile.memory_mib), first)["free"] += free
    return (found[key] for key in sorted(found))


def _offers(here: Room, settings: Settings, free_mib: int) -> Iterator[Offer]:
    """Those of one memory lie in the same slices, and the preferred one stands for them."""
    if here.gpu.sliced:
        yield from _slices(here, settings, free_mib)
    exact = replace(settings, upsize=False)
    for memory_mib in sorted({profile.memory_mib for profile in placement.allowed(here.gpu, settings)}):
        request = Request(memory_mib)
        for preferred, *_ in placement.tiers(here.gpu, request, exact):
            yield preferred, _free(here, request, exact)


def _slices(here: Room, settings: Settings, free_mib: int) -> Iterator[Offer]:
    """A slice has any size: some to choose from, and the largest that is free on this node now."""
    overhead_mib, left_mib = slices.overhead_mib(here.gpu, settings), slices.largest_mib(here, settings)
    known = slices.sizes_mib(slices.capacity_mib(here.gpu, settings), overhead_mib)
    for mib in sorted({*known, free_mib}):
        if 0 < mib <= max(known, default=0):
            several = (left_mib + overhead_mib) // (mib + overhead_mib) if left_mib and _shares(here) else 0
            yield slices.profile(mib), several


def _shares(here: Room) -> bool:
    return here.gpu.sliced and not here.closed


def _free(here: Room, request: Request, exact: Settings) -> int:
    """Counted as they would be made, one after the other, by the product's own choice."""
    made = 0
    while True:
        try:
            choice = placement.choose([here], request, exact)
        except (NoCapacity, NodeFault):
            return made
        made += 1
        # What the driver says is left of a profile is known for the first one only; the places bound the others.
        held_mib = here.held_mib + choice.profile.memory_mib
        here = replace(here, busy=(*here.busy, choice.placement), held_mib=held_mib)


def _gpu(here: Room, offers: Sequence[Offer], state: State, settings: Settings) -> dict[str, Any]:
    gpu = here.gpu
    records: dict[str, dict[str, int]] = {}
    for record in state.records:
        if record.gpu_uuid == gpu.uuid:
            counts = records.setdefault(_kind(record), {})
            counts[record.profile_name] = counts.get(record.profile_name, 0) + 1
    return {
        "gpu": gpu.index,
        "uuid": gpu.uuid,
        "memory_mib": gpu.memory_mib,
        "reserved_mib": gpu.memory_mib - slices.capacity_mib(gpu, settings) if gpu.sliced else settings.reserve_mib,
        "held_mib": here.held_mib,
        "closed": bool(here.closed),
        "fenced": gpu.uuid in state.fences,
        "records": records,
        "free": {} if gpu.sliced else {profile.name: free for profile, free in offers},
    }


def _kind(record: Record) -> str:
    if isinstance(record, Release):
        return "stuck" if record.stuck else "release"
    if isinstance(record, Allocation):
        return "lost" if record.lost else "allocation"
    return "intent"

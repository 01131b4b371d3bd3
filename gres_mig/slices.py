"""Pure choice among GPUs that are shared by slices: what each has left, and which has the least that is enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from gres_mig.errors import BadRequest, GresMigError, NoCapacity, NodeFault, TooBig
from gres_mig.models import Gpu, Placement, Profile, Record, Release, Request, Settings
from gres_mig.placement import Choice, Room
from gres_mig.sizes import format_mib
from gres_mig.slice_models import DRIVER_LIMIT, MOST_SLICES, SLICE_PROFILE

NAME = "slice"
_OVERHEAD_MIB = 512
"""What HAMi-core does not count: contexts of the driver, pools, arrays (HAMi issue 952)."""
_MOST_TRIED = 16


def capacity_mib(gpu: Gpu, settings: Settings) -> int:
    """What slices and their overhead may take of that GPU together."""
    reserve_mib = settings.slicing.reserve_mib
    if reserve_mib < 0:
        reserve_mib = max(1024, -(-gpu.memory_mib * 3 // 100))
    return gpu.memory_mib - gpu.reserved_mib - reserve_mib


def overhead_mib(gpu: Gpu, settings: Settings) -> int:
    """What each new slice of that GPU takes beyond its size."""
    if settings.slicing.overhead_mib >= 0:
        return settings.slicing.overhead_mib
    # Contexts count inside the driver's own limit (NVIDIA's figures: 30,000 MiB gave 29,184 MiB of tensors).
    return 0 if gpu.backend == DRIVER_LIMIT else _OVERHEAD_MIB


def largest_mib(room: Room, settings: Settings) -> int:
    """The largest slice that there is room for now, whether the GPU takes new work or not; 0: none."""
    left = capacity_mib(room.gpu, settings) - room.held_mib - overhead_mib(room.gpu, settings)
    return max(0, left) if _number(room) is not None else 0


def sizes_mib(whole_mib: int, overhead_mib: int) -> tuple[int, ...]:
    """Sizes to choose from in a list: an eighth, a quarter and a half of a GPU in whole GiB, and the most."""
    parts = [(whole_mib // number - overhead_mib) >> 10 << 10 for number in (8, 4, 2)]
    return tuple(sorted({mib for mib in (*parts, whole_mib - overhead_mib) if mib > 0}))


def profile(memory_mib: int) -> Profile:
    """A slice of that size, as what would be made on a GPU is shown."""
    return Profile(SLICE_PROFILE, NAME, memory_mib, 0, 0, MOST_SLICES, ())


def choose(rooms: Sequence[Room], request: Request, settings: Settings) -> Choice:
    """The GPU with the least room that holds the request, so that larger ones stay whole for larger requests."""
    if request.profile:
        raise BadRequest(f"no profile {request.profile} can be had as a slice", hint="ask for a memory size")
    able = [room for room in rooms if not room.closed and largest_mib(room, settings) >= request.memory_mib]
    if not able:
        raise _refusal(rooms, request, settings)
    best = min(able, key=lambda room: (largest_mib(room, settings), room.gpu.index))
    return _choice(best, request, settings)


def emptiest(rooms: Sequence[Room], kept: Mapping[str, int], request: Request, settings: Settings) -> Choice | None:
    """Where room may come for a request that has none now: on the GPU with the most, `kept` MiB of which never come."""
    able = [
        room
        for room in rooms
        if room.gpu.sliced
        and not (room.closed or request.profile or request.isolation)
        and request.memory_mib + overhead_mib(room.gpu, settings) + kept.get(room.gpu.uuid, 0)
        <= capacity_mib(room.gpu, settings)
    ]
    if not able:
        return None
    best = max(able, key=lambda room: (capacity_mib(room.gpu, settings) - room.held_mib, -room.gpu.index))
    return _choice(best, request, settings)


def makes_room(room: Room, records: Sequence[Record], request: Request, settings: Settings) -> tuple[Record, ...]:
    """The fewest records whose end would make room there, and of those the smallest; empty where none would."""
    missing_mib = request.memory_mib - largest_mib(room, settings)
    largest_first = sorted(records, key=_takes_mib, reverse=True)
    for number in range(1, len(records) + 1):
        if sum(map(_takes_mib, largest_first[:number])) >= missing_mib:
            # Of very many the largest do: to look for the smallest among all would take for ever.
            few = largest_first if len(records) <= _MOST_TRIED else largest_first[:number]
            enough = [ending for ending in combinations(few, number) if sum(map(_takes_mib, ending)) >= missing_mib]
            return min(enough, key=_loss)
    return ()


def _loss(ending: tuple[Record, ...]) -> tuple[int, int]:
    return sum(isinstance(r, Release) and r.stuck is not None for r in ending), sum(map(_takes_mib, ending))


def _takes_mib(record: Record) -> int:
    return record.memory_mib + record.overhead_mib


def _choice(room: Room, request: Request, settings: Settings) -> Choice:
    place = Placement(_number(room) or 0, 1)
    return Choice(room.gpu.uuid, profile(request.memory_mib), place, room.gpu.backend, overhead_mib(room.gpu, settings))


def _number(room: Room) -> int | None:
    """The lowest number that no slice of the GPU has."""
    return next((number for number in range(MOST_SLICES) if not room.taken >> number & 1), None)


def _refusal(rooms: Sequence[Room], request: Request, settings: Settings) -> GresMigError:
    # One that was not read does not even tell its memory.
    read = [room for room in rooms if room.gpu.memory_mib]
    empty_mib = max((capacity_mib(r.gpu, settings) - overhead_mib(r.gpu, settings) for r in read), default=0)
    if len(read) == len(rooms) and request.memory_mib > empty_mib:
        return TooBig(f"no slice on this node holds {request}: the largest is {format_mib(max(0, empty_mib))}")
    reasons = "; ".join(f"GPU {room.gpu.index} ({room.gpu.uuid}): {room.closed}" for room in rooms if room.closed)
    opened = [room for room in rooms if not room.closed]
    if not opened:
        message = f"no shared GPU of this node takes new work: {reasons}"
        return NodeFault(message, hint="run: gres-mig doctor", code="HEALTH")
    most = max(opened, key=lambda room: largest_mib(room, settings))
    free = f"the largest that is free is {format_mib(largest_mib(most, settings))}, on GPU {most.gpu.index}"
    more = f"; {len(rooms) - len(opened)} more GPU(s) take no new work" if reasons else ""
    hint = f"run: gres-mig why {request.memory_mib}"
    return NoCapacity(f"no room for a slice of {request} on this node: {free}{more}", hint=hint)

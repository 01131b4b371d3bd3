"""Pure choice: which profile, which GPU, which start."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cached_property

from gres_mig.errors import BadRequest, GresMigError, NoCapacity, NodeFault, TooBig
from gres_mig.menu import Rank, menu_of, size_of
from gres_mig.models import Gpu, Placement, Profile, Request, Settings
from gres_mig.values import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_Key = tuple[float, float, int]
_Able = tuple["Room", tuple[Profile, ...]]


class Room(Value):
    """One managed GPU as the chooser sees it: what may be made on it, and what is in the way."""

    gpu: Gpu
    busy: tuple[Placement, ...] = ()
    """What the hardware holds and what records hold; the same place twice is one place."""
    held_mib: int = 0
    """Memory of all instances and records on it, which the reserve is counted against."""
    full: frozenset[int] = frozenset()
    """Profile ids of which the driver says that no further instance can be made now."""
    closed: str = ""
    """Why this GPU takes no new work (fenced, MIG off, lost); empty when it does."""

    @cached_property
    def taken(self) -> int:
        """The busy slices as bits."""
        mask = 0
        for placement in self.busy:
            mask |= placement.mask
        return mask


class Choice(Value):
    """Make this profile here."""

    gpu_uuid: str
    profile: Profile
    placement: Placement
    slice: str = ""
    """What is to hold a slice to its memory; empty: it is a GPU instance."""
    overhead_mib: int = 0

    @property
    def takes_mib(self) -> int:
        """What a slice takes of its GPU's memory; 0 where the placement says all."""
        return self.profile.memory_mib + self.overhead_mib if self.slice else 0

    def recorded(self) -> dict[str, Any]:
        """What a record says of it."""
        return {
            "gpu_uuid": self.gpu_uuid,
            "profile_id": self.profile.id,
            "profile_name": self.profile.name,
            "memory_mib": self.profile.memory_mib,
            "placement": self.placement,
            "slice": self.slice,
            "overhead_mib": self.overhead_mib,
        }


def choose(rooms: Sequence[Room], request: Request, settings: Settings) -> Choice:
    """The best legal place for `request` among the managed GPUs, or the error that says what is in the way.

    The exact size of every GPU is searched on all of them, smaller memory first, before any gives more than that.
    """
    asked = asked_of(rooms, request)
    best: dict[Rank, tuple[_Key, Room, Profile, Placement]] = {}
    for room in asked:
        if room.closed:
            continue
        menu, most_mib, served = menu_of(room.gpu, settings), _most_mib(room.gpu, settings), None
        for rank, profile in menu.ranked(request, most_mib, settings.upsize):
            # Profiles of one size come preferred first and give way GPU by GPU. To try the first of them on all GPUs
            # before the next would open every H200 for a 4g at start 0 and leave none whole (docs/placement.md).
            if rank == served or profile.id in room.full or room.held_mib + profile.memory_mib > most_mib:
                continue
            found = menu.least_damage(profile, room.taken)
            if found is not None:
                served = rank
                damage, placement = found
                key = _key(settings.placement, damage, 1 - room.taken.bit_count() / menu.slices, room.gpu.index)
                if rank not in best or key < best[rank][0]:
                    best[rank] = key, room, profile, placement
    if best:
        _, room, profile, placement = best[min(best)]
        return Choice(room.gpu.uuid, profile, placement)
    raise _refusal(rooms, asked, request, settings)


def allowed(gpu: Gpu, settings: Settings) -> tuple[Profile, ...]:
    """What a request for memory may be given on that GPU: the names listed for its model, or every plain profile."""
    return menu_of(gpu, settings).allowed


def tiers(gpu: Gpu, request: Request, settings: Settings) -> tuple[tuple[Profile, ...], ...]:
    """The profiles this request may take on that GPU by memory, each tier preferred first; the first is the exact size.

    Empty when the GPU could not serve the request even if nothing ran on it; more than one tier only with `upsize`.
    """
    return menu_of(gpu, settings).tiers(request, _most_mib(gpu, settings), settings.upsize)


def places(room: Room, profile: Profile) -> tuple[int, int]:
    """How many of the profile's legal placements are free, and how many there are."""
    free = 0 if profile.id in room.full else sum(not p.mask & room.taken for p in profile.placements)
    return free, len(profile.placements)


def _most_mib(gpu: Gpu, settings: Settings) -> int:
    # Without a reserve NVML's placements alone decide: what a GPU says its memory is has moved with the driver
    # (an A100 40GB: 40,536 MiB before R510, 40,960 after) and its profiles' sizes with it.
    return gpu.memory_mib - settings.reserve_mib if settings.reserve_mib else sys.maxsize


def _key(policy: str, damage: int, free: float, index: int) -> _Key:
    if policy == "spread":
        return -free, damage, index
    if policy == "binpack":
        return free, damage, index
    return damage, free, index


def asked_of(rooms: Sequence[Room], request: Request) -> Sequence[Room]:
    """The GPUs that the request may go to; raises where it names another or asks for nothing."""
    if not rooms:
        raise NodeFault("no GPU of this node is managed", hint="run: gres-mig setup", code="CONFIG")
    if request.memory_mib <= 0 and not request.profile:
        raise BadRequest(f"{request.memory_mib:,} MiB is no size to ask for; ask for at least 1 MiB")
    if not request.gpus:
        return rooms
    wanted = {name.lower(): name for name in request.gpus}
    asked = [room for room in rooms if not _names(room.gpu).isdisjoint(wanted)]
    unknown = set(wanted).difference(*(_names(room.gpu) for room in asked))
    if unknown:
        known = ", ".join(room.gpu.uuid for room in rooms)
        named = ", ".join(wanted[name] for name in sorted(unknown))
        raise BadRequest(f"{named} is no managed GPU of this node; managed: {known}")
    return asked


def named(gpus: Sequence[Gpu], text: str) -> Gpu:
    """The one that an admin named; an index is no name, for it may be another GPU tomorrow."""
    for gpu in gpus:
        if text.lower() in _names(gpu):
            return gpu
    there = ", ".join(gpu.uuid for gpu in gpus) or "none"
    raise BadRequest(f"{text!r} is no GPU of this node", hint=f"its GPUs: {there}")


def _names(gpu: Gpu) -> set[str]:
    """What an admin may call it, in lower case: its UUID, or its PCI address with a domain of 8 digits, 4 or none."""
    address = gpu.pci_bus_id.lower()
    return {gpu.uuid.lower(), address, address[4:], address.partition(":")[2]} - {""}


def _refusal(rooms: Sequence[Room], asked: Sequence[Room], request: Request, settings: Settings) -> GresMigError:
    where = "this node" if len(asked) == len(rooms) else ", ".join(room.gpu.uuid for room in asked)
    able = [(room, steps[0]) for room in asked if (steps := tiers(room.gpu, request, settings))]
    # A GPU that was not read, fenced or lost say, may yet turn out able: it does not even tell its memory.
    never = not able and all(
        room.gpu.profiles or (room.gpu.mig_current is None and room.gpu.memory_mib) for room in asked
    )
    if never and any(room.gpu.profiles for room in asked):
        return _never(asked, request, settings, where)
    reasons = "; ".join(f"GPU {room.gpu.index} ({room.gpu.uuid}): {room.closed}" for room in asked if room.closed)
    if all(room.closed for room in rooms):
        message = f"no managed GPU of this node takes new work: {reasons}"
        return NodeFault(message, hint="run: gres-mig doctor", code="HEALTH")
    if never:
        return BadRequest(f"{where} has no MIG", hint="to share GPUs without MIG see: docs/slices.md")
    size_mib = request.memory_mib or next((tier[0].memory_mib for _, tier in able), 0)
    more = " --isolation mig" if request.isolation else ""
    hint = f"run: gres-mig why {size_mib}{more}" if size_mib else "run: gres-mig status"
    ready = [(room, tier) for room, tier in able if not room.closed]
    if not ready:
        message = f"no room for {request} on {where}: what could hold it takes no new work: {reasons}"
        return NoCapacity(message, hint=hint)
    reason, scattered = _blocked(ready, settings)
    if len(ready) < len(able):
        reason += f"; {len(able) - len(ready)} more GPU(s) take no new work"
    return NoCapacity(f"no room for {request} on {where}: {reason}", hint=hint, code="FRAG" if scattered else "")


def _blocked(ready: Sequence[_Able], settings: Settings) -> tuple[str, bool]:
    """What is in the way, and whether it is only how the free slices lie."""
    counts: dict[str, list[int]] = {}
    for room, tier in ready:
        for profile in tier:
            free, total = places(room, profile)
            count = counts.setdefault(profile.name, [0, 0, 0])
            count[0] += free
            count[1] += total
            # The driver has none left where all are taken, too; it is the reason only where a place looks free.
            count[2] += profile.id in room.full and any(not p.mask & room.taken for p in profile.placements)
    reasons = []
    for name, (free, total, full) in counts.items():
        if free:
            reasons.append(f"the reserve of {settings.reserve_mib:,} MiB a GPU leaves no memory for {name}")
        elif full:
            reasons.append(f"the driver has none of the {total} places for {name} left")
        else:
            reasons.append(f"{total} of {total} places for {name} are taken")
    reason = " and ".join(reasons)
    if not any(free or full for free, _, full in counts.values()):
        for slices, needed in _slices(ready, settings):
            if slices >= needed:
                return f"{reason}, though {slices} free slices would hold its {needed} if they lay together", True
    return reason, False


def _slices(ready: Sequence[_Able], settings: Settings) -> Iterable[tuple[int, int]]:
    fillable: dict[str, int] = {}
    needed: dict[str, int] = {}
    for room, (profile, *_) in ready:
        menu = menu_of(room.gpu, settings)
        fillable[profile.name] = fillable.get(profile.name, 0) + menu.fillable(room.taken)
        needed[profile.name] = size_of(profile)
    return zip(fillable.values(), needed.values(), strict=True)


def _never(asked: Sequence[Room], request: Request, settings: Settings, where: str) -> GresMigError:
    had = [
        profile
        for room in asked
        for profile in (menu_of(room.gpu, settings).nameable if request.profile else allowed(room.gpu, settings))
        if profile.memory_mib <= _most_mib(room.gpu, settings)
    ]
    if not had:
        message = f"the allow-list and the reserve leave no profile on {where}"
        return NodeFault(message, hint="run: gres-mig profiles", code="CONFIG")
    if request.profile:
        names = dict.fromkeys(p.name for p in sorted(had, key=lambda p: (p.memory_mib, p.name)))
        return BadRequest(f"no profile {request.profile} can be had on {where}; there are: {', '.join(names)}")
    largest = max(had, key=lambda p: p.memory_mib)
    return TooBig(f"no instance on {where} holds {request}: the largest is {largest.name} ({largest.memory_mib:,} MiB)")

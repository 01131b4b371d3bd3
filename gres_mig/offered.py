"""The sizes a node offers to a request for memory, and how many of each could be made now."""

from __future__ import annotations

from collections.abc import Sequence

from gres_mig import placement
from gres_mig.errors import NoCapacity, NodeFault
from gres_mig.models import Gpu, Profile, Request, Settings, State
from gres_mig.placement import Room
from gres_mig.rooms import room
from gres_mig.values import Value, replace


class Size(Value):
    """One size of one model of GPU, by the profile that an ask for that memory is given first."""

    profile: str
    memory_mib: int
    model: str
    free: int


def sizes(gpus: Sequence[Gpu], state: State, settings: Settings) -> tuple[Size, ...]:
    """All sizes of the managed GPUs, by model and memory."""
    models: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        if settings.manages(gpu):
            models.setdefault(gpu.model, []).append(gpu)
    return tuple(
        Size(profile.name, profile.memory_mib, model, _free([room(gpu, state) for gpu in alike], profile, settings))
        for model, alike in sorted(models.items())
        for profile in _profiles(alike, settings)
    )


def _profiles(gpus: Sequence[Gpu], settings: Settings) -> list[Profile]:
    """One for each size: those of one memory lie in the same slices, and the preferred one stands for them."""
    found: dict[int, Profile] = {}
    for gpu in gpus:
        for profile in placement.allowed(gpu, settings):
            tier = placement.tiers(gpu, Request(profile.memory_mib), replace(settings, upsize=False))
            for preferred in tier[:1]:
                found.setdefault(profile.memory_mib, preferred[0])
    return [found[memory_mib] for memory_mib in sorted(found)]


def _free(rooms: list[Room], profile: Profile, settings: Settings) -> int:
    """Counted as they would be made, one after the other, by the product's own choice."""
    request, exact, made = Request(profile.memory_mib), replace(settings, upsize=False), 0
    while True:
        try:
            choice = placement.choose(rooms, request, exact)
        except (NoCapacity, NodeFault):
            return made
        made += 1
        rooms = [_with(each, choice) if each.gpu.uuid == choice.gpu_uuid else each for each in rooms]


def _with(where: Room, choice: placement.Choice) -> Room:
    # What the driver says is left of a profile is known for the first one only; the places bound the others.
    held = where.held_mib + choice.profile.memory_mib
    return replace(where, busy=(*where.busy, choice.placement), held_mib=held)

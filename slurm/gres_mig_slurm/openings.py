"""Pure: which sizes a node lets jobs in for, from its GPUs, from who waits, and from how long each has been closed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gres_mig import rooms
from gres_mig.errors import GresMigError
from gres_mig.menu import menu_of
from gres_mig.models import Gpu, Request, Settings
from gres_mig.placement import Room, choose, tiers
from gres_mig.values import Value, replace
from gres_mig_slurm.delayed import MOST_WAKES, PATIENCE_S, Delayed

PREFIX = "migmem-"
"""The feature of a size is this and its MiB; hooks/job_submit.gates.lua makes the same."""

TRY = "-try"
"""A second feature with this lets batch jobs alone in: a terminal would be cancelled where it finds no place."""


class Spell(Value):
    """How long a size has been closed."""

    closed: float
    """Since when; openings that were too short for whoever waits do not count."""
    opened: float = 0.0
    """When it was opened again; 0: it is closed."""


def feature(memory_mib: int) -> str:
    """The feature of nodes that have a place for that size."""
    return f"{PREFIX}{memory_mib}"


def features(gpu: Gpu, request: Request, settings: Settings) -> tuple[str, ...]:
    """The feature of the exact size of that request on a GPU, if it has one."""
    return tuple(feature(tier[0].memory_mib) for tier in tiers(gpu, request, settings)[:1])


def sizes(gpus: Iterable[Gpu], settings: Settings) -> dict[str, tuple[Request, ...]]:
    """By feature what can be asked for: a size, and where none is given by size, the profiles by their names."""
    found: dict[str, dict[Request, None]] = {}
    for gpu in gpus:
        menu = menu_of(gpu, settings)
        given = {p.memory_mib for p in menu.allowed}
        for p in menu.nameable:
            asked = Request(p.memory_mib) if p.memory_mib in given else Request(0, p.name)
            found.setdefault(feature(p.memory_mib), {})[asked] = None
    return {name: tuple(asked) for name, asked in found.items()}


def with_place(free: Sequence[Room], waiting: Sequence[Delayed], settings: Settings) -> frozenset[str]:
    """The sizes that have a place which is kept for nobody."""
    left = rooms.without(tuple(free), {}, [place for job in waiting if (place := job.held)])
    asked = sizes((room.gpu for room in free), settings)
    return frozenset(name for name, requests in asked.items() if any(_fits(left, each, settings) for each in requests))


def called(free: Sequence[Room], waiting: Sequence[Delayed], settings: Settings, now: float) -> frozenset[str]:
    """The sizes of gated jobs that were told to begin by now on the places that are kept for them."""
    return frozenset(
        name
        for job in waiting
        if job.gated and 0 < job.woken <= now <= job.woken + PATIENCE_S
        for room in free
        if room.gpu.uuid == job.gpu_uuid
        for name in features(room.gpu, job.request, settings)
    )


def sounded(
    spells: Mapping[str, Spell], begun: Iterable[float], waiting: Sequence[Delayed], gpus: int, settings: Settings,
    now: float,
) -> frozenset[str]:  # fmt: skip
    """The sizes that are tried without a place, so that who has waited too long for one fails here and is known.

    Who waits behind a closed gate, only the controller knows, and on a large cluster it cannot be asked: every node
    would have its whole queue told. So a size is sounded when it has been closed for longer than `aged` and something
    has begun here since (`begun`), which it may have been kept closed for; and only until as many are known as
    places are kept for. Where nobody waits, it costs nothing.
    """
    known = sum(job.gated and job.wakes < MOST_WAKES for job in waiting)
    if known >= max(1, gpus // 2):
        return frozenset()
    last = max(begun, default=0.0)
    return frozenset(
        name
        for name, spell in spells.items()
        if not spell.opened and now - spell.closed > settings.aged_s and last > spell.closed
    )


def followed(spells: Mapping[str, Spell], names: Iterable[str], opened: frozenset[str], now: float) -> dict[str, Spell]:
    """The spells of these sizes with those open that are so now."""
    found = {}
    for name in names:
        spell = spells.get(name)
        if name in opened:
            if spell:
                found[name] = spell if spell.opened else replace(spell, opened=now)
        elif spell is None or was_open(spell, now):
            found[name] = Spell(now)
        else:
            found[name] = replace(spell, opened=0.0)
    return found


def was_open(spell: Spell, now: float) -> bool:
    """Whether it has been open for so long that nobody can be waiting for it."""
    return spell.opened > 0 and now - spell.opened >= PATIENCE_S


def _fits(free: list[Room], request: Request, settings: Settings) -> bool:
    try:
        choose(free, request, settings)
    except GresMigError:
        return False
    return True

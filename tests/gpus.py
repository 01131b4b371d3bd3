"""Rooms with the figures of real boards, for the tests of the choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gres_mig.errors import NoCapacity
from gres_mig.models import GPU_VARIANTS, Gpu, Placement, Profile, Request, Settings
from gres_mig.placement import Choice, Room, choose
from gres_mig.simulator import boards
from gres_mig.values import replace

SETTINGS = Settings("", "", managed=("*",))
A100_MENU = {boards.board("a100-40", "").model: ("1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb")}
FOUR_PROFILES = replace(SETTINGS, allowed=A100_MENU)


def gpu(board: str, index: int = 0) -> Gpu:
    """A GPU with the figures of a simulated board."""
    figures = boards.board(board, "")
    profiles = tuple(
        Profile(
            p.id,
            p.name,
            p.memory_mib,
            p.slices,
            p.multiprocessors,
            p.instance_count,
            tuple(Placement(start, p.size) for start in p.starts),
            p.enum in GPU_VARIANTS,
        )
        for p in figures.profiles
    )
    mig = True if profiles else None
    bus, memory_mib = f"00000000:{index + 1:02X}:00.0", figures.memory_bytes >> 20
    return Gpu(f"GPU-{board}-{index}", index, index, bus, figures.model, memory_mib, mig, mig, profiles)


def rooms(board: str, count: int) -> list[Room]:
    """That many empty GPUs of one model."""
    return [Room(gpu(board, i)) for i in range(count)]


def busy(room: Room, *placements: tuple[int, int]) -> Room:
    """The same GPU with these (start, size) taken too."""
    return replace(room, busy=(*room.busy, *(Placement(*p) for p in placements)))


def fill(node: Sequence[Room], request: Request, settings: Settings = SETTINGS) -> Iterator[tuple[Choice, list[Room]]]:
    """One choice after the other, each taken, until there is no room."""
    node = list(node)
    while True:
        try:
            choice = choose(node, request, settings)
        except NoCapacity:
            return
        i = next(i for i, room in enumerate(node) if room.gpu.uuid == choice.gpu_uuid)
        placement = choice.placement
        held_mib = node[i].held_mib + choice.profile.memory_mib
        node[i] = replace(busy(node[i], (placement.start, placement.size)), held_mib=held_mib)
        yield choice, node

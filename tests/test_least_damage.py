"""The choice of a place against brute force, and what it is worth against first-fit."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest
from gpus import FOUR_PROFILES, SETTINGS, busy, gpu
from hypothesis import given
from hypothesis import strategies as st

from gres_mig.errors import NoCapacity
from gres_mig.models import Gpu, Placement, Profile, Request, Settings
from gres_mig.placement import Room, allowed, choose, places
from gres_mig.values import replace


def slow_best(room: Room, profile: Profile, menu: Iterable[Profile]) -> tuple[int, Placement] | None:
    """The least damage and where, by the definition in the manual; no code and no idea of speed shared with ours."""
    places = {q for p in menu for q in p.placements}
    taken = slices(room.busy)
    options = []
    for placement in profile.placements:
        if taken & slices([placement]):
            continue
        after = taken | slices([placement])
        before_places = [q for q in places if not taken & slices([q])]
        lost = [q for q in before_places if after & slices([q])]
        newly_stranded = slow_fill(before_places) - slow_fill(set(before_places) - set(lost)) - placement.size
        options.append((sum(q.size for q in lost) + 2 * newly_stranded, placement.start, placement))
    if not options:
        return None
    damage, _, placement = min(options, key=lambda option: option[:2])
    return damage, placement


def slices(placements: Iterable[Placement]) -> frozenset[int]:
    """The memory slices of these placements."""
    return frozenset(s for p in placements for s in range(p.start, p.start + p.size))


def slow_fill(free: Iterable[Placement]) -> int:
    """The most slices that disjoint ones of these places cover."""
    rest = list(free)
    if not rest:
        return 0
    first, others = rest[0], rest[1:]
    apart = [q for q in others if not slices([q]) & slices([first])]
    return max(slow_fill(others), first.size + slow_fill(apart))


def packings(profiles: Iterable[Profile]) -> set[frozenset[Placement]]:
    """Every set of places that can be taken at once."""
    places = sorted({q for p in profiles for q in p.placements})
    found: set[frozenset[Placement]] = {frozenset()}
    for place in places:
        found |= {packing | {place} for packing in found if not slices(packing) & slices([place])}
    return found


@pytest.mark.parametrize(
    ("board", "settings"),
    [
        ("a100-40", FOUR_PROFILES),
        ("a100-40", SETTINGS),
        ("h200", SETTINGS),
        ("a30", SETTINGS),
        ("rtx-pro-6000", SETTINGS),
    ],
    ids=["a100 with four profiles", "a100", "h200", "a30", "rtx-pro-6000"],
)
def test_every_choice_on_one_gpu_is_the_least_damage_by_brute_force(board: str, settings: Settings) -> None:
    one = gpu(board)
    menu = allowed(one, settings)

    checked = 0
    for packing in packings(menu):
        room = Room(one, tuple(packing))
        for profile in menu:
            expected = slow_best(room, profile, menu)
            if expected is None:
                assert places(room, profile)[0] == 0
                continue
            checked += 1
            assert choose([room], Request(0, profile.name), settings).placement == expected[1]
    assert checked > len(menu)


@pytest.mark.parametrize(("board", "settings"), [("a100-40", FOUR_PROFILES), ("h200", SETTINGS), ("a30", SETTINGS)])
def test_among_gpus_the_least_damage_wins_then_the_fuller_then_the_lower(board: str, settings: Settings) -> None:
    draw = random.Random(7)
    menu = allowed(gpu(board), settings)
    known = sorted(packings(menu), key=sorted)

    for _ in range(300):
        node = [Room(gpu(board, i), tuple(draw.choice(known))) for i in range(3)]
        profile = draw.choice(menu)
        best = {i: found for i, room in enumerate(node) if (found := slow_best(room, profile, menu))}
        shuffled = draw.sample(node, 3)
        if not best:
            with pytest.raises(NoCapacity):
                choose(shuffled, Request(0, profile.name), settings)
            continue
        winner = min(best, key=lambda i: (best[i][0], -len(slices(node[i].busy)), i))
        choice = choose(shuffled, Request(0, profile.name), settings)
        assert (choice.gpu_uuid, choice.placement) == (node[winner].gpu.uuid, best[winner][1])


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.lists(st.integers(0, 10), min_size=1, max_size=4, unique=True)),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.tuples(st.integers(0, 14), st.integers(1, 3)), max_size=3),
    st.data(),
)
def test_a_gpu_nobody_has_heard_of_works(
    table: list[tuple[int, list[int]]], taken: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Odd sizes, gaps and starts in any order."""
    profiles = tuple(
        Profile(40 + i, f"x{i}", 1000 + i, 1, 10, len(starts), tuple(Placement(s, size) for s in starts))
        for i, (size, starts) in enumerate(table)
    )
    room = busy(Room(replace(gpu("a30"), model="NVIDIA X1", profiles=profiles)), *taken)
    profile = data.draw(st.sampled_from(profiles))

    expected = slow_best(room, profile, profiles)

    if expected is None:
        with pytest.raises(NoCapacity, match=profile.name):
            choose([room], Request(0, profile.name), SETTINGS)
    else:
        assert choose([room], Request(profile.memory_mib), SETTINGS).placement == expected[1]


class FirstFit:
    """The first GPU and the lowest start of whatever profile of that memory: what is beaten or met."""

    def __init__(self, gpus: Sequence[Gpu], settings: Settings) -> None:
        self.taken: list[frozenset[Placement]] = [frozenset() for _ in gpus]
        self._places: dict[int, list[Placement]] = {}
        for profile in allowed(gpus[0], settings):
            self._places.setdefault(profile.memory_mib, []).extend(profile.placements)

    def place(self, memory_mib: int) -> tuple[int, Placement] | None:
        for i, taken in enumerate(self.taken):
            for placement in sorted(self._places[memory_mib]):
                if not any(placement.overlaps(other) for other in taken):
                    self.taken[i] = taken | {placement}
                    return i, placement
        return None


MENUS = [("a100-40", FOUR_PROFILES), ("a100-40", SETTINGS), ("h100-80", SETTINGS), ("h200", SETTINGS)]


@pytest.mark.parametrize(("board", "settings"), MENUS, ids=["a100 with four profiles", "a100", "h100", "h200"])
def test_one_gpu_accepts_at_least_what_first_fit_accepts_in_every_order_of_requests(
    board: str, settings: Settings
) -> None:
    one = gpu(board)
    sizes = {p.memory_mib: p.placements[0].size for p in allowed(one, settings)}
    worse: list[tuple[int, ...]] = []
    better = 0

    def extend(asked: tuple[int, ...], room: Room, other: FirstFit, lead: int) -> None:
        nonlocal better
        if lead < 0:
            worse.append(asked)
        better += lead > 0
        if len(asked) == 5:
            return
        for memory_mib, size in sizes.items():
            next_room, gain = room, 0
            try:
                choice = choose([room], Request(memory_mib), settings)
            except NoCapacity:
                pass
            else:
                next_room, gain = busy(room, (choice.placement.start, choice.placement.size)), size
            rival = FirstFit([one], settings)
            rival.taken = list(other.taken)
            gain -= size if rival.place(memory_mib) else 0
            extend((*asked, memory_mib), next_room, rival, lead + gain)

    extend((), Room(one), FirstFit([one], settings), 0)

    assert not worse
    assert better or settings is SETTINGS


@pytest.mark.parametrize(("board", "settings"), MENUS, ids=["a100 with four profiles", "a100", "h100", "h200"])
def test_four_gpus_accept_more_than_first_fit_as_work_comes_and_goes(board: str, settings: Settings) -> None:
    draw = random.Random(11)
    gpus = [gpu(board, i) for i in range(4)]
    sizes = {p.memory_mib: p.placements[0].size for p in allowed(gpus[0], settings)}
    weights = dict(zip(sizes, (0.4, 0.35, 0.25, 0.0), strict=False))
    ours: list[Room] = [Room(one) for one in gpus]
    rival = FirstFit(gpus, settings)
    running: list[tuple[float, str, int, Placement]] = []
    accepted = {"ours": 0, "rival": 0}

    now = 0.0
    for _ in range(4000):
        now += draw.expovariate(14.0)
        memory_mib = draw.choices(list(weights), list(weights.values()))[0]
        end = now + draw.expovariate(1.0)
        for job in [job for job in running if job[0] <= now]:
            running.remove(job)
            _, who, i, placement = job
            if who == "ours":
                ours[i] = replace(ours[i], busy=tuple(p for p in ours[i].busy if p != placement))
            else:
                rival.taken[i] -= {placement}
        try:
            choice = choose(ours, Request(memory_mib), settings)
        except NoCapacity:
            pass
        else:
            i = next(i for i, room in enumerate(ours) if room.gpu.uuid == choice.gpu_uuid)
            assert not any(choice.placement.overlaps(other) for other in ours[i].busy)
            ours[i] = busy(ours[i], (choice.placement.start, choice.placement.size))
            running.append((end, "ours", i, choice.placement))
            accepted["ours"] += choice.placement.size
        where = rival.place(memory_mib)
        if where:
            running.append((end, "rival", *where))
            accepted["rival"] += where[1].size

    assert accepted["ours"] > accepted["rival"]

"""Many processes at once on one node: what they were told is checked against a model of the node."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from forked import each

from gres_mig import config, machine
from gres_mig.allocator import Allocator
from gres_mig.errors import NoCapacity
from gres_mig.models import Owner, Placement, Request, Settings
from gres_mig.simulator.admin import Node
from gres_mig.simulator.boards import data as board_data
from gres_mig.state import Store
from gres_mig.values import replace

THOROUGH = os.environ.get("GRES_MIG_THOROUGH", "") not in {"", "0"}
pytestmark = pytest.mark.timeout(3600 if THOROUGH else 300)

PROCESSES, PAIRS, ADMITTED = (64, 10_000, 28) if THOROUGH else (16, 320, 64)

SIZES = {5_000: "1g.6gb", 10_000: "2g.12gb", 20_000: "4g.24gb"}
"""What is asked for, and the only profile that is right for it."""

PLACES = {"1g.6gb": [(0, 1), (1, 1), (2, 1), (3, 1)], "2g.12gb": [(0, 2), (2, 2)], "4g.24gb": [(0, 4)]}
"""Start and size of each place of an A30."""


class Ask(NamedTuple):
    """An owner that asked, on the clock that all processes of a machine share."""

    owner: str
    mib: int
    begin: float
    end: float
    place: tuple[str, int, int] | None
    """GPU, start and size; None: refused for want of a place."""
    profile: str = ""


class Return(NamedTuple):
    """An owner that gave back what it had."""

    owner: str
    begin: float
    end: float


class Hold(NamedTuple):
    """A place in the hands of an owner, certainly from `since` to `until`, perhaps from `begin` to `end`."""

    owner: str
    place: tuple[str, Placement]
    begin: float
    since: float
    until: float
    end: float


@pytest.fixture
def boards() -> list[tuple[str, int]]:
    return [("a30", 8)]


@pytest.fixture
def settings(node: Node) -> Settings:
    # Two cores may have to do all the work of 64 processes before it is the last one's turn.
    return replace(config.defaults(node=node.store.folder), managed=("*",), lock_wait_s=600.0)


def allocator_of(settings: Settings) -> Allocator:
    boot_id = machine.boot_id(settings.simulator)
    return Allocator(settings, Store(settings, boot_id), boot_id)


def ask(allocator: Allocator, owner: str, mib: int) -> Ask:
    begin = time.monotonic()
    try:
        given = allocator.allocate(Owner(owner), Request(mib)).allocation
    except NoCapacity as refusal:
        # Any other reason, such as a lock that was not to be had, would be one too many.
        if refusal.code not in ("NOCAP", "FRAG"):
            raise
        return Ask(owner, mib, begin, time.monotonic(), None)
    place = (given.gpu_uuid, given.placement.start, given.placement.size)
    return Ask(owner, mib, begin, time.monotonic(), place, given.profile_name)


def give_back(allocator: Allocator, owner: str) -> Return:
    begin = time.monotonic()
    outcomes = allocator.reclaim(Owner(owner))
    assert [outcome.verdict for outcome in outcomes] == ["released"]
    return Return(owner, begin, time.monotonic())


def holds(asks: list[Ask], returns: list[Return]) -> list[Hold]:
    given_back = {back.owner: back for back in returns}
    never = Return("", float("inf"), float("inf"))
    return [
        Hold(a.owner, (a.place[0], Placement(*a.place[1:])), a.begin, a.end, back.begin, back.end)
        for a in asks
        if a.place and (back := given_back.get(a.owner, never))
    ]


def doubles(held: list[Hold]) -> Iterator[str]:
    """Slices that two owners certainly had at once."""
    by_gpu = defaultdict(list)
    for hold in held:
        by_gpu[hold.place[0]].append(hold)
    for on_one in by_gpu.values():
        for one, other in itertools.combinations(sorted(on_one, key=lambda h: h.since), 2):
            if other.since >= one.until:
                continue
            if one.place[1].overlaps(other.place[1]):
                yield f"{one.place} was given to {one.owner} and {other.owner} at once"


def wrongly_refused(refusal: Ask, held: list[Hold], gpus: tuple[str, ...]) -> bool:
    """Whether a legal place was certainly free at every instant of a refused ask.

    Only then no order of the operations explains it: an operation takes effect at one instant between its begin and
    its end. A place counts as free only where nobody may have had it, so that this never accuses wrongly.
    """
    near = [h for h in held if h.begin <= refusal.end and h.end >= refusal.begin]
    places = [(gpu, Placement(*place)) for gpu in gpus for place in PLACES[SIZES[refusal.mib]]]
    # What may be held changes at these instants only, and is most right after one where a hold may begin.
    instants = {refusal.begin, *(h.begin for h in near if h.begin >= refusal.begin)}
    return all(
        any(
            not any(h.place[0] == gpu and h.place[1].overlaps(place) for h in near if h.begin <= at <= h.end)
            for gpu, place in places
        )
        for at in instants
    )


def test_no_place_has_two_owners_and_nobody_is_refused_while_there_is_one(node: Node, settings: Settings) -> None:
    # As Slurm's count does, a pipe with as many bytes lets so many in at once; it is still more than fit.
    admitted, left = os.pipe()
    os.write(left, bytes(ADMITTED))

    def work(number: int) -> list[Ask | Return]:
        allocator, dice = allocator_of(settings), random.Random(number)
        history: list[Ask | Return] = []
        mine: list[str] = []
        while sum(isinstance(entry, Return) for entry in history) < PAIRS // PROCESSES:
            os.read(admitted, 1)
            asked = ask(allocator, f"manual:p{number}.{len(history)}", dice.choices(list(SIZES), (5, 2, 1))[0])
            history.append(asked)
            if asked.place:
                mine.append(asked.owner)
            else:
                os.write(left, b"1")
            # Few hold more than one, so that all together want more than there is.
            while len(mine) > dice.randrange(ADMITTED // PROCESSES or 1):
                history.append(give_back(allocator, mine.pop(dice.randrange(len(mine)))))
                os.write(left, b"1")
        history += [give_back(allocator, owner) for owner in mine]
        return history

    history = [entry for entries in each(work, range(PROCESSES), together=True) for entry in entries]
    os.close(admitted)
    os.close(left)

    asks = [entry for entry in history if isinstance(entry, Ask)]
    held = holds(asks, [entry for entry in history if isinstance(entry, Return)])
    refusals = [a for a in asks if a.place is None]
    assert [a for a in asks if a.place and (a.profile != SIZES[a.mib] or a.place[1:] not in PLACES[a.profile])] == []
    assert list(doubles(held)) == []
    assert [refusal for refusal in refusals if wrongly_refused(refusal, held, node.uuids)] == []
    assert len(held) >= PAIRS // PROCESSES * PROCESSES
    assert len(refusals) > PAIRS // 50
    assert node.instances() == []
    assert Store(settings, node.boot_id).read().records == ()


def test_the_model_accuses_who_it_should(node: Node) -> None:
    gpu, *others = node.uuids
    whole = [Ask(f"manual:{n}", 20_000, 0.0, 1.0, (uuid, 0, 4), "4g.24gb") for n, uuid in enumerate(others)]
    first = Ask("manual:a", 20_000, 2.0, 3.0, (gpu, 0, 4), "4g.24gb")
    second = Ask("manual:b", 5_000, 4.0, 5.0, (gpu, 1, 1), "1g.6gb")
    refused = Ask("manual:c", 5_000, 6.0, 7.0, None)

    def accused(*returns: Return) -> bool:
        return wrongly_refused(refused, holds([*whole, first], list(returns)), node.uuids)

    assert len(list(doubles(holds([first, second], [])))) == 1
    assert list(doubles(holds([first, second], [Return("manual:a", 3.5, 6.0)]))) == []
    assert not accused()
    assert not accused(Return("manual:a", 3.5, 6.5))
    assert accused(Return("manual:a", 3.5, 5.5))


@pytest.mark.parametrize("boards", [[("a30", 1)]])
def test_what_is_given_back_during_an_ask_is_not_refused_to_it(node: Node, settings: Settings) -> None:
    others = allocator_of(settings)
    others.allocate(Owner("manual:going"), Request(10_000))
    events: list[object] = []

    def watch(gpu: str) -> None:
        # The first look is over: it saw the place of one, and the place that the other takes was free.
        if not gpu and not events:
            events.append(others.allocate(Owner("manual:coming"), Request(10_000)))
            events.append(others.reclaim(Owner("manual:going")))

    asking = Allocator(settings, Store(settings, node.boot_id), node.boot_id, watch=watch)
    given = asking.allocate(Owner("manual:asking"), Request(10_000)).allocation

    assert len(events) == 2
    assert {(i.start, i.mig_uuids) for i in node.instances()} > {(given.placement.start, (given.mig_uuid,))}


def test_an_owner_that_asks_from_many_processes_at_once_gets_one_instance(node: Node, settings: Settings) -> None:
    def work(number: int) -> tuple[str, bool]:
        grant = allocator_of(settings).allocate(Owner("manual:one"), Request(5_000))
        return grant.allocation.mig_uuid, grant.created

    told = each(work, range(16), together=True)

    assert Counter(created for _, created in told) == {True: 1, False: 15}
    (instance,) = node.instances()
    assert {mig_uuid for mig_uuid, _ in told} == set(instance.mig_uuids)


@pytest.mark.parametrize("mib", [5_000, 10_000])
def test_of_64_asks_at_once_as_many_are_granted_as_there_are_places(node: Node, settings: Settings, mib: int) -> None:
    def work(number: int) -> Ask:
        return ask(allocator_of(settings), f"manual:{number}", mib)

    asks = each(work, range(64), together=True)

    places = Counter(a.place for a in asks if a.place)
    legal = {(gpu, *place) for gpu in node.uuids for place in PLACES[SIZES[mib]]}
    assert places == dict.fromkeys(legal, 1)
    assert {(i.gpu_uuid, i.start, i.size) for i in node.instances()} == legal


def test_the_sizes_and_places_of_the_model_are_those_of_the_board() -> None:
    board = board_data("a30")
    plain = {p["name"]: [(start, p["size"]) for start in p["starts"]] for p in board["profiles"]}

    assert {name: plain[name] for name in PLACES} == PLACES

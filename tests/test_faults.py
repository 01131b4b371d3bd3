"""Every NVML call on every way through the core, failing with every documented code, lying, or never returning."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from forked import each
from paths import OWNER, WAYS, Call, Small, Told

from gres_mig.allocator import Allocator
from gres_mig.deadline import operate
from gres_mig.errors import NoCapacity, TimedOut
from gres_mig.models import Request
from gres_mig.simulator.admin import Node
from gres_mig.values import replace

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"
THOROUGH = os.environ.get("GRES_MIG_THOROUGH", "") not in {"", "0"}

pytestmark = pytest.mark.timeout(3600 if THOROUGH else 300)

CODES = (1, 2, 3, 4, 6, 7, 9, 10, 15, 16, 17, 18, 19, 20, 23, 25, 27, 29, 999)
"""What the real driver returns, see docs/hardware.md."""


TOLD_APART = (2, 3, 4, 6, 15, 19, 23)
"""Those of them on which something depends in the source."""


REFUSALS = (2, 3, 4, 19, 23)
"""Of these the driver's own header says that nothing was made."""

CHANGING = (
    "allocate", "allocate a small one", "ask again after a crash", "reclaim", "reclaim in use", "reclaim foreign",
    "reconcile after a crash",
)  # fmt: skip
"""The ways that change hardware."""


class Meaning(NamedTuple):
    """What it means when a call keeps failing: the exit code of each command that makes it."""

    cannot: str
    allocate: int | None = None
    adopt: int | None = None
    reclaim: int | None = None
    foreign: int | None = None
    reconcile: int | None = None
    status: int | None = None


COMMANDS = {
    "allocate": "allocate",
    "allocate a small one": "allocate",
    "ask again": "allocate",
    "ask again after a crash": "allocate",
    "adopt": "adopt",
    "reclaim": "reclaim",
    "reclaim in use": "reclaim",
    "reclaim foreign": "foreign",
    "reconcile after a crash": "reconcile",
    "reconcile a loss": "reconcile",
    "status": "status",
}

CALLS = {
    "nvmlInitWithFlags": Meaning("the driver cannot be reached", 4, 4, 0, 4, 4, 4),
    "nvmlDeviceGetCount_v2": Meaning("the GPUs cannot be counted", 4, 4, 0, 4, 4, 4),
    "nvmlDeviceGetHandleByIndex_v2": Meaning("a GPU does not answer", 4, 4, 0, 4, 4, 0),
    "nvmlDeviceGetUUID": Meaning("a GPU or an instance does not say which it is", 4, 4, 0, 4, 4, 0),
    "nvmlDeviceGetPciInfo_v3": Meaning("a GPU does not say where it is", 4, 4, 0, 4, 0, 0),
    "nvmlDeviceGetMinorNumber": Meaning("a GPU does not say which device file is its", 4, 4, 0, 4, 0, 0),
    "nvmlDeviceGetName": Meaning("a GPU does not say what it is", 4, 4, 0, 4, 0, 0),
    "nvmlDeviceGetGpuInstanceProfileInfoV": Meaning("the profiles cannot be listed", 4, 4, 0, 4, 0, 0),
    "nvmlDeviceGetGpuInstancePossiblePlacements_v2": Meaning("the placements cannot be listed", 4, 4, 0, 4, 0, 0),
    "nvmlDeviceGetMigMode": Meaning("the MIG mode cannot be read", 4, 4, 0, 4, 0, 0),
    "nvmlDeviceGetMemoryInfo": Meaning("the memory size cannot be read", 4, 4, 0, 4, 0, 0),
    "nvmlDeviceGetGpuInstanceRemainingCapacity": Meaning("what still fits cannot be read", 4, 4, 0, 4, 0, 0),
    "nvmlDeviceGetGpuInstances": Meaning("the GPU instances cannot be listed", 4, 4, 0, 4, 0, 0),
    "nvmlGpuInstanceGetInfo": Meaning("a GPU instance cannot be read", 4, 4, 0, 4, 0, 0),
    "nvmlGpuInstanceGetComputeInstanceProfileInfoV": Meaning("its compute profiles cannot be listed", 4, 4, 0, 4, 0, 0),
    "nvmlGpuInstanceGetComputeInstances": Meaning("its compute instances cannot be listed", 4, 4, 0, 4, 0, 0),
    "nvmlComputeInstanceGetInfo_v2": Meaning("a compute instance cannot be read", 4, 4, 0, 4, 0, 0),
    "nvmlDeviceCreateGpuInstanceWithPlacement": Meaning("no GPU instance can be made", allocate=4),
    "nvmlGpuInstanceCreateComputeInstance": Meaning("no compute instance can be made", allocate=4),
    "nvmlComputeInstanceDestroy": Meaning("a compute instance does not go", 3, None, 0, 3, 0),
    "nvmlGpuInstanceDestroy": Meaning("a GPU instance does not go", 3, None, 0, 3, 0),
    "nvmlDeviceGetComputeRunningProcesses_v3": Meaning("who uses an instance cannot be read", reclaim=0),
    "nvmlShutdown": Meaning("a session does not end", 0, 0, 0, 0, 0, 0),
}
"""By symbol of the library. A reclaim that cannot go on is recorded as stuck, which is not an error."""


class Answer(NamedTuple):
    """What some codes of a call mean instead."""

    call: str
    codes: tuple[int, ...]
    commands: tuple[str, ...]
    exit: int
    meaning: str


ANSWERS = (
    Answer("nvmlDeviceCreateGpuInstanceWithPlacement", (19, 23), ("allocate",), 3, "the place is in use: no place now"),
    Answer("nvmlGpuInstanceCreateComputeInstance", (19, 23), ("allocate",), 3, "the place is in use: no place now"),
    Answer("nvmlDeviceGetMemoryInfo", (3, 4), ("allocate", "adopt", "foreign"), 0,
           "the largest profile stands for the memory size"),
    Answer("nvmlDeviceGetGpuInstanceRemainingCapacity", (3, 4), ("allocate", "adopt", "foreign"), 0,
           "the placements alone say what fits"),
    Answer("nvmlDeviceGetGpuInstanceProfileInfoV", (2,), ("adopt", "foreign"), 2,
           "the list ends here, so that no instance is seen"),
)  # fmt: skip


def exit_code(name: str, function: str, code: int) -> int:
    """The documented exit code of a way on which a call keeps failing with a code."""
    command = COMMANDS[name]
    for answer in ANSWERS:
        if answer.call == function and code in answer.codes and command in answer.commands:
            return answer.exit
    documented = getattr(CALLS[function], command)
    assert isinstance(documented, int), f"{command} makes {function}, which is not documented"
    return documented


class Case(NamedTuple):
    """A failing call on a way."""

    way: str
    call: Call
    code: int
    times: int = 1
    """0: for ever."""
    after: bool = False
    """Doing it all the same."""


@pytest.fixture
def small(memory: Path) -> Small:
    """A small node with a neighbour and a foreign instance."""
    return Small(memory / "small")


def outcome(small: Small, case: Case, **fault: object) -> tuple[int, list[str]]:
    """The exit code with that failure planted, and what does not hold afterwards."""
    small.restore(small.ways[case.way].start)
    call = case.call
    fault = {"action": "returns", "code": case.code, "times": case.times, "after": case.after, **fault}
    small.node.plant(call.function, nth=call.nth, **fault)  # type: ignore[arg-type]
    told = small.walk(case.way)
    small.node.mend()
    return told.exit, list(small.violations(case.way, told))


def spread(memory: Path, cases: list[Case], check: Callable[[Small, Case], list[str]], managed: int = 1) -> list[str]:
    """What is wrong with any of the cases, which as many processes work on as there are cores, each with its node."""

    def work(number: int) -> list[str]:
        small = Small(memory / f"node-{number}", managed)
        return [f"{case}: {wrong}" for case in cases[number :: os.cpu_count() or 1] for wrong in check(small, case)]

    return [line for lines in each(work, range(os.cpu_count() or 1)) for line in lines]


def first_calls(small: Small, way: str) -> list[Call]:
    return [call for call in small.calls(way) if call.nth == 1]


def in_turn(calls: list[Call], count: int, always: tuple[int, ...] = ()) -> Iterator[tuple[Call, int]]:
    """Each call with codes: all of them where it changes hardware; elsewhere some, and `count` others in turn."""
    turn = itertools.cycle(CODES)
    for call in calls:
        yield from ((call, code) for code in (CODES if THOROUGH or call.mutating else always))
        yield from ((call, next(turn)) for _ in range(0 if THOROUGH or call.mutating else count))


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_keeps_failing_ends_in_its_documented_exit_code(small: Small, memory: Path, way: str) -> None:
    cases = [Case(way, call, code, times=0) for call, code in in_turn(first_calls(small, way), 1, always=TOLD_APART)]

    def check(small: Small, case: Case) -> list[str]:
        exit_, wrong = outcome(small, case)
        documented = exit_code(case.way, case.call.function, case.code)
        return wrong if exit_ == documented else [f"exit {exit_}, documented is {documented}", *wrong]

    assert spread(memory, cases, check) == []


@pytest.mark.parametrize("way", WAYS)
def test_no_failure_of_any_call_breaks_anything(small: Small, memory: Path, way: str) -> None:
    calls = small.calls(way)
    cases = [Case(way, call, code) for call, code in in_turn(calls, 1)]
    cases += [Case(way, call, code, times=0) for call, code in in_turn(calls, 1) if call.nth > 1]

    def check(small: Small, case: Case) -> list[str]:
        exit_, wrong = outcome(small, case)
        # Once, another try may find a place or find the rest not settled yet, and a list that ends early shows less.
        allowed = {0, exit_code(case.way, case.call.function, case.code)}
        if COMMANDS[case.way] in ("allocate", "foreign"):
            allowed.add(3)
        if (case.call.function, case.code) == ("nvmlDeviceGetGpuInstanceProfileInfoV", 3):
            allowed |= {2} if COMMANDS[case.way] in ("adopt", "foreign") else set()
        return wrong if exit_ in allowed else [f"exit {exit_}", *wrong]

    assert spread(memory, cases, check) == []


@pytest.mark.parametrize("way", CHANGING)
def test_a_change_that_is_made_and_reported_as_failed_is_not_lost(small: Small, way: str) -> None:
    changes = [call for call in small.calls(way) if call.mutating]
    cases = [
        Case(way, call, code, times, after=True)
        for call in changes
        for code in CODES
        for times in (1, 0)
        if code not in REFUSALS or "Destroy" in call.function
    ]

    wrong = {case: found for case in cases if (found := outcome(small, case)[1])}

    assert wrong == {}


@pytest.mark.parametrize("way", CHANGING)
def test_a_change_that_is_reported_and_not_made_is_seen(small: Small, way: str) -> None:
    changes = [call for call in small.calls(way) if call.mutating]
    cases = [Case(way, call, 0, times) for call in changes for times in (1, 0)]

    wrong = {case: found for case in cases if (found := outcome(small, case, action="lies")[1])}

    assert wrong == {}


@pytest.mark.parametrize("boards", [[("a30", 1)]])
@pytest.mark.parametrize("code", [2, 3])
def test_nobody_is_refused_for_what_one_look_did_not_show(allocator: Allocator, node: Node, code: int) -> None:
    # The driver says that the list ends before the largest profile, or that the GPU does not have it.
    node.plant("nvmlDeviceGetGpuInstanceProfileInfoV", "returns", code=code, nth=4)

    given = allocator.allocate(OWNER, Request(20_000)).allocation

    assert given.profile_name == "4g.24gb"


@pytest.mark.parametrize("boards", [[("a100-80", 1), ("a30", 1)]])
@pytest.mark.parametrize("trouble", ["fenced", "cannot be read"])
def test_what_only_a_gpu_in_trouble_could_hold_is_not_the_requests_fault(
    allocator: Allocator, node: Node, trouble: str
) -> None:
    if trouble == "fenced":
        allocator.fence(node.uuids[0], "a call did not return")
    else:
        node.plant("nvmlDeviceGetMigMode", "returns", gpu=0, times=0)

    with pytest.raises(NoCapacity) as refusal:
        allocator.allocate(OWNER, Request(40_000))

    assert node.uuids[0] in str(refusal.value)


def test_while_one_gpu_fails_another_serves(memory: Path) -> None:
    small = Small(memory / "small", managed=2)
    calls = [call for call in small.calls("allocate") if call.gpu == small.uuids[0]]
    assert {call.function for call in calls} > {"nvmlDeviceGetName", "nvmlGpuInstanceCreateComputeInstance"}
    cases = [Case("allocate", call, code, times=0) for call, code in in_turn(calls, 2) if call.nth == 1]

    def check(small: Small, case: Case) -> list[str]:
        exit_, wrong = outcome(small, case, gpu=small.uuids[0])
        return wrong if exit_ == 0 else [f"exit {exit_}", *wrong]

    assert spread(memory, cases, check, managed=2) == []


def test_a_gpu_that_fell_off_the_bus_is_named_and_another_serves(memory: Path) -> None:
    small = Small(memory / "small", managed=2)
    small.restore(small.ways["allocate"].start)
    small.node.lose(0)

    elsewhere = small.walk("allocate")

    assert elsewhere.exit == 0
    assert {i.gpu_uuid for i in small.node.instances() if i.gpu == 1} == {small.uuids[1]}


@pytest.mark.parametrize("identity", [True, False])
def test_where_the_only_gpu_fell_off_the_bus_the_node_is_at_fault_and_says_so(small: Small, identity: bool) -> None:
    small.restore(small.ways["allocate"].start)
    small.node.lose(0, identity=identity)

    told = small.walk("allocate")

    assert told.exit == 4
    assert "GPU is lost" in str(told.error)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "reclaim in use"])
def test_a_call_that_never_returns_fences_its_gpu_and_breaks_nothing(small: Small, memory: Path, way: str) -> None:
    calls = [c for c in small.calls(way) if THOROUGH or c.mutating or c.nth == 1]

    def work(call: Call) -> list[str]:
        small = Small(memory / f"{call.function}-{call.nth}")
        small.restore(small.ways[way].start)
        hang = small.node.plant(call.function, "hangs", nth=call.nth)
        wrong = []
        settings = replace(small.settings, hardware_timeout_s=0.2)
        try:
            told = Told(0, operate(settings, small.ways[way].operation, clock=lambda: small.now), None)
            wrong.append("it answered, and a call still hangs")
        except TimedOut as error:
            told = Told(4, None, error)
        (inside,) = small.node.fired(hang)
        fences = set(small.state().fences)
        if call.mutating and fences != {small.uuids[0]}:
            wrong.append(f"fenced is {fences}")
        small.node.mend()
        os.waitpid(inside, 0)
        for gpu in fences:
            small.allocator().unfence(gpu)
        if call.function == "nvmlShutdown":
            # At the very end it is done, and as if nobody had been there to hear it.
            told = Told(0, None, None)
        return wrong + list(small.violations(way, told))

    results = each(work, calls, at_once=16)

    assert {call: wrong for call, wrong in zip(calls, results, strict=True) if wrong} == {}


@pytest.mark.parametrize("way", WAYS)
def test_every_session_that_is_opened_is_closed(small: Small, way: str) -> None:
    functions = Counter(call.function for call in small.calls(way))

    assert functions["nvmlInitWithFlags"] == functions["nvmlShutdown"] > 0


def test_every_call_there_is_is_documented(small: Small) -> None:
    calls = [(way, call) for way in WAYS for call in small.calls(way)]
    made = {(COMMANDS[way], call.function) for way, call in calls}

    documented = {
        (command, function)
        for function, meaning in CALLS.items()
        for command in set(COMMANDS.values())
        if getattr(meaning, command) is not None
    }

    assert made == documented
    assert {way for way, call in calls if call.mutating} == set(CHANGING)


def test_the_page_shows_this_table() -> None:
    rows = [
        f"| `{call}` | {meaning.cannot} | " + " | ".join("" if e is None else str(e) for e in meaning[1:]) + " |"
        for call, meaning in CALLS.items()
    ]
    names = {"foreign": "reclaim --foreign"}
    answers = [
        f"| `{a.call}` | {', '.join(map(str, a.codes))} | {', '.join(names.get(c, c) for c in a.commands)} "
        f"| {a.exit} | {a.meaning} |"
        for a in ANSWERS
    ]

    shown = [line for line in PAGE.read_text().splitlines() if line.startswith("| `nvml")]

    assert shown == rows + answers

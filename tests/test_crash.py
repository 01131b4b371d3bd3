"""Processes are killed and stopped at every step they take; the steps are found by running, none is named here.

By default each operation is killed on one board and stopped on another, at the points that `kills.killed_at` and
`stops.stopped_at` say; with GRES_MIG_THOROUGH=1 at all of them, on all boards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path

import pytest
from driver import Driver
from kills import THOROUGH, kills
from oracle import FOREIGN, LEAK
from scene import SCENES, VARIANTS, Holder, Scene, Variant, build
from stops import damages, given_beside, stops, stops_then_kills

from gres_mig import simulator

pytestmark = pytest.mark.timeout(0 if THOROUGH else 300)

BREAKAGES = {
    "skip-the-intent": LEAK,
    "list-by-mig-device": LEAK,
    "own-by-uuid-only": FOREIGN,
    "settle-without-the-gpu-lock": LEAK,
}
"""What each of tests/breakages.py must be found to do."""


SOME = ("allocate", "allocate_after_a_crash", "reclaim")
"""Of the operations those that make an instance, and the one that destroys it."""


def cases(shift: int, some: Collection[str] = SCENES) -> list[tuple[str, Variant]]:
    """Every operation, or some, on one variant each, or on all."""
    variants = {
        name: VARIANTS if THOROUGH else (VARIANTS[(n + shift) % len(VARIANTS)],) for n, name in enumerate(SCENES)
    }
    return [(name, variant) for name in some for variant in variants[name]]


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with Driver() as sound:
        yield sound


@pytest.fixture(scope="module")
def holder() -> Iterator[Holder]:
    neighbour = Holder()
    yield neighbour
    neighbour.end()


@pytest.fixture
def scene(request: pytest.FixtureRequest, memory: Path, driver: Driver, holder: Holder) -> Scene:
    name, variant = request.param
    return build(name, memory, driver, holder, variant)


@pytest.mark.parametrize("scene", cases(0), ids=lambda case: "-".join(map(str, case)), indirect=True)
def test_a_kill_at_any_step_leaks_nothing_and_harms_nobody(scene: Scene, memory: Path, driver: Driver) -> None:
    violations = list(kills(driver, scene, memory))

    assert violations == []


@pytest.mark.parametrize("scene", cases(2), ids=lambda case: "-".join(map(str, case)), indirect=True)
def test_whoever_stopped_at_any_step_while_another_ran_harms_nobody(scene: Scene, memory: Path, driver: Driver) -> None:
    violations = list(stops(driver, scene, memory))

    assert violations == []


@pytest.mark.parametrize("scene", cases(2, SOME), ids=lambda case: "-".join(map(str, case)), indirect=True)
def test_whoever_stopped_while_another_ran_may_die_after_that(scene: Scene, memory: Path, driver: Driver) -> None:
    violations = list(stops_then_kills(driver, scene, memory))

    assert violations == []


@pytest.mark.parametrize("scene", cases(0, SOME), ids=lambda case: "-".join(map(str, case)), indirect=True)
def test_records_damaged_under_an_operation_lead_to_no_destroy(scene: Scene, memory: Path, driver: Driver) -> None:
    violations = list(damages(driver, scene, memory))

    assert violations == []


@pytest.mark.parametrize("scene", cases(0), ids=lambda case: "-".join(map(str, case)), indirect=True)
def test_every_change_of_a_file_and_every_call_of_the_driver_is_a_point(scene: Scene, driver: Driver) -> None:
    node = simulator.Node(scene.folder / "node")
    node.configure(log="all")

    told = driver.trace(scene.folder, scene.operation)

    # A text is no call of the driver, and the simulator does not log it.
    points = [point.label for point in told.reached if point.label.startswith("before nvml")]
    called = [f"before {call['function']}" for call in node.calls()]
    assert [label for label in points if label != "before nvmlErrorString"] == called
    assert told.past == ()


def test_whoever_stopped_on_one_gpu_keeps_nobody_off_the_next(memory: Path, driver: Driver, holder: Holder) -> None:
    scene = build("allocate", memory, driver, holder, VARIANTS[0], gpus=2)

    given = list(given_beside(driver, scene, memory))

    assert given
    assert {found and found["gpu_uuid"] for found in given} == set(simulator.Node(scene.folder / "node").uuids[1:])


@pytest.mark.parametrize(("breakage", "kind"), BREAKAGES.items())
def test_a_broken_design_is_found(breakage: str, kind: str, memory: Path, driver: Driver, holder: Holder) -> None:
    scene = build("allocate", memory, driver, holder, VARIANTS[0])

    with Driver(breakage) as broken:
        found = chain(kills(broken, scene, memory), stops_then_kills(broken, scene, memory))
        caught = next((violation for violation in found if violation.kind == kind), None)

    assert caught is not None

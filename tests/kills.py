"""An operation is killed at each of its points; whatever comes next must find the node in order."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from driver import Driver, Operation, Point, Told
from oracle import ANSWER, LEAK, Expected, Violation
from scene import SUBJECT, Scene, instances

THOROUGH = os.environ.get("GRES_MIG_THOROUGH", "") not in {"", "0"}
_MOST_ROUNDS = 4


def kills(driver: Driver, scene: Scene, folder: Path) -> Iterator[Violation]:
    """What is wrong after a kill at any point, as it is found."""
    points = clean_run(driver, scene, folder).reached
    for turn, (at, complete) in enumerate(killed_at(points)):
        killed = Expected(scene, scene.copy(folder / "killed"))
        told = driver.kill(killed.folder, scene.operation, at)
        where = f"{scene.name} killed at {at}, {points[at].label}"
        if (told.state, told.label) != ("killed", points[at].label):
            yield Violation(ANSWER, f"{where}: {told}")
        yield from within(where, killed.hears(scene.operation, told))
        yield from within(where, killed.standing())
        for recovery in _RECOVERIES if complete else (_RECOVERIES[turn % len(_RECOVERIES)],):
            left = killed.copy(Path(shutil.copytree(killed.folder, folder / "left")))
            yield from within(f"{where}, then {recovery.__name__.strip('_')}", recovery(driver, left))
            shutil.rmtree(left.folder)
        shutil.rmtree(killed.folder)


def clean_run(driver: Driver, scene: Scene, folder: Path) -> Told:
    """The operation undisturbed, with its points."""
    copy = scene.copy(folder / "clean")
    told = driver.trace(copy, scene.operation)
    shutil.rmtree(copy)
    return told


def killed_at(points: tuple[Point, ...]) -> Iterator[tuple[int, bool]]:
    """Where to kill, and whether every recovery is to be tried there.

    A process that is gone leaves files and hardware, nothing else: of points between which neither changed, the first
    stands for all. Where only other files than the records changed, one recovery is tried, each in its turn.
    """
    before: Point | None = None
    for at, point in enumerate(points):
        always = THOROUGH or before is None or point.label == "after the answer"
        if always or before is None or point.files != before.files:
            yield at, always or before is None or point.core != before.core
        before = point


def within(where: str, found: Iterable[Violation]) -> Iterator[Violation]:
    """The same violations, with the place where they were found."""
    return (Violation(violation.kind, f"{where}: {violation.what}") for violation in found)


def until_quiet(driver: Driver, left: Expected, dead: tuple[str, ...] = ()) -> Iterator[Violation]:
    """Reconcile until nothing waits any more to be seen twice."""
    told = driver.run(left.folder, Operation("reconcile"), dead=dead)
    for _ in range(_MOST_ROUNDS):
        if told.value is None:
            yield Violation(ANSWER, f"reconcile: {told}")
            return
        if not any(verdict == "waiting" for _, verdict in told.value):
            return
        told = driver.run(left.folder, Operation("reconcile"), dead=dead)
    yield Violation(LEAK, f"reconcile waits for ever: {told}")


def end(driver: Driver, left: Expected, *owners: str) -> Iterator[Violation]:
    """The epilogs of those owners and a reconcile; nothing of theirs may be left."""
    for owner in owners:
        left.over(owner)
        told = driver.run(left.folder, Operation("reclaim", owner))
        if told.value is None:
            yield Violation(ANSWER, f"reclaim of {owner}: {told}")
    yield from until_quiet(driver, left)
    for owner in owners:
        yield from left.nothing_of(owner)
    yield from left.settled()


def ask(driver: Driver, left: Expected) -> Iterator[Violation]:
    """The same owner asks; it is given what it asks for."""
    operation = left.scene.ask
    told = driver.run(left.folder, operation)
    for _ in range(_MOST_ROUNDS):
        # What is bare is seen twice before it goes, so the answer may be: not settled yet, ask again.
        if told.code != "BUSY":
            break
        told = driver.run(left.folder, operation)
    yield from left.hears(operation, told)
    spare = left.scene.spare
    if operation.name == "adopt":
        is_done = left.kept.get(SUBJECT) == spare and (told.value is not None or told.code == "CONFLICT")
    elif operation.name == "reclaim_foreign":
        is_done = told.fault in {"", "request"} and spare not in instances(left.folder)
    else:
        is_done = told.value is not None
        yield from left.reserve()
    if not is_done:
        yield Violation(ANSWER, f"{operation}: {told}")


def _the_same_owner_asks(driver: Driver, left: Expected) -> Iterator[Violation]:
    yield from ask(driver, left)
    yield from until_quiet(driver, left)
    yield from left.settled()


def _its_epilog_runs(driver: Driver, left: Expected) -> Iterator[Violation]:
    yield from end(driver, left, SUBJECT)


def _reconcile_runs(driver: Driver, left: Expected) -> Iterator[Violation]:
    yield from until_quiet(driver, left)
    yield from left.settled()
    left.over(SUBJECT)
    yield from until_quiet(driver, left, dead=(SUBJECT,))
    yield from left.nothing_of(SUBJECT)
    yield from left.settled()


def _an_admin_is_in_its_place(driver: Driver, left: Expected) -> Iterator[Violation]:
    if not left.admin_in_the_way():
        return
    yield from until_quiet(driver, left)
    yield from left.settled()
    # Who names an instance to be destroyed means whatever is there now.
    if left.scene.operation.name != "reclaim_foreign":
        yield from ask(driver, left)
    yield from left.standing()
    yield from end(driver, left, SUBJECT)


_RECOVERIES = (_the_same_owner_asks, _its_epilog_runs, _reconcile_runs, _an_admin_is_in_its_place)

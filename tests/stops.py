"""An operation is stopped at its points while others come and go; when it wakes up it must do no harm."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from driver import Driver, Operation, Point, Told
from kills import THOROUGH, clean_run, end, until_quiet, within
from oracle import ANSWER, LOCK, LOST, Expected, Violation
from scene import OTHER, SUBJECT, Found, Scene, instances, records

_NODE_LOCK = "node.lock"
_ADMIN = Operation("an admin in its place")


def stops(driver: Driver, scene: Scene, folder: Path) -> Iterator[Violation]:
    """What is wrong where another runs while it is stopped, as it is found."""
    points = clean_run(driver, scene, folder).reached
    for at, other in stopped_at(points, _others(scene)):
        node = Expected(scene, scene.copy(folder / "stopped"))
        where = f"{scene.name} stopped at {at}, {points[at].label}, for {other}"
        yield from within(where, _Stop(driver, node, other, points[at]).violations(at))
        shutil.rmtree(node.folder)


def stops_then_kills(driver: Driver, scene: Scene, folder: Path) -> Iterator[Violation]:
    """What is wrong where it wakes up, and is killed as soon as it has changed the hardware."""
    points = clean_run(driver, scene, folder).reached
    same_owner, epilog = _others(scene)[1:3]
    for at, other in stopped_at(points, (same_owner, epilog)):
        if _NODE_LOCK not in points[at].held:
            node = Expected(scene, scene.copy(folder / "stopped"))
            where = f"{scene.name} stopped at {at}, {points[at].label}, for {other}, then killed"
            yield from within(where, _Stop(driver, node, other, points[at]).violations(at, then_kill=True))
            shutil.rmtree(node.folder)


def given_beside(driver: Driver, scene: Scene, folder: Path) -> Iterator[Found | None]:
    """What another owner is given each time while it is stopped with the lock of a GPU, and not of the node."""
    points = clean_run(driver, scene, folder).reached
    another = _others(scene)[0]
    for at, _ in stopped_at(points, [another]):
        if points[at].held and _NODE_LOCK not in points[at].held:
            copy = scene.copy(folder / "stopped")
            stopped = driver.stop(copy, scene.operation, at)
            yield driver.start(copy, another).value
            driver.finish(driver.go_on(stopped))
            shutil.rmtree(copy)


def damages(driver: Driver, scene: Scene, folder: Path) -> Iterator[Violation]:
    """What is wrong where the records are damaged after it has looked at a GPU, and before it read them once more."""
    points = clean_run(driver, scene, folder).reached
    first = next(at for at, point in enumerate(points) if point.held and _NODE_LOCK not in point.held)
    last = next(at for at in range(first, len(points)) if points[at + 1].held != points[first].held)
    copy = scene.copy(folder / "stopped")
    stopped = driver.stop(copy, scene.operation, last)
    (copy / "state" / "state.json").write_bytes(b"{")
    driver.finish(driver.go_on(stopped))
    if instances(copy) != instances(scene.folder):
        yield Violation(LOST, f"{scene.name} went on without a record at {last}, {points[last].label}")


def stopped_at(points: Sequence[Point], others: Sequence[Operation]) -> Iterator[tuple[int, Operation]]:
    """Where to stop, and who comes then.

    Between two points of one stretch the process only reads: neither what is kept nor what it has locked differs.
    Everybody comes once in each stretch, the first at its beginning, the last at its end, the others between. Where it
    has locked a GPU, only the first of all and the last, and where it has locked the node, only the first, each stretch
    with another first.
    """
    numbered = enumerate(points)
    stretches = groupby(numbered, key=lambda each: (each[1].core, each[1].held, each[1].label == "after the answer"))
    turns: Counter[bool] = Counter()
    for (_, held, _), stretch in stretches:
        where = [at for at, _ in stretch]
        if THOROUGH:
            yield from ((at, other) for at in where for other in others)
            continue
        # Node and GPU take turns of their own: they come by in a rhythm that would leave some out for ever.
        turn = turns[_NODE_LOCK in held]
        turns[_NODE_LOCK in held] += 1
        if _NODE_LOCK in held:
            come = [others[turn % len(others)]]
        elif held:
            come = [others[turn % max(1, len(others) - 1)], others[-1]]
        else:
            come = list(others)
        for n, other in enumerate(come):
            yield where[n * (len(where) - 1) // max(1, len(come) - 1)], other


def _others(scene: Scene) -> list[Operation]:
    allocation = scene.allocation
    another = replace(allocation, owner=OTHER)
    return [another, allocation, Operation("reclaim", SUBJECT), Operation("reconcile"), _ADMIN]


class _Stop:
    """One operation stopped at one point, and one other."""

    def __init__(self, driver: Driver, node: Expected, other: Operation, point: Point) -> None:
        self.driver, self.node, self.other, self.point = driver, node, other, point
        self.scene = node.scene
        self.waited = False
        self._is_over = other.name == "reclaim"

    def violations(self, at: int, *, then_kill: bool = False) -> Iterator[Violation]:
        """What is wrong, from the stop to the end of all that follows."""
        stopped = self.driver.stop(self.node.folder, self.scene.operation, at, then_kill=then_kill)
        if (stopped.state, stopped.label) != ("stopped", self.point.label):
            yield Violation(ANSWER, f"{stopped}")
        is_undisturbed = self.other == _ADMIN and not self.node.admin_in_the_way()
        if self.other == _ADMIN:
            woken = self.driver.finish(self.driver.go_on(stopped))
        else:
            if self._is_over:
                self.node.over(SUBJECT)
            locked = self._locked()
            between = self.driver.start(self.node.folder, self.other)
            self.waited = between.state == "waiting"
            if self.waited and not (between.lock == _NODE_LOCK and _NODE_LOCK in self.point.held):
                yield Violation(LOCK, f"it waits for {between.lock}")
            yield from self._changed(locked)
            woken = self.driver.finish(self.driver.go_on(stopped))
            between = self.driver.finish(between)
            yield from self._heard(self.other, between, is_between=True)
        if woken.state == "ended":
            yield from self._heard(self.scene.operation, woken)
        yield from self.node.standing()
        if not is_undisturbed:
            yield from self._in_the_end()

    def _locked(self) -> tuple[list[Found], list[str]]:
        """What nobody else may change now: the GPUs that it has locked, and what is recorded on them."""
        return (
            [i for i in instances(self.node.folder) if self._has_locked(i)],
            [r["nonce"] for r in records(self.node.folder) if self._has_locked(r)],
        )

    def _has_locked(self, found: Found) -> bool:
        return f"gpu-{found['gpu_uuid']}.lock" in self.point.held

    def _changed(self, before: tuple[list[Found], list[str]]) -> Iterator[Violation]:
        hardware, recorded = self._locked()
        if hardware != before[0]:
            yield Violation(LOCK, f"a GPU was changed under the lock of another: {before[0]} became {hardware}")
        if not set(before[1]) <= set(recorded):
            yield Violation(LOCK, "a record was forgotten under the GPU lock of another")

    def _heard(self, operation: Operation, told: Told, *, is_between: bool = False) -> Iterator[Violation]:
        if is_between and not self.waited and self._all_is_locked() and not _says_busy(operation, told):
            yield Violation(LOCK, f"{operation} under the GPU lock of another: {told}")
        if told.value is None and told.code not in self._refusals(operation, is_between=is_between):
            yield Violation(ANSWER, f"{operation}: {told}")
        if not self._is_over:
            yield from self.node.hears(operation, told)
        elif operation.name == "adopt" and told.value is not None:
            self.node.adopted_for_one_who_is_over()

    def _all_is_locked(self) -> bool:
        return self.scene.gpus == 1 and bool(set(self.point.held) - {_NODE_LOCK})

    def _refusals(self, operation: Operation, *, is_between: bool) -> set[str]:
        """The codes that may be answered; a place is there for everybody."""
        allowed = set()
        if self.waited or (is_between and set(self.point.held) - {_NODE_LOCK}):
            allowed.add("BUSY")
        if operation.name == "allocate" and operation.owner == SUBJECT and self.scene.has_remains:
            # They are seen twice before they go.
            allowed.add("BUSY")
        if self._is_over and operation.name == "allocate":
            allowed.add("ENDED")
        if self.scene.operation.name == "adopt" and self.other == self.scene.allocation:
            allowed.add("CONFLICT")
        if operation.refusing_guard:
            allowed.add("GUARD")
        return allowed

    def _in_the_end(self) -> Iterator[Violation]:
        yield from until_quiet(self.driver, self.node)
        if self._is_over and self.scene.operation.name == "allocate":
            # The epilog came after the ask, so no answer to it stands.
            yield from self.node.nothing_of(SUBJECT)
        yield from self.node.settled()
        yield from end(self.driver, self.node, SUBJECT, OTHER)


def _says_busy(operation: Operation, told: Told) -> bool:
    """Whether it is the documented answer where the only GPU stays locked: ask again, or it waits for a reconcile."""
    if operation.name == "allocate":
        return told.code == "BUSY"
    return told.value is not None and all(verdict == "waiting" for _, verdict in told.value)

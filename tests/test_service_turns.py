"""Whose turn it is: connections that wait to be read, and work that waits to be done; no service is needed for it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from gres_mig.errors import Busy
from gres_mig.service.limits import CONNECTIONS, Gate, Line, Ticket


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that awaits."""

    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


class Connections:
    """What a gate did with connections: numbers in the order in which it read or closed them."""

    def __init__(self, at_once: int, in_a_second: int = 0) -> None:
        self.now = 1000.0
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.gate = Gate(
            lambda: at_once, lambda: in_a_second, lambda s, call: self.later.append((s, call)), lambda: self.now
        )
        self.read: list[int] = []
        self.closed: list[int] = []

    def enter(self, user: int, number: int) -> None:
        self.gate.enter(Ticket(user, lambda: self.read.append(number), lambda: self.closed.append(number)))

    def pass_time(self) -> float:
        """Until the next call back; how long that is."""
        wait_s, call = self.later.pop(0)
        self.now += wait_s
        call()
        return wait_s


def test_a_second_of_connections_is_read_freely_and_each_one_more_waits() -> None:
    seen = Connections(64, in_a_second=10)
    for number in range(14):
        seen.enter(5, number)
    seen.enter(6, 100)
    at_once = list(seen.read)

    waits = [seen.pass_time() for _ in range(4)]

    assert at_once == [*range(10), 100]
    assert waits == pytest.approx([0.1] * 4)
    assert seen.read == [*range(10), 100, *range(10, 14)]
    assert seen.later == []


def test_the_gate_reads_so_many_of_a_user_and_then_the_longest_waiting() -> None:
    seen = Connections(2)
    for number in range(4):
        seen.enter(5, number)
    seen.enter(6, 10)
    before = list(seen.read)

    seen.gate.leave(5)

    assert before == [0, 1, 10]
    assert seen.read == [0, 1, 10, 2]
    assert seen.closed == []


def test_who_has_too_many_waiting_is_closed() -> None:
    seen = Connections(8)

    for number in range(100):
        seen.enter(5, number)

    assert seen.read == list(range(8))
    assert seen.closed == list(range(72, 100))
    assert seen.gate.open == 72


def test_a_full_gate_takes_from_whoever_waits_most_and_keeps_a_share_for_root() -> None:
    seen = Connections(8)
    for number in range(CONNECTIONS):
        seen.enter(number % 4 + 1, number)
    full, before = seen.gate.open, len(seen.closed)

    seen.enter(9, 1000)
    seen.enter(0, 2000)

    assert full < CONNECTIONS
    assert seen.read[-2:] == [1000, 2000]
    assert len(seen.closed) == before + 1
    assert seen.gate.open == full + 1


class Work:
    """What a line was given to do, by name as it was begun; each piece goes on until it is let go."""

    def __init__(self, patience_s: float = 60.0) -> None:
        self.line = Line(at_once=6, of_one=4, roots=1, patience_s=patience_s)
        self.begun: list[str] = []
        self._over: dict[str, asyncio.Event] = {}

    def ask(self, user: int, name: str) -> asyncio.Task[str]:
        """Somebody who waits for it."""

        async def work() -> str:
            self.begun.append(name)
            await self._over.setdefault(name, asyncio.Event()).wait()
            return name

        return asyncio.ensure_future(self.line.do(user, work))

    def let_go(self, *names: str) -> None:
        """Let these come to their end."""
        for name in names:
            self._over.setdefault(name, asyncio.Event()).set()


async def settled() -> None:
    """Until nothing more happens by itself."""
    for _ in range(20):
        await asyncio.sleep(0)


@in_a_loop
async def test_users_take_turns_whatever_each_has_waiting() -> None:
    seen = Work()
    for number in range(40):
        seen.ask(5, f"first {number}")
    await settled()
    for user in (6, 7):
        seen.ask(user, f"of {user}")
    await settled()
    before = list(seen.begun)

    seen.let_go("first 0", "first 1")
    await settled()

    assert before == ["first 0", "first 1", "first 2", "first 3", "of 6"]
    assert seen.begun == [*before, "of 7", "first 4"]


@in_a_loop
async def test_the_last_turn_is_kept_for_root() -> None:
    seen = Work()
    for user in range(1, 9):
        seen.ask(user, f"of {user}")
    await settled()
    others = len(seen.begun)

    seen.ask(0, "root's")
    await settled()

    assert others == 5
    assert seen.begun[-1] == "root's"


@in_a_loop
async def test_who_leaves_the_line_is_not_waited_for() -> None:
    seen = Work()
    asked = {name: seen.ask(5, name) for name in ("a", "b", "c", "d", "gone", "e")}
    await settled()

    asked["gone"].cancel()
    seen.let_go(*"abcde")
    await settled()

    assert seen.begun == list("abcde")


@in_a_loop
async def test_who_asks_and_goes_away_has_no_more_done_at_once_than_who_waits() -> None:
    seen = Work()
    for number in range(20):
        asked = seen.ask(5, str(number))
        await settled()
        asked.cancel()
    await settled()
    before = list(seen.begun)

    seen.let_go("0")
    seen.ask(5, "last")
    await settled()

    assert before == list("0123")
    assert seen.begun == [*before, "last"]


@in_a_loop
async def test_who_waits_too_long_for_a_turn_is_told_and_not_begun() -> None:
    seen = Work(patience_s=0.01)
    asked = [seen.ask(5, str(number)) for number in range(5)]

    with pytest.raises(Busy, match="did not get its turn"):
        await asked[4]
    seen.let_go(*"0123")

    assert await asyncio.gather(*asked[:4]) == list("0123")
    assert seen.begun == list("0123")

"""How much of the service one user gets: connections that are read, requests in a second, work at once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from gres_mig.errors import Busy

T = TypeVar("T")

CONNECTIONS = 256
"""In all, waiting ones included."""

_ROOTS_CONNECTIONS = 16
_WAITING = 64
"""Connections of one user that wait to be read; more are closed."""

PATIENCE_S = 15.0
"""How long a request waits for its turn; with what it then takes, less than its client waits for an answer."""


class Ticket:
    """One connection: read or waiting."""

    def __init__(self, user: int, start: Callable[[], None], close: Callable[[], None]) -> None:
        self.user, self.start, self.close = user, start, close


class Gate:
    """Lets so many connections of each user be read at once, and so many in a second, a second's worth of them freely.

    The others wait unread and cost nothing but a descriptor. `later` calls back after so many seconds.
    """

    def __init__(
        self,
        at_once: Callable[[], int],
        in_a_second: Callable[[], int],
        later: Callable[[float, Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._at_once, self._in_a_second, self._later, self._clock = at_once, in_a_second, later, clock
        self._read: Counter[int] = Counter()
        self._waiting: dict[int, deque[Ticket]] = {}
        self._paid_until: OrderedDict[int, float] = OrderedDict()
        self._called_back: set[int] = set()
        self.open = 0
        """How many there are, waiting ones included."""

    def enter(self, ticket: Ticket) -> None:
        """Read it now or later, or close it."""
        waiting = self._waiting.get(ticket.user)
        if waiting and len(waiting) >= _WAITING:
            ticket.close()
            return
        full = self.open >= (CONNECTIONS if ticket.user == 0 else CONNECTIONS - _ROOTS_CONNECTIONS)
        if full and not self._makes_room(ticket.user):
            ticket.close()
            return
        self.open += 1
        self._waiting.setdefault(ticket.user, deque()).append(ticket)
        self._next(ticket.user)

    def leave(self, user: int) -> None:
        """One that was read is over; who waits longest of that user is next."""
        self.open -= 1
        self._read[user] -= 1
        if not self._read[user]:
            del self._read[user]
        self._next(user)

    def close(self) -> None:
        """Close those that wait."""
        for waiting in self._waiting.values():
            for ticket in waiting:
                ticket.close()
            self.open -= len(waiting)
        self._waiting.clear()

    def _next(self, user: int) -> None:
        waiting = self._waiting.get(user)
        while waiting and self._read[user] < self._at_once():
            if (wait_s := self._wait_s(user)) > 0:
                if user not in self._called_back:
                    self._called_back.add(user)
                    self._later(wait_s, lambda: self._due(user))
                return
            ticket = waiting.popleft()
            self._read[user] += 1
            ticket.start()
        if waiting is not None and not waiting:
            self._waiting.pop(user, None)

    def _due(self, user: int) -> None:
        self._called_back.discard(user)
        self._next(user)

    def _wait_s(self, user: int) -> float:
        """How long until one more may be read; where that is no time, it is paid for."""
        rate = self._in_a_second()
        if not rate:
            return 0.0
        now = self._clock()
        while self._paid_until and next(iter(self._paid_until.values())) < now:
            self._paid_until.popitem(last=False)
        paid_until = max(self._paid_until.get(user, 0.0), now) + 1 / rate
        # Sums of fractions are off by some.
        if (wait_s := paid_until - now - 1.0) > 1e-6:
            return wait_s
        self._paid_until[user] = paid_until
        self._paid_until.move_to_end(user)
        return 0.0

    def _makes_room(self, user: int) -> bool:
        """Close the newest that waits of whoever has the most waiting, for one who has fewer."""
        most = max(self._waiting, key=lambda each: len(self._waiting[each]), default=user)
        if most == user:
            return False
        self._waiting[most].pop().close()
        self.open -= 1
        if not self._waiting[most]:
            del self._waiting[most]
        return True


class Line:
    """Whose work is next: users take turns, whatever each has waiting, and who waits too long is refused.

    So many pieces of work are done `at_once`, so many `of_one` user; the last `roots` are root's alone.
    """

    def __init__(self, at_once: int, of_one: int, roots: int, patience_s: float = PATIENCE_S) -> None:
        self._at_once, self._of_one, self._roots, self._patience_s = at_once, of_one, roots, patience_s
        self._running: Counter[int] = Counter()
        self._waiting: OrderedDict[int, deque[asyncio.Future[None]]] = OrderedDict()

    async def do(self, user: int, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the work returns, begun when it is this user's turn; `Busy` when that does not come.

        Work that has begun is done to its end and keeps its turn until then, also where nobody waits for it any more:
        otherwise whoever asks and goes away has as much done at once as he likes.
        """
        await self._turn(user)
        done = asyncio.ensure_future(work())
        done.add_done_callback(lambda _: self._over(user))
        return await asyncio.shield(done)

    async def _turn(self, user: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(user, deque()).append(turn)
        self._next()
        try:
            await asyncio.wait({turn}, timeout=self._patience_s)
        except asyncio.CancelledError:
            if not turn.cancel():
                self._over(user)
            raise
        if turn.cancel():
            waited = f"the service has had too much to do for {self._patience_s:g} s"
            raise Busy(f"{waited}: this request did not get its turn", hint="ask again")

    def _over(self, user: int) -> None:
        self._running[user] -= 1
        if not self._running[user]:
            del self._running[user]
        self._next()

    def _next(self) -> None:
        while able := [user for user in self._waiting if self._may(user)]:
            # Who has the least running, and of those who had a turn the longest time ago.
            user = min(able, key=lambda each: self._running[each])
            waiting = self._waiting[user]
            turn = waiting.popleft()
            if not turn.done():
                self._running[user] += 1
                turn.set_result(None)
                self._waiting.move_to_end(user)
            if not waiting:
                del self._waiting[user]

    def _may(self, user: int) -> bool:
        most = self._at_once if user == 0 else self._at_once - self._roots
        return self._running.total() < most and self._running[user] < self._of_one

"""Runs one function on many cases in forked children of this process, and brings back what it returned."""

from __future__ import annotations

import os
import pickle
import select
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

Case = TypeVar("Case")
Result = TypeVar("Result")


def each(
    work: Callable[[Case], Result], cases: Sequence[Case], *, at_once: int = 0, together: bool = False
) -> list[Result]:
    """The results in the order of the cases; so many children at once, by default one a core.

    `together`: all at once, and none begins before all are there. A child that raises fails the caller.
    """
    at_once = len(cases) if together else at_once or os.cpu_count() or 1
    gate, opener = os.pipe()
    results: dict[int, Result] = {}
    running: dict[int, tuple[int, int, bytearray]] = {}
    waiting = list(enumerate(cases))[::-1]
    if not together:
        os.close(opener)
    while waiting or running:
        while waiting and len(running) < at_once:
            number, case = waiting.pop()
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                _be_child(work, case, writing, gate, opener if together else -1)
            os.close(writing)
            running[reading] = (number, pid, bytearray())
        if together and opener >= 0:
            os.close(opener)
            opener = -1
        for reading in select.select(list(running), [], [])[0]:
            number, pid, data = running[reading]
            part = os.read(reading, 1 << 16)
            data += part
            if not part:
                os.close(reading)
                os.waitpid(pid, 0)
                del running[reading]
                results[number] = _result(bytes(data), cases[number])
    os.close(gate)
    return [results[number] for number in range(len(cases))]


def _be_child(work: Callable[[Case], Result], case: Case, writing: int, gate: int, opener: int) -> NoReturn:
    try:
        if opener >= 0:
            os.close(opener)
        # Ends when the last child is there and the parent has closed the other end.
        os.read(gate, 1)
        try:
            told: tuple[bool, object] = (True, work(case))
        except BaseException:  # noqa: BLE001 - the parent is to see it, whatever it is
            told = (False, traceback.format_exc())
        data = memoryview(pickle.dumps(told))
        while data:
            data = data[os.write(writing, data) :]
    finally:
        os._exit(0)


def _result(data: bytes, case: object) -> Any:
    assert data, f"the child for {case!r} ended without an answer"
    well, value = pickle.loads(data)
    assert well, f"{case!r}: {value}"
    return value

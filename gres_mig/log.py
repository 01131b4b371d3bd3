"""The log of what was changed: one line each, handed to `logging` only when there is a line."""

from __future__ import annotations

import sys
from collections.abc import Callable

INFO, WARNING, ERROR = 20, 30, 40
"""The levels of `logging`, whose import costs a hook twice the start of a bare interpreter."""

Sink = Callable[[int, str], None]


def to_logging(level: int, line: str) -> None:
    """Hand a line to the logger `gres_mig`, where the front end has said what becomes of it."""
    if level < WARNING and "logging" not in sys.modules:
        # Nobody has asked for these: without a word logging shows warnings and what is worse.
        return
    import logging

    logging.getLogger("gres_mig").log(level, "%s", line)


_sink: Sink = to_logging


def send_to(sink: Sink) -> None:
    """From now on, give this process's lines to `sink`."""
    global _sink  # noqa: PLW0603 - a process has one log
    _sink = sink


def relay(level: int, line: str) -> None:
    """A line that a child of this process has written."""
    _sink(level, line)


def info(line: str, *arguments: object) -> None:
    """A change of the hardware or the records."""
    _sink(INFO, line % arguments)


def warning(line: str, *arguments: object) -> None:
    """Something an admin should see in time."""
    _sink(WARNING, line % arguments)


def error(line: str, *arguments: object) -> None:
    """Something an admin has to look at."""
    _sink(ERROR, line % arguments)

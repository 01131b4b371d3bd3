"""A refused start as a person reads it: one sentence that ends with what is free or what to do."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from tornado.web import HTTPError

from gres_mig.errors import GresMigError, NoCapacity, TooBig
from gres_mig.sizes import format_mib

_COLUMNS = 120
"""Lab's dialog has room for 122, does not wrap, and cuts off the rest (Lab 4.6)."""


class Refused(HTTPError):
    """Why a kernel was not started; as an HTTPError its text reaches whoever asked, by every way a kernel is started.

    Lab shows `str()` of what a start raised; REST answers `log_message` with `status_code` (jupyter_server 2.21).
    """

    def __init__(self, error: GresMigError, text: str) -> None:
        self.error, self.text = error, text
        """The sentence, in one line."""
        super().__init__(error.fault.http_status, str(self))

    def __str__(self) -> str:
        return textwrap.fill(self.text, _COLUMNS, break_long_words=False, break_on_hyphens=False)


def sentence(error: GresMigError, sizes: Sequence[Mapping[str, Any]], holds: str = "") -> str:
    """The error for a person in a notebook; `sizes` are those of the node, `holds` what this very notebook has now."""
    if holds:
        # What to do comes first: of a change of kernels Lab shows 79 columns.
        return f"shut this notebook's current kernel down first, it has {holds}: {error.message}"
    if isinstance(error, TooBig) and sizes:
        there = sorted({size["memory_mib"] for size in sizes})
        return f"{error.message}; sizes here: {', '.join(map(format_mib, there))}"
    if isinstance(error, NoCapacity) and error.code in {"NOCAP", "FRAG"}:
        # Of slices it says what is free by itself.
        return error.message if "the largest that is free" in error.message else f"{error.message}; {_free(sizes)}"
    return str(error)


def _free(sizes: Sequence[Mapping[str, Any]]) -> str:
    free = {size["memory_mib"]: size["profile"] for size in sizes if size["free"]}
    if not free:
        return "shut down a GPU kernel, or try again later"
    largest = max(free)
    return f"the largest free is {free[largest]} ({format_mib(largest)})"

"""A refused start as a person reads it: one sentence that ends with what is free or what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tornado.web import HTTPError

from gres_mig.errors import GresMigError, NoCapacity, TooBig
from gres_mig.sizes import format_mib


class Refused(HTTPError):
    """Why a kernel was not started; as an HTTPError its text reaches whoever asked, by every way a kernel is started.

    Lab shows `str()` of what a start raised; REST answers `log_message` with `status_code` (jupyter_server 2.21).
    """

    def __init__(self, error: GresMigError, text: str) -> None:
        super().__init__(error.fault.http_status, text)
        self.error, self.text = error, text

    def __str__(self) -> str:
        return self.text


def sentence(error: GresMigError, sizes: Sequence[Mapping[str, Any]], holds: str = "") -> str:
    """The error for a person in a notebook; `sizes` are those of the node, `holds` what this very notebook has now."""
    if holds:
        return f"{error.message}; this notebook's current kernel has {holds}: shut the current kernel down first"
    if isinstance(error, TooBig) and sizes:
        there = sorted({size["memory_mib"] for size in sizes})
        return f"{error.message}; sizes here: {', '.join(map(format_mib, there))}"
    if isinstance(error, NoCapacity) and error.code in {"NOCAP", "FRAG"}:
        return f"{error.message}; {_free(sizes)}"
    return str(error)


def _free(sizes: Sequence[Mapping[str, Any]]) -> str:
    free = {size["memory_mib"]: size["profile"] for size in sizes if size["free"]}
    if not free:
        return "shut down a kernel that has GPU memory, or try again later"
    largest = max(free)
    return f"the largest that is free now is {free[largest]} ({format_mib(largest)})"

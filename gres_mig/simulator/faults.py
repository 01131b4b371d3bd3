"""Planted faults: which call they hit, and what then happens to the caller."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from . import codes
from .hardware import Store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .schema import Fault, Hardware

ACTIONS = ("returns", "hangs", "lies", "kills", "stops")


def hit(store: Store, hardware: Hardware, symbol: str, gpu: str) -> Fault | None:
    """The fault that this call meets, if any; counts the call for all it matches."""
    counts = _process_counts(store)
    matching = [f for f in hardware["faults"] if _matches(f, symbol, gpu)]
    for fault in matching:
        if fault["count"] == "process":
            counts[fault["id"]] = counts.get(fault["id"], 0) + 1
    if not any(f["count"] == "node" or _due(f, counts[f["id"]]) for f in matching):
        return None
    return _record(store, {f["id"] for f in matching}, counts, gpu)


def suffer(store: Store, fault: Fault) -> None:
    """Be killed, stopped or hung; returns when the process may go on."""
    if fault["action"] == "kills":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault["action"] == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault["action"] == "hangs":
        # Nothing but SIGKILL ends a driver call: handlers and default actions wait until it returns.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while os.path.exists(release_path(store, fault["id"])):
            time.sleep(0.01)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def uninterrupted(seconds: float) -> None:
    """The time a driver call takes, in which no signal reaches the caller's handlers."""
    if seconds > 0:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        time.sleep(seconds)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release_path(store: Store, fault_id: int) -> str:
    """The file whose removal ends a hang."""
    return os.path.join(store.folder, f"hang-{fault_id}")


def _matches(fault: Fault, symbol: str, gpu: str) -> bool:
    if fault["gpu"] and fault["gpu"] != gpu:
        return False
    wanted = fault["function"]
    return wanted in ("*", symbol) or (symbol[-3:-1] == "_v" and wanted == symbol[:-3])


def _process_counts(store: Store) -> dict[int, int]:
    # Beyond a session, for a process has many; a forked child is another process and counts from the beginning.
    return _counts.setdefault((os.getpid(), store.folder), {})


_counts: dict[tuple[int, str], dict[int, int]] = {}


def _due(fault: Fault, number: int) -> bool:
    return fault["nth"] <= number and (not fault["times"] or number < fault["nth"] + fault["times"])


def _record(store: Store, matching: set[int], counts: dict[int, int], gpu: str) -> Fault | None:
    chosen: Fault | None = None
    # A user who may only look at the node meets its faults too; only what he met is not written down.
    with contextlib.suppress(PermissionError), store.change() as hardware:
        for fault in hardware["faults"]:
            if fault["id"] not in matching:
                continue
            if fault["count"] == "node":
                fault["seen"] += 1
            number = fault["seen"] if fault["count"] == "node" else counts[fault["id"]]
            if chosen is None and _due(fault, number):
                chosen = fault
                fault["fired"].append(os.getpid())
                _stick(hardware, fault, gpu)
    return chosen


def _stick(hardware: Hardware, fault: Fault, gpu: str) -> None:
    if fault["sticky"] and fault["code"] == codes.LIB_RM_VERSION_MISMATCH:
        hardware["mismatch"] = True
    if fault["sticky"] and fault["code"] == codes.GPU_IS_LOST:
        for each in hardware["gpus"]:
            each["lost"] = "all" if each["uuid"] == gpu else each["lost"]

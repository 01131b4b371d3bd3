"""Sees which slices use more of their GPU than they were given, says so, and ends them where the admin wants that."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator

from gres_mig import log, machine
from gres_mig.models import Allocation, Gpu, Process, Settings, State
from gres_mig.sizes import format_mib
from gres_mig.slice_models import GpuUser
from gres_mig.state import Store
from gres_mig.values import Value, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    Measure = Literal["", "warn", "terminate", "kill"]

KILL_AFTER_S = 10.0
"""From SIGTERM to SIGKILL, for who wants to write down where it was."""


class Use(Value):
    """What one slice uses of its GPU, and what is to be done about it."""

    record: Allocation
    used_mib: int
    users: tuple[GpuUser, ...]
    measure: Measure = ""
    """Empty where it keeps to what it was given."""

    @property
    def given_mib(self) -> int:
        """What was set aside for it: the driver counts contexts and pools, which a cooperative limit does not."""
        return self.record.memory_mib + self.record.overhead_mib


def patrol(store: Store, settings: Settings, gpus: Iterable[Gpu], now: float) -> tuple[Use, ...]:
    """Measure every slice on those GPUs, as root sees them; record since when one is over, and act on it."""
    found = []
    for use in uses(gpus, store.read()):
        over_since = _since(use, now) if use.used_mib > use.given_mib else 0.0
        measured = replace(use, measure=measure(settings, over_since, now))
        if over_since != use.record.over_since:
            _record(store, use.record, over_since)
            if not use.record.over_since:
                log.warning("%s uses %s of the %s set aside for it: %s",
                            use.record.owner, format_mib(use.used_mib), format_mib(use.given_mib),
                            _described(use))  # fmt: skip
        if measured.measure in ("terminate", "kill"):
            _end(measured)
        found.append(measured)
    return tuple(found)


def uses(gpus: Iterable[Gpu], state: State) -> Iterator[Use]:
    """What each slice on those GPUs uses."""
    for gpu in gpus:
        for record in state.records:
            if record.gpu_uuid == gpu.uuid and gpu.sliced and isinstance(record, Allocation) and record.slice:
                users = tuple(user for user in gpu.users if user.slice == record.nonce)
                yield Use(record, sum(user.memory_mib for user in users), users)


def measure(settings: Settings, over_since: float, now: float) -> Measure:
    """What is to be done about a slice that has been over since then; 0: it is not."""
    if not over_since:
        return ""
    late_s = now - over_since - settings.slicing.over_grant_after_s
    if settings.slicing.over_grant == "warn" or late_s < 0:
        return "warn"
    return "terminate" if late_s < KILL_AFTER_S else "kill"


def _since(use: Use, now: float) -> float:
    # A clock that was set back makes nothing over for longer than it is.
    return use.record.over_since if 0 < use.record.over_since <= now else now


def _record(store: Store, seen: Allocation, over_since: float) -> None:
    with store.transaction() as node:
        record = node.state.get(seen.nonce)
        if isinstance(record, Allocation):
            node.save(node.state.put(replace(record, over_since=over_since)), giving_back=True)


def _end(use: Use) -> None:
    number = signal.SIGTERM if use.measure == "terminate" else signal.SIGKILL
    for user in use.users:
        try:
            descriptor = os.pidfd_open(user.pid)
        except ProcessLookupError:
            continue
        try:
            # By a descriptor of the process that was seen: a pid alone may be another's by now.
            if machine.alive(Process(user.pid, user.start)):
                signal.pidfd_send_signal(descriptor, number)
                log.warning("sent %s to %s of %s, which uses more than it was given",
                            number.name, machine.describe(user.pid), use.record.owner)  # fmt: skip
        except ProcessLookupError:
            continue
        finally:
            os.close(descriptor)


def _described(use: Use) -> str:
    return ", ".join(f"{machine.describe(user.pid)} {format_mib(user.memory_mib)}" for user in use.users)

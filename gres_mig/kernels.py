"""Notebook kernels as owners: their records as a notebook server sees them, and whose life theirs is."""

from __future__ import annotations

from gres_mig import machine
from gres_mig.answers import environment, plain_allocation, plain_record
from gres_mig.errors import BadRequest, NotFound
from gres_mig.models import Allocation, Intent, Owner, Process, Record, Release, State
from gres_mig.owners import parse_owner
from gres_mig.state import Store
from gres_mig.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def owner_of(uid: int, kernel_id: str) -> Owner:
    """The owner that a user's kernel is."""
    try:
        return parse_owner(f"jupyter:{uid}:{kernel_id}")
    except BadRequest:
        raise BadRequest(f"kernel id {kernel_id!r:.60} is not a UUID in lower case, as Jupyter shows it") from None


def unknown(kernel_id: str) -> NotFound:
    """The answer for a kernel that has nothing, and for another user's, which nobody can tell apart."""
    return NotFound(f"kernel {kernel_id} has no instance on this node")


def plain_kernels(state: State, uid: int) -> list[dict[str, Any]]:
    """What a user's kernels have or are giving back, what they have first; what is being made is nobody's yet."""
    mine = [r for r in state.records if r.owner.name.startswith(f"jupyter:{uid}:") and not isinstance(r, Intent)]
    return [plain_kernel(record) for record in sorted(mine, key=lambda r: isinstance(r, Release))]


def plain_kernel(record: Record) -> dict[str, Any]:
    """One record, with the processes it lives by: the server, and the kernel once that was reported."""
    server, kernel = (*record.witnesses, None, None)[:2]
    shown: dict[str, Any] = {
        "kernel_id": record.owner.name.rpartition(":")[2],
        "state": _state(record),
        "since": record.since,
        "server": server and {"pid": server.pid},
        "kernel": kernel and {"pid": kernel.pid},
        "environment": environment(record) if isinstance(record, Allocation) else {},
    }
    if isinstance(record, Allocation):
        return {**plain_allocation(record, created=False), **shown}
    return {**plain_record(record), **shown}


def report(store: Store, owner: Owner, server: Process, kernel_pid: int) -> dict[str, Any]:
    """Record that the owner lives by this server and this kernel from here on; the hardware is left alone."""
    kernel = machine.process(kernel_pid)
    if kernel is None:
        raise BadRequest(f"kernel {owner}: there is no process {kernel_pid}")
    with store.transaction() as node:
        for record in node.state.of(owner):
            if isinstance(record, Allocation):
                reported = living_by(record, server, kernel)
                node.save(node.state.put(reported), giving_back=True)
                return plain_kernel(reported)
    raise BadRequest(f"{owner} holds nothing on this node")


def living_by(record: Allocation, server: Process, kernel: Process) -> Allocation:
    """The record whose owner lives by these two; another server's kernel stays its own while that lives."""
    first = next((w for w in record.witnesses[:1] if machine.alive(w)), server)
    return replace(record, witnesses=(first, kernel))


def _state(record: Record) -> str:
    if isinstance(record, Release):
        return "stuck" if record.stuck else "reclaiming"
    return "lost" if isinstance(record, Allocation) and record.lost else "allocated"

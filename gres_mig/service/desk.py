"""What a caller may have done: start, see and end its own kernels' allocations; each in a process of its own.

Another user's kernel is answered exactly like one that does not exist, and nothing of another owner is ever said.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from gres_mig import explain, kernels, machine
from gres_mig.deadline import operate
from gres_mig.errors import Conflict, NodeFault, NotPermitted, Quota, StateError
from gres_mig.look import look, publish
from gres_mig.models import Allocation, Owner, Profile, Record, Release, Request, Settings, State
from gres_mig.service import shelf
from gres_mig.service.peer import Peer, reported
from gres_mig.service.workshop import Tasks
from gres_mig.settle import Outcome, is_due
from gres_mig.sizes import format_mib
from gres_mig.state import Store
from gres_mig.view import View
from gres_mig.witnesses import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gres_mig.rooms import Held


def tasks(held: Callable[[Settings], Sequence[Held]]) -> Tasks:
    """By name, as the loop asks for them; `held` are places kept free for their owners."""

    def allocate_beside(settings: Settings, *rest: Any) -> dict[str, Any]:
        return allocate(settings, *rest, held=held(settings))

    return {
        "allocate": allocate_beside,
        "report": report,
        "reclaim": reclaim,
        "why": why,
        "health": health,
    }


def allocate(
    settings: Settings, peer: Peer, kernel_id: str, request: Request, begin: int, *, held: Sequence[Held] = ()
) -> dict[str, Any]:
    """The kernel's instance; until the kernel is reported, the caller's life is its owner's."""
    owner = kernels.owner_of(peer.uid, kernel_id)
    if not machine.alive(peer.process):
        raise NotPermitted("whoever asked has ended")
    before = next((r for r in _records(settings, owner) if isinstance(r, Allocation)), None)
    # A kernel that was reported stays a witness: to ask again, for a restart, makes nobody forget it.
    known = kernel(before) if before else None
    witnesses = (peer.process, known) if known else (peer.process,)
    limit = _limit(settings, peer.uid)
    try:
        grant = operate(
            settings,
            lambda allocator: allocator.allocate(owner, request, begin=begin, witnesses=witnesses),
            held=held,
            limit=limit,
        )
    except Conflict as error:
        raise Conflict(error.message, hint="shut the kernel down first, or ask for the same as before") from error
    return {**kernels.plain_kernel(grant.allocation), "created": grant.created}


def report(settings: Settings, peer: Peer, kernel_id: str, pid: int, at_ns: int) -> dict[str, Any]:
    """The kernel's allocation, whose owner lives from now on as long as that process or the server does."""
    owner = kernels.owner_of(peer.uid, kernel_id)
    if not any(isinstance(record, Allocation) for record in _records(settings, owner)):
        raise kernels.unknown(kernel_id)
    found = reported(peer, pid, at_ns)
    with _store(settings).transaction() as node:
        record = next((r for r in node.state.of(owner) if isinstance(r, Allocation)), None)
        if record is None:
            raise kernels.unknown(kernel_id)
        earlier = kernel(record)
        if earlier not in (None, found, record.witnesses[0]) and machine.alive(earlier):
            raise Conflict(f"process {earlier.pid} of kernel {kernel_id} lives", hint="report a restart once it ended")
        record = kernels.living_by(record, peer.process, found)
        node.save(node.state.put(record))
    return kernels.plain_kernel(record)


def reclaim(settings: Settings, peer: Peer, kernel_id: str, begin: int) -> dict[str, Any]:
    """What became of the kernel's instance; nothing there is success, and so is one that is still in use."""
    owner = kernels.owner_of(peer.uid, kernel_id)
    records = _records(settings, owner)
    held_up = [r for r in records if isinstance(r, Release) and r.stuck and not is_due(r.stuck, time.time())]
    if records and len(held_up) == len(records):
        # The hardware is asked when it is time to, not when somebody asks: each try keeps its GPU from others.
        with _store(settings).transaction() as node:
            node.save(node.state.buried(owner, begin), giving_back=True)
        outcomes = tuple(Outcome(r, "stuck", "; ".join(r.stuck.holders)) for r in held_up if r.stuck)
    else:
        outcomes = operate(settings, lambda allocator: allocator.reclaim(owner, begin=begin))
    return {
        "reclaimed": [
            {
                "gpu_uuid": outcome.record.gpu_uuid,
                "profile": outcome.record.profile_name,
                "verdict": outcome.verdict,
                "reason": _told(outcome, peer.uid),
            }
            for outcome in outcomes
        ]
    }


def why(settings: Settings, request: Request) -> dict[str, Any]:
    """Where such a request would go, or what is in the way, from what was last published."""
    last = shelf.last_seen(settings)
    answer = explain.why(View(last.gpus, last.state, last.state, last.looked, owners=False), request, settings)
    return {
        "fits": answer.choice is not None,
        "code": answer.refusal.code if answer.refusal else None,
        "text": "\n".join([answer.verdict, *(f"GPU {o.gpu.index}: {line}" for o in answer.offers for line in o.said)]),
    }


def health(settings: Settings) -> dict[str, Any]:
    """A real look at records and hardware, within their time limits; what it sees is published for everybody."""
    view = look(settings)
    managed = [gpu for gpu in view.gpus if settings.manages(gpu)]
    if not view.gpus and view.notes:
        raise NodeFault(view.notes[0])
    if view.state.distrusted:
        raise StateError("the node's records were damaged", hint="run: gres-mig doctor")
    publish(settings, view)
    return {"gpus": len(managed), "closed": sum(bool(gpu.trouble) for gpu in managed)}


def _limit(settings: Settings, uid: int) -> Callable[[State, Profile], None]:
    """Refuses what is more than one user may have; it is asked under the node's lock, with all that is recorded."""

    serving = settings.serving

    def limit(state: State, profile: Profile) -> None:
        # Also what is only being made, and what does not go yet: all of it keeps its place from others.
        mine = [record for record in state.records if record.owner.name.startswith(f"jupyter:{uid}:")]
        used_mib = sum(record.memory_mib for record in mine)
        number = f"{len(mine)} instance" + ("" if len(mine) == 1 else "s")
        has = f"you (uid {uid}) have {number} with {format_mib(used_mib)} on this node"
        if serving.instances and len(mine) >= serving.instances:
            raise Quota(f"{has}, and user_instances is {serving.instances}", hint=_LESS)
        if serving.memory_mib and used_mib + profile.memory_mib > serving.memory_mib:
            more = f"{profile.name} would add {format_mib(profile.memory_mib)}"
            raise Quota(f"{has}, {more}, and user_memory is {format_mib(serving.memory_mib)}", hint=_LESS)

    return limit


_LESS = "shut down a kernel that you do not need, and ask again"


def _told(outcome: Outcome, uid: int) -> str:
    """Why it did not go, without what other users' processes are."""
    stuck = outcome.record.stuck if isinstance(outcome.record, Release) else None
    told, others = [], False
    # Each by itself: a process names itself as it likes, and may put into its name what parts them.
    for part in stuck.holders if stuck else (outcome.reason,):
        holder = re.match(r"(?:perhaps )?pid (\d+)\b", part)
        if holder is None or machine.uid(int(holder[1])) == uid:
            told.append(part)
        else:
            others = True
    return "; ".join([*told, *(["processes that are not yours"] if others else [])])


def _records(settings: Settings, owner: Owner) -> tuple[Record, ...]:
    return _store(settings).read().of(owner)


def _store(settings: Settings) -> Store:
    return Store(settings, machine.boot_id(settings.simulator))

"""The managed GPUs as the chooser sees them: what is taken, what is closed and why."""

from __future__ import annotations

from collections.abc import Sequence

from gres_mig import placement
from gres_mig.errors import BadRequest, Fault, GresMigError, NodeFault
from gres_mig.models import Gpu, Instance, Placement, Record, Request, Settings, State
from gres_mig.values import Value, replace


class Held(Value):
    """A place that is kept free for an owner who has waited long; all others' requests go round it."""

    gpu_uuid: str
    placement: Placement
    owner: str
    takes_mib: int = 0
    """The memory that is kept free for a slice, of whatever number."""


def choose(
    rooms: list[placement.Room], request: Request, settings: Settings, failed: dict[str, GresMigError]
) -> placement.Choice:
    """The best place; when nothing is open any more, the reason is why the first GPU failed."""
    try:
        return best(rooms, request, settings)
    except NodeFault as error:
        # Where a GPU was only busy, waiting can help; so that is the reason to tell.
        reasons = sorted(failed.values(), key=lambda e: e.fault is not Fault.CAPACITY)
        if reasons:
            raise reasons[0] from error
        raise


def best(rooms: Sequence[placement.Room], request: Request, settings: Settings) -> placement.Choice:
    """A MIG instance, which is a wall in hardware; a slice where there is room for none and the request allows it."""
    if not any(room.gpu.sliced for room in rooms):
        return placement.choose(rooms, request, settings)
    # An import that is paid only where GPUs are shared.
    from gres_mig import slices

    asked = placement.asked_of(rooms, request)
    shared = [room for room in asked if room.gpu.sliced]
    divided = [room for room in asked if not room.gpu.sliced]
    refusals: list[GresMigError] = []
    if divided:
        try:
            return placement.choose(divided, replace(request, gpus=()), settings)
        except GresMigError as error:
            refusals.append(error)
    if shared and not (request.isolation or (request.profile and divided)):
        try:
            return slices.choose(shared, request, settings)
        except GresMigError as error:
            refusals.append(error)
    if not refusals:
        raise BadRequest(
            f"isolation={request.isolation} was asked for, and what could serve {request} here is shared by slices",
            hint="ask without --isolation, or for another node",
        )
    # Whoever may yet serve it decides: what is only taken before what is out of order before what never could.
    order = (Fault.CAPACITY, Fault.NODE, Fault.REQUEST)
    first, *others = sorted(refusals, key=lambda error: order.index(error.fault))
    if not others:
        raise first
    message = f"{first.message}; {others[0].message}"
    raise type(first)(message, hint=first.hint, blockers=first.blockers, code=first.code)


def without(
    rooms: tuple[placement.Room, ...], failed: dict[str, GresMigError], taken: Sequence[Record | Held]
) -> list[placement.Room]:
    """The rooms less the GPUs that failed this ask, the places that the driver refused to it and those of others."""
    left = []
    for room in rooms:
        there = [i for i in taken if i.gpu_uuid == room.gpu.uuid]
        error = failed.get(room.gpu.uuid)
        left.append(
            replace(
                room,
                busy=(*room.busy, *(i.placement for i in there)),
                held_mib=room.held_mib + sum(i.takes_mib for i in there if isinstance(i, Held)),
                closed=room.closed or (error.message if error else ""),
            )
        )
    return left


def room(gpu: Gpu, state: State) -> placement.Room:
    """One GPU: taken is what the hardware or a record holds, a stuck one too."""
    records = [r for r in state.records if r.gpu_uuid == gpu.uuid]
    there = {i.placement for i in gpu.instances}
    held = sum(p.memory_mib for i in gpu.instances if (p := gpu.profile(i.profile_id)))
    held += sum(r.memory_mib + r.overhead_mib for r in records if r.placement not in there)
    # A slice says itself what it takes, and what no slice uses of a shared GPU no slice can have.
    held += sum(i.memory_mib for i in gpu.instances) + gpu.foreign_mib
    closed = gpu.trouble
    if gpu.uuid in state.fences:
        closed = f"fenced: {state.fences[gpu.uuid].reason}; run: gres-mig unfence {gpu.uuid}"
    elif state.distrusted and (strangers := unnamed(gpu, state)):
        closed = (
            f"the node's records were damaged and {len(strangers)} instances on it are not recorded; "
            f"run: gres-mig adopt OWNER {gpu.uuid}:{strangers[0].id}, "
            f"or: gres-mig reclaim --foreign {gpu.uuid}:{strangers[0].id} --yes"
        )
    busy = (*there, *(r.placement for r in records))
    return placement.Room(gpu, busy, held, gpu.full_profiles, closed)


def told(gpus: tuple[Gpu, ...], state: State) -> set[object]:
    """What of a look may refuse a request and not be so any more: instances without a record (one given back since
    has none either), profiles that the driver called full, and the menus."""
    found: set[object] = {(gpu.uuid, profile_id) for gpu in gpus for profile_id in gpu.full_profiles}
    found |= {user for gpu in gpus for user in gpu.users if not user.slice}
    return found.union(*(gpu.profiles for gpu in gpus), *(unnamed(gpu, state) for gpu in gpus))


def instance(gpu: Gpu, gi_id: int) -> Instance:
    """The instance of that id; `BadRequest` where there is none."""
    found = next((i for i in gpu.instances if i.id == gi_id), None)
    if found is None:
        there = ", ".join(str(i.id) for i in gpu.instances) or "none"
        raise BadRequest(f"{gpu.uuid} has no GPU instance {gi_id}; its instances: {there}")
    return found


def unnamed(gpu: Gpu, state: State) -> list[Instance]:
    """Foreign instances: those on the hardware that no record names."""
    return [i for i in gpu.instances if not any(covers(r, i) for r in state.records)]


def covers(record: Record, instance: Instance) -> bool:
    """Whether they claim a slice in common."""
    return record.gpu_uuid == instance.gpu_uuid and record.placement.overlaps(instance.placement)

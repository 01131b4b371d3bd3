"""What one look at the node found, and where records and hardware do not say the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal

from gres_mig.models import Allocation, Gpu, Instance, Intent, Placement, Record, Release, State
from gres_mig.rooms import covers
from gres_mig.settle import at
from gres_mig.values import Value

Kind = Literal["intent", "allocation", "release", "stuck", "lost", "foreign"]
DriftKind = Literal["missing", "mismatch", "unread", "old intent", "old release", "stuck", "distrusted"]

OLD_S = 30.0
"""An intent or release that nobody works on is drift once it is older; hardware work has its own, shorter limit."""


class View(Value):
    """What one look found: the GPUs, and what the node had recorded just before and just after it."""

    gpus: tuple[Gpu, ...]
    state: State
    before: State
    looked: float
    """Wall clock of the look at the hardware."""
    owners: bool = True
    """Whether records name their owners and instances; what is published for everybody does not."""
    notes: tuple[str, ...] = ()
    """What the reader has to know first: there is no driver, nothing was published yet."""


class Holding(Value):
    """Memory slices of one GPU and what holds them: a record, an instance that no record names, or both."""

    placement: Placement
    kind: Kind
    profile_name: str
    memory_mib: int
    record: Record | None = None
    instance: Instance | None = None


class Drift(Value):
    """One thing on which records and hardware differ, or with which nobody goes on."""

    kind: DriftKind
    gpu_uuid: str
    owner: str
    text: str


def holdings(view: View, gpu: Gpu) -> tuple[Holding, ...]:
    """What holds slices of that GPU, by start; the slices of none of them are free."""
    found = []
    named: set[int] = set()
    for record in view.state.records:
        if record.gpu_uuid == gpu.uuid:
            instance = _instance_of(view, gpu, record)
            named |= {instance.id} if instance else set()
            kind = _kind(view, gpu, record, instance)
            found.append(Holding(record.placement, kind, record.profile_name, record.memory_mib, record, instance))
    for instance in gpu.instances:
        # What a record named before the look, and none after it, went away meanwhile.
        if instance.id in named or (_covered(view.before, instance) and not _covered(view.state, instance)):
            continue
        # Published records do not say which instance is theirs; what lies where they do is taken for it.
        if view.owners or not _covered(view.state, instance):
            profile = gpu.profile(instance.profile_id)
            name, memory_mib = (profile.name, profile.memory_mib) if profile else ("", instance.memory_mib)
            found.append(Holding(instance.placement, "foreign", name, memory_mib, None, instance))
    return tuple(sorted(found, key=lambda h: (h.placement.start, h.placement.size, h.kind)))


def mask(held: Collection[Holding]) -> int:
    """Their slices as bits."""
    bits = 0
    for holding in held:
        bits |= holding.placement.mask
    return bits


def was_read(gpu: Gpu) -> bool:
    """Whether the look got as far as its instances: not where it is fenced or lost or the driver fails."""
    return not gpu.trouble or gpu.mig_current is False or gpu.mig_current is not gpu.mig_pending


def has_no_mig(gpu: Gpu) -> bool:
    """Whether the look found a board without MIG; one that could not be read may have it."""
    return gpu.memory_mib > 0 and gpu.mig_current is None


def drift(view: View, now: float, now_ns: int, busy: Collection[str] = ()) -> Iterator[Drift]:
    """Where records and hardware differ; a foreign instance alone is no drift.

    `now_ns` is `machine.now_ns()`. `busy` are the GPUs whose lock a process holds: there somebody is at work.
    """
    if view.state.distrusted:
        text = "the records were damaged and set aside: what they named is foreign until it is adopted or reclaimed"
        yield Drift("distrusted", "", "", text)
    gpus = {gpu.uuid: gpu for gpu in view.gpus}
    for record in view.state.records:
        found = _drift(view, gpus.get(record.gpu_uuid), record)
        if found is None and record.gpu_uuid not in busy and _age_s(view.state, record, now, now_ns) > OLD_S:
            found = _left_over(view, record)
        if found is not None:
            kind, text = found
            where = f"{record.profile_name} at {record.placement} of {record.gpu_uuid}"
            yield Drift(kind, record.gpu_uuid, str(record.owner), f"{record.owner}, {where}: {text}")


def _drift(view: View, gpu: Gpu | None, record: Record) -> tuple[DriftKind, str] | None:
    if isinstance(record, Release) and record.stuck:
        return "stuck", f"the hardware does not let it go: {'; '.join(record.stuck.holders)}"
    if gpu is None:
        return "unread", "the GPU is not on this node any more"
    if not was_read(gpu):
        return "unread", f"its GPU cannot be read: {gpu.trouble}"
    if _kind(view, gpu, record, _instance_of(view, gpu, record)) == "lost":
        other = next((i for i in gpu.instances if covers(record, i)), None)
        if other is None:
            return "missing", "recorded, but not on the hardware"
        return "mismatch", f"recorded, but what is there is another: GPU instance {other.id} at {other.placement}"
    return None


def _left_over(view: View, record: Record) -> tuple[DriftKind, str] | None:
    earlier = view.before.get(record.nonce)
    if isinstance(record, Intent) and isinstance(earlier, Intent):
        return "old intent", "an intent that nobody goes on with"
    if isinstance(record, Release) and isinstance(earlier, Release):
        return "old release", "a release that nobody goes on with"
    return None


def _age_s(state: State, record: Record, now: float, now_ns: int) -> float:
    """How long ago it became what it is, as far as that is known: a release keeps the time of its allocation."""
    if not isinstance(record, Release):
        return now - record.since
    age_s = now - max(record.since, record.bare_since)
    ended = state.ended(record.owner)
    return age_s if ended < 0 else min(age_s, (now_ns - ended) / 1e9)


def _kind(view: View, gpu: Gpu, record: Record, instance: Instance | None) -> Kind:
    if isinstance(record, Intent):
        return "intent"
    if isinstance(record, Release):
        return "stuck" if record.stuck else "release"
    assert isinstance(record, Allocation)
    # One that was committed during the look may be younger than what was seen.
    settled = isinstance(view.before.get(record.nonce), Allocation)
    gone = view.owners and settled and was_read(gpu) and instance is None
    return "lost" if record.lost or gone else "allocation"


def _instance_of(view: View, gpu: Gpu, record: Record) -> Instance | None:
    """The record's own instance: at its place, of its profile and with the ids it knows."""
    found = at(gpu, record)
    if found is None or not view.owners:
        return found
    if isinstance(record, Allocation):
        ids = {(compute.id, compute.mig_uuid) for compute in found.compute_instances}
        return found if found.id == record.gi_id and (record.ci_id, record.mig_uuid) in ids else None
    assert isinstance(record, (Intent, Release))
    return found if record.gi_id in (None, found.id) else None


def _covered(state: State, instance: Instance) -> bool:
    return any(covers(record, instance) for record in state.records)

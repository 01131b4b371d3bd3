"""Views of a node as JSON shows them; the schema is in docs/json.md."""

from __future__ import annotations

from typing import Any

from gres_mig import slices
from gres_mig.models import Allocation, Gpu, Placement, Profile, Record, Release, Settings
from gres_mig.rooms import room
from gres_mig.show import largest_free, summary
from gres_mig.view import Drift, Holding, View, holdings, mask


def plain_view(view: View, settings: Settings) -> dict[str, Any]:
    """Each GPU, and what holds its slices."""
    return {
        "summary": summary(view, settings),
        "looked": view.looked or None,
        "owners_shown": view.owners,
        "records_distrusted": view.state.distrusted,
        "notes": list(view.notes),
        "gpus": [_gpu(view, gpu, settings) for gpu in sorted(view.gpus, key=lambda gpu: gpu.index)],
    }


def plain_holding(view: View, holding: Holding) -> dict[str, Any]:
    """What holds some slices; what is not known, or not shown to the caller, is null."""
    record, instance = holding.record, holding.instance
    computes = instance.compute_instances if instance else ()
    return {
        "state": holding.kind,
        "placement": plain_placement(holding.placement),
        "profile": {"name": holding.profile_name, "memory_mib": holding.memory_mib},
        "isolation": record.isolation if isinstance(record, Allocation) and view.owners else None,
        "owner": str(record.owner) if record and view.owners else None,
        "requested": str(record.request) if record and view.owners else None,
        "since": record.since if record else None,
        "gi_id": instance.id if instance else None,
        "mig_uuid": computes[0].mig_uuid if len(computes) == 1 else None,
        "stuck": _stuck(view, record),
    }


def plain_drift(drift: Drift) -> dict[str, Any]:
    """One thing on which records and hardware differ."""
    return {"kind": drift.kind, "gpu_uuid": drift.gpu_uuid or None, "owner": drift.owner or None, "text": drift.text}


def plain_placement(placement: Placement) -> dict[str, int]:
    """Start and size, in memory slices."""
    return {"start": placement.start, "size": placement.size}


def plain_profile(profile: Profile) -> dict[str, Any]:
    """A profile of some GPU; the id means nothing without the GPU."""
    return {"id": profile.id, "name": profile.name, "memory_mib": profile.memory_mib}


def plain_gpu(gpu: Gpu) -> dict[str, Any]:
    """Which GPU it is."""
    return {"index": gpu.index, "uuid": gpu.uuid, "pci_bus_id": gpu.pci_bus_id, "model": gpu.model}


def _gpu(view: View, gpu: Gpu, settings: Settings) -> dict[str, Any]:
    held = holdings(view, gpu)
    managed = settings.manages(gpu)
    fence = view.state.fences.get(gpu.uuid)
    most = largest_free(gpu, view.state, settings) if managed else None
    return {
        **plain_gpu(gpu),
        "memory_mib": gpu.memory_mib,
        "mig": None if gpu.mig_current is None else {"current": gpu.mig_current, "pending": gpu.mig_pending},
        "managed": managed,
        "closed": room(gpu, view.state).closed or None,
        "fenced_since": fence.since or None if fence else None,
        "slices": gpu.slices,
        "free_slices": 0 if gpu.sliced else gpu.slices - mask(held).bit_count(),
        "shared": _shared(view, gpu, settings) if gpu.sliced else None,
        "largest_free": plain_profile(most) if most else None,
        "holdings": [plain_holding(view, holding) for holding in held],
    }


def _shared(view: View, gpu: Gpu, settings: Settings) -> dict[str, Any]:
    return {
        "isolation": gpu.backend or None,
        "capacity_mib": slices.capacity_mib(gpu, settings),
        "held_mib": room(gpu, view.state).held_mib,
        "overhead_mib": slices.overhead_mib(gpu, settings),
        "foreign_mib": gpu.foreign_mib,
    }


def _stuck(view: View, record: Record | None) -> dict[str, Any] | None:
    if not isinstance(record, Release) or record.stuck is None or not view.owners:
        return None
    stuck = record.stuck
    return {
        "since": stuck.since,
        "tries": stuck.tries,
        "next_try": stuck.next_try,
        "holders": list(stuck.holders),
    }

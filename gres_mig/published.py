"""What root publishes for everybody, read back as the nouns it was made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gres_mig.errors import StateError
from gres_mig.models import (
    Allocation,
    ComputeInstance,
    Fence,
    Gpu,
    Instance,
    Intent,
    Owner,
    Placement,
    Profile,
    Record,
    Release,
    Request,
    State,
    Stuck,
)
from gres_mig.state import Store
from gres_mig.values import Value


class Published(Value):
    """The managed GPUs as root last saw them, and what was recorded when it was last written."""

    looked: float
    """Wall clock of that look; 0: there was none."""
    gpus: tuple[Gpu, ...]
    state: State
    """Its records have no owners and do not say which instance is theirs."""


def read(store: Store, boot_id: str) -> Published:
    """What was published on this node last; `StateError` where there is nothing to be read."""
    public = store.public()
    try:
        records = tuple(_record(number, plain, boot_id) for number, plain in enumerate(public["records"]))
        fences = {uuid: Fence(reason, 0.0) for uuid, reason in public["fences"].items()}
        return Published(
            looked=float(public["looked"]),
            gpus=tuple(map(_gpu, public["gpus"])),
            state=State(boot_id, records, fences=fences, distrusted=bool(public.get("distrusted"))),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        hint = "if gres-mig was just upgraded, run as root: gres-mig status"
        raise StateError(f"what was published on this node cannot be read: {error!r}", hint=hint) from error


def _gpu(plain: Mapping[str, Any]) -> Gpu:
    # Who uses a shared GPU is not published; what older ones did not write is as it was then.
    known = {name: plain[name] for name in Gpu.field_names() if name in plain and name != "users"}
    known["profiles"] = tuple(map(_profile, plain["profiles"]))
    known["instances"] = tuple(map(_instance, plain["instances"]))
    known["full_profiles"] = frozenset(plain["full_profiles"])
    return Gpu(**known)


def _profile(plain: Mapping[str, Any]) -> Profile:
    known = {name: plain[name] for name in Profile.field_names()}
    return Profile(**{**known, "placements": tuple(map(_placement, plain["placements"]))})


def _instance(plain: Mapping[str, Any]) -> Instance:
    computes = tuple(ComputeInstance(c["id"], c["mig_uuid"]) for c in plain["compute_instances"])
    place, memory_mib = _placement(plain["placement"]), plain.get("memory_mib", 0)
    return Instance(plain["gpu_uuid"], plain["id"], plain["profile_id"], place, computes, memory_mib=memory_mib)


def _placement(plain: Mapping[str, Any]) -> Placement:
    return Placement(int(plain["start"]), int(plain["size"]))


def _record(number: int, plain: Mapping[str, Any], boot_id: str) -> Record:
    shared: dict[str, Any] = {
        "nonce": f"published-{number}",
        "owner": Owner(""),
        "request": Request(plain["memory_mib"]),
        "begin": 0,
        "boot_id": boot_id,
        "placement": _placement(plain["placement"]),
        **{name: plain[name] for name in ("gpu_uuid", "profile_id", "profile_name", "memory_mib", "since")},
        "slice": plain.get("slice", ""),
        "overhead_mib": plain.get("overhead_mib", 0),
    }
    if plain["kind"] == "release":
        return Release(**shared, stuck=Stuck(plain["since"], 0, 0.0) if plain["stuck"] else None)
    if plain["kind"] == "intent":
        return Intent(**shared)
    return Allocation(**shared, lost=bool(plain.get("lost")))

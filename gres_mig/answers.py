"""What the commands say, as text and as JSON; the schema is in docs/json.md."""

from __future__ import annotations

import json
import os
import stat
import sys

from gres_mig.errors import GresMigError, NotPermitted
from gres_mig.sizes import format_mib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, NoReturn

    from gres_mig.models import Allocation, Record, Settings
    from gres_mig.settle import Outcome

SCHEMA = 1

_SAID = {
    "released": "released",
    "gone": "nothing of it was left",
    "foreign": "what is there is not its instance any more and was left alone",
    "stuck": "not given back yet; its place is withheld and it is tried again",
    "waiting": "to be settled by the next reconcile",
    "lost": "lost",
}


def emit(value: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print the result, as one JSON object or as text."""
    print(json.dumps({"schema": SCHEMA, **value}) if as_json else text)


def fail(error: GresMigError, *, as_json: bool) -> NoReturn:
    """Print an error and end with its exit code: 2 request, 3 capacity, 4 node."""
    if as_json:
        print(json.dumps({"schema": SCHEMA, "error": plain_error(error)}))
    print(f"gres-mig: {error}", file=sys.stderr)
    sys.exit(error.fault.exit_code)


def plain_error(error: GresMigError) -> dict[str, Any]:
    """An error as JSON shows it."""
    return {
        "fault": error.fault.value,
        "code": error.code,
        "message": error.message,
        "hint": error.hint,
        "blockers": list(error.blockers),
    }


def for_root(settings: Settings, command: str, *, or_delegate: bool = False) -> Settings:
    """The settings, if the caller may change this node; a simulated node is its maker's own.

    With `or_delegate` the user too to whom root gave the records (`gres-mig setup --delegate`).
    """
    if settings.simulator:
        if not os.access(settings.simulator, os.W_OK):
            raise NotPermitted(f"{command}: {settings.simulator} is not yours to change")
    elif os.geteuid() != 0 and not (or_delegate and delegated(settings) == os.geteuid()):
        raise NotPermitted(f"{command} needs root on this node", hint="see what is free with: gres-mig status")
    return settings


def delegated(settings: Settings) -> int:
    """The user whose the records are: root, uid 0, unless `gres-mig setup --delegate` gave them to another."""
    try:
        status = os.lstat(settings.state_dir)
        # Anybody may have a configuration and a folder of his own; only root's says whose the node's records are.
        if os.path.lexists(settings.config_path) and os.stat(settings.config_path).st_uid != 0:
            return 0
    except OSError:
        return 0
    return status.st_uid if stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o022 else 0


def environment(allocation: Allocation) -> dict[str, str]:
    """What the owner's processes are told: one instance, by UUID, never an index."""
    return {
        "CUDA_VISIBLE_DEVICES": allocation.mig_uuid,
        "NVIDIA_VISIBLE_DEVICES": allocation.mig_uuid,
        "GRES_MIG_UUID": allocation.mig_uuid,
        "GRES_MIG_GPU_UUID": allocation.gpu_uuid,
        "GRES_MIG_PROFILE": allocation.profile_name,
        "GRES_MIG_MEMORY_MIB": str(allocation.memory_mib),
        "GRES_MIG_REQUESTED": allocation.request.profile or str(allocation.request.memory_mib),
        "GRES_MIG_ISOLATION": allocation.isolation,
        "GRES_MIG_SINCE": str(int(allocation.since)),
        **dict(line.split("=", 1) for line in allocation.variables),
    }


def added(variables: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """That environment with those variables; what its owner preloads himself is loaded after what holds the limit."""
    ours, own = variables.get("LD_PRELOAD", ""), environment.get("LD_PRELOAD", "")
    # A process that was told already starts another one, as a job's script does its steps.
    own = own.removeprefix(ours).removeprefix(":") if ours else own
    preload = ":".join(filter(None, (ours, own)))
    return {**environment, **variables, **({"LD_PRELOAD": preload} if preload else {})}


def plain_record(record: Record) -> dict[str, Any]:
    """What JSON shows of every record: whose it is, what was asked for, and its place."""
    return {
        "owner": str(record.owner),
        "requested_mib": record.request.memory_mib or None,
        "requested_profile": record.request.profile or None,
        "profile": {"id": record.profile_id, "name": record.profile_name, "memory_mib": record.memory_mib},
        "placement": {"start": record.placement.start, "size": record.placement.size},
        "gpu_uuid": record.gpu_uuid,
    }


def plain_allocation(allocation: Allocation, *, created: bool) -> dict[str, Any]:
    """An allocation as JSON shows it; `created` is false where the owner had it already."""
    return {
        **plain_record(allocation),
        "gi_id": allocation.gi_id,
        "ci_id": allocation.ci_id,
        "mig_uuid": allocation.mig_uuid,
        "isolation": allocation.isolation,
        "boot_id": allocation.boot_id,
        "created": created,
    }


def describe(allocation: Allocation) -> str:
    """`manual:alice has 1g.24gb (24,192 MiB) for 8,000 MiB: MIG-… at 0:3 of GPU-…, isolation=env`."""
    what = f"{allocation.profile_name} ({format_mib(allocation.memory_mib)}) for {allocation.request}"
    where = f"{allocation.mig_uuid} at {allocation.placement} of {allocation.gpu_uuid}"
    if allocation.slice:
        where = f"of {allocation.gpu_uuid}"
    return f"{allocation.owner} has {what}: {where}, isolation={allocation.isolation}"


def emit_outcomes(outcomes: tuple[Outcome, ...], nothing: str, *, as_json: bool) -> None:
    """Print what became of each record, or `nothing`."""
    lines = [
        f"{o.record.owner}: {o.record.profile_name} at {o.record.placement} of {o.record.gpu_uuid}: "
        f"{_SAID[o.verdict]}" + (f" ({o.reason})" if o.reason else "")
        for o in outcomes
    ]
    plain = [
        {
            "owner": str(o.record.owner),
            "gpu_uuid": o.record.gpu_uuid,
            "profile": o.record.profile_name,
            "verdict": o.verdict,
            "reason": o.reason,
        }
        for o in outcomes
    ]
    emit({"reclaimed": plain}, "\n".join(lines) or nothing, as_json=as_json)

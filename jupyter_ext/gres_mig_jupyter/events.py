"""What a server tells its event listeners of instances: got, given back, refused; no user, no token, no path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jupyter_events import EventLogger

SCHEMA_ID = "urn:gres-mig:jupyter:instances:v1"

SCHEMA: dict[str, Any] = {
    "$id": SCHEMA_ID,
    "version": "1",
    "title": "GPU instances of kernels",
    "personal-data": False,
    "description": "A kernel got a MIG instance, gave it back, or was refused one.",
    "type": "object",
    "required": ["action", "kernel_id"],
    "additionalProperties": False,
    "properties": {
        "action": {
            "enum": ["allocate", "reclaim", "refuse"],
            "description": "What happened; a restart of a kernel is none of it.",
        },
        "kernel_id": {"type": "string", "description": "The kernel; of an instance that kernels share, its own id."},
        "profile": {"type": "string", "description": "The profile of the instance, such as 1g.24gb."},
        "memory_mib": {"type": "integer", "description": "The memory of the instance, MiB."},
        "gpu_uuid": {"type": "string", "description": "The GPU it is on."},
        "mig_uuid": {"type": "string", "description": "The instance, as CUDA_VISIBLE_DEVICES names it."},
        "verdict": {
            "type": "string",
            "description": "What became of what it gave back: released, or stuck while in use.",
        },
        "code": {"type": "string", "description": "Why it was refused, in one word; see docs/errors.md."},
    },
}


class Events:
    """Emits what a node tells to the listeners of one server."""

    def __init__(self, logger: EventLogger) -> None:
        self._logger = logger
        logger.register_event_schema(SCHEMA)

    def __call__(self, action: str, kernel_id: str, details: Mapping[str, Any]) -> None:
        """Tell one thing that happened; of its details only what the schema names."""
        told = {name: details[name] for name in ("gpu_uuid", "mig_uuid", "verdict", "code") if name in details}
        if "profile" in details:
            told |= {"profile": details["profile"]["name"], "memory_mib": details["profile"]["memory_mib"]}
        self._logger.emit(schema_id=SCHEMA_ID, data={"action": action, "kernel_id": kernel_id, **told})

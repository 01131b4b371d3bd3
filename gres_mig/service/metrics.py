"""What the service measures and sees, for Prometheus; no label names a user, an owner or a job."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, exposition
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric

from gres_mig.presence import Presence

CONTENT_TYPE = exposition.CONTENT_TYPE_LATEST

_MIB = 1 << 20
_STATES = ("allocation", "intent", "release", "stuck", "lost")


class Metrics:
    """Of one service."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._shelf: dict[str, Any] | None = None
        self._presence: Presence | None = None
        self._requests = Counter(
            "gresmig_requests", "Requests at the socket, by whose fault their failure was", ["method", "result"],
            registry=self._registry,
        )  # fmt: skip
        self._durations = Histogram(
            "gresmig_operation_duration_seconds", "How long a task took, its waits for locks included", ["op"],
            registry=self._registry, buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
        )  # fmt: skip
        self._pass = Gauge(
            "gresmig_pass_age_seconds", "Since the last pass over the node that succeeded", registry=self._registry
        )
        self._registry.register(self)

    def answered(self, method: str, result: str) -> None:
        """One more request; `result` is `ok` or whose fault it was."""
        known = method if method in ("GET", "PUT", "POST", "DELETE") else "other"
        self._requests.labels(known, result).inc()

    @contextmanager
    def timed(self, task: str) -> Iterator[None]:
        """How long a task takes."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._durations.labels(task).observe(time.monotonic() - began)

    def seen(self, shelf: dict[str, Any], presence: Presence, since_pass_s: float) -> None:
        """What the node has now."""
        self._shelf, self._presence = shelf, presence
        self._pass.set(since_pass_s)

    def text(self) -> bytes:
        """All of them."""
        return exposition.generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Prometheus' own name for it: what is not counted here, but seen."""
        if self._presence is None or self._shelf is None:
            return
        yield InfoMetricFamily("gresmig_build", "The version that runs", {"version": self._presence.version})
        failed = GaugeMetricFamily("gresmig_config_reload_failed", "Whether the last reload changed nothing")
        failed.add_metric([], float(bool(self._presence.error)))
        yield failed
        looked = GaugeMetricFamily("gresmig_look_timestamp_seconds", "When the hardware was last looked at")
        looked.add_metric([], self._shelf["looked"] or 0.0)
        yield looked
        yield from self._gpus(self._shelf["gpus"])

    def _gpus(self, gpus: list[dict[str, Any]]) -> Iterator[Metric]:
        labels = ["gpu", "uuid"]
        memory = GaugeMetricFamily("gresmig_gpu_memory_bytes", "Memory of each managed GPU", labels=[*labels, "kind"])
        closed = GaugeMetricFamily("gresmig_gpu_closed", "Whether a GPU takes no new work", labels=labels)
        fenced = GaugeMetricFamily("gresmig_gpu_fenced", "Whether a GPU is fenced", labels=labels)
        free = GaugeMetricFamily("gresmig_placements_free", "How many could be made now", labels=[*labels, "profile"])
        records = GaugeMetricFamily("gresmig_instances", "Recorded instances", labels=[*labels, "profile", "state"])
        for gpu in gpus:
            which = [str(gpu["gpu"]), gpu["uuid"]]
            for kind, mib in (("capacity", "memory_mib"), ("reserved", "reserved_mib"), ("allocated", "held_mib")):
                memory.add_metric([*which, kind], gpu[mib] * _MIB)
            closed.add_metric(which, float(gpu["closed"]))
            fenced.add_metric(which, float(gpu["fenced"]))
            for profile, number in gpu["free"].items():
                free.add_metric([*which, profile], number)
            for state in _STATES:
                for profile, number in gpu["records"].get(state, {}).items():
                    records.add_metric([*which, profile, state], number)
        yield from (memory, closed, fenced, free, records)

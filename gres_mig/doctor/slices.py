"""Checks of GPUs that are shared by slices: each can be, and something holds its slices to their memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gres_mig.doctor.finding import Finding
from gres_mig.models import Gpu, Settings
from gres_mig.slice_models import DRIVER_LIMIT


def slices(gpus: Sequence[Gpu], settings: Settings) -> Iterator[Finding]:
    """Each shared GPU gives slices."""
    backends: dict[str, int] = {}
    reasons: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        if gpu.trouble.startswith("fenced") or not is_one(gpu, settings):
            continue
        if gpu.trouble:
            reasons.setdefault(gpu.trouble, []).append(gpu)
        else:
            backends[gpu.backend] = backends.get(gpu.backend, 0) + 1
    for reason, alike in reasons.items():
        named = ", ".join(f"GPU {gpu.index} ({gpu.uuid})" for gpu in alike)
        yield Finding("slices", "problem", f"{named}: {reason}", _todo(alike[0], settings))
    for backend, number in backends.items():
        held = "the driver" if backend == DRIVER_LIMIT else "HAMi-core, which its own processes load"
        yield Finding("slices", "ok", f"{number} shared GPU(s); each slice is held to its memory by {held}")


def is_one(gpu: Gpu, settings: Settings) -> bool:
    """Whether that GPU is, or is to be, shared by slices, so that its MIG mode is as it should be."""
    return gpu.sliced or settings.names_twice(gpu)


def _todo(gpu: Gpu, settings: Settings) -> str:
    if settings.names_twice(gpu):
        return f"take it out of one in {settings.config_path}; run: gres-mig doctor"
    if gpu.mig_current:
        return f"run: gres-mig disable-mig {gpu.uuid}, or take it out of slices in {settings.config_path}"
    return f"see docs/slices.md; set hami_core and keep_umask in {settings.config_path}; run: gres-mig slices test"

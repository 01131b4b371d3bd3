"""Slurm jobs as `status` and `why` show them: what a job holds here, and what one that was put back waits for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gres_mig import log
from gres_mig.errors import StateError
from gres_mig.models import Owner, Settings
from gres_mig.owners import parse_owner
from gres_mig.show import age
from gres_mig.view import View
from gres_mig.view_json import plain_placement
from gres_mig_slurm import delayed
from gres_mig_slurm.delayed import Delayed


def waiting(view: View, settings: Settings) -> tuple[Delayed, ...]:
    """The jobs that this node put back because it had no place, oldest first; to those who may read its records."""
    if not view.owners:
        return ()
    try:
        return tuple(sorted(delayed.read(settings), key=lambda job: job.first))
    except StateError as error:
        log.warning("%s", error)
        return ()


def holder(view: View, what: str) -> Owner | None:
    """The owner of what the job of that id holds here; None where it holds nothing, or that is not shown."""
    names = {r.owner.name for r in view.state.records if re.fullmatch(rf"slurm:[^:]+:{re.escape(what)}", r.owner.name)}
    return parse_owner(min(names)) if view.owners and names else None


def one_waiting(jobs: Sequence[Delayed], what: str) -> Delayed | None:
    """The waiting job that an admin means by its id, by ARRAY_TASK or by its owner's name."""
    return next((job for job in jobs if what in (str(job.job_id), job.reference, job.owner)), None)


def describe(job: Delayed, now: float) -> str:
    """`slurm:lab:13 waits for 30,000 MiB, since 3m; 2 starts found no place; begins again in 20s`."""
    starts = "1 start" if job.tries == 1 else f"{job.tries} starts"
    due = job.begin - now
    again = f"begins again in {age(due)}, or as soon as there is a place" if due > 0 else "is to begin again now"
    kept = f"; {job.start}:{job.size} of {job.gpu_uuid} is kept free for it" if job.gpu_uuid else ""
    return f"{job.owner} waits for {job.request}, since {age(now - job.first)}; {starts} found no place; {again}{kept}"


def plain(job: Delayed) -> dict[str, Any]:
    """A waiting job as JSON shows it."""
    held = job.held
    return {
        "owner": job.owner,
        "job": job.reference,
        "requested": str(job.request),
        "since": job.first,
        "starts": job.tries,
        "begins": job.begin,
        "kept": {"gpu_uuid": held.gpu_uuid, "placement": plain_placement(held.placement)} if held else None,
    }

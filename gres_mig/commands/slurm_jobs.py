"""Slurm jobs as `status` and `why` show them: what a job holds here, and what one that was put back waits for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gres_mig import log
from gres_mig.errors import BadRequest, StateError
from gres_mig.models import Owner, Request, Settings
from gres_mig.owners import parse_owner
from gres_mig.show import age
from gres_mig.values import Value
from gres_mig.view import View
from gres_mig.view_json import plain_placement
from gres_mig_slurm import controller, delayed
from gres_mig_slurm.delayed import Delayed
from gres_mig_slurm.job import Job, parse, request


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


class Gated(Value):
    """A job that waits at the controller until some node says that it has a place."""

    job: Job
    request: Request


def one_gated(view: View, settings: Settings, what: str) -> Gated | None:
    """The job of that id, if it waits behind a gate."""
    if settings.admission != "gates" or not view.owners or not re.fullmatch(r"[1-9][0-9]{0,9}", what):
        return None
    try:
        job = parse(controller.rows(int(what)), int(what))
        asked = request(job) if job and job.gated and job.state == "PD" else None
    except (controller.Refused, controller.Unreachable, BadRequest):
        # There is no such job, or nobody can tell: then it is a size.
        return None
    return Gated(job, asked) if job and asked else None


def describe_gated(gated: Gated, now: float) -> str:
    """`job 13 waits at the controller for 30,000 MiB, since 3m, until a node has a place for it; of this node:`."""
    since = age(now - gated.job.submitted)
    waits = f"waits at the controller for {gated.request}, since {since}, until a node has a place for it"
    return f"{gated.job} {waits}; of this node:"


def plain_gated(gated: Gated) -> dict[str, Any]:
    """The same as JSON shows it."""
    job = gated.job
    return {"job": job.reference, "requested": str(gated.request), "since": job.submitted, "gated": True}


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

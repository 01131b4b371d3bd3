"""`gres-mig why`: where a request would go, or who is in the way; what an owner holds."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import click

from gres_mig import explain, machine
from gres_mig.answers import describe, emit
from gres_mig.cli import Node, json_option, pass_node
from gres_mig.commands import slurm_jobs
from gres_mig.commands.status import terminal
from gres_mig.errors import BadRequest, NotPermitted
from gres_mig.explain import Answer, Offer
from gres_mig.look import look
from gres_mig.models import Allocation, Owner, Record, Release, Request
from gres_mig.owners import parse_owner
from gres_mig.show import Columns, Paper, age, bar, title
from gres_mig.sizes import format_mib, parse_memory
from gres_mig.values import replace
from gres_mig.view import Holding, View, holdings
from gres_mig.view_json import plain_gpu, plain_holding, plain_placement, plain_profile


@click.command()
@click.argument("what", metavar="SIZE|PROFILE|OWNER|JOBID")
@click.option("--gpu", "gpus", multiple=True, metavar="UUID", help="On this GPU; may be given again.")
@click.option("--isolation", type=click.Choice(["mig"]), help="A MIG instance and no slice.")
@json_option
@click.pass_context
@pass_node
def why(node: Node, ctx: click.Context, what: str, gpus: tuple[str, ...], isolation: str | None, as_json: bool) -> None:
    """Say where a request would go or who is in the way (exit 3), or what OWNER or a Slurm job holds or waits for.

    A number is a job that holds or waits for something on this node, or behind its gates, else a size.
    """
    settings = node.settings
    view = look(settings)
    if job := slurm_jobs.one_waiting(slurm_jobs.waiting(view, settings), what):
        answer = explain.why(view, job.request, settings)
        plain, first = {"waits": slurm_jobs.plain(job)}, slurm_jobs.describe(job, time.time())
    elif owner := parse_owner(what) if ":" in what else slurm_jobs.holder(view, what):
        return _say_owner(view, owner, as_json)
    elif gated := slurm_jobs.one_gated(view, settings, what):
        answer = explain.why(view, gated.request, settings)
        plain, first = {"waits": slurm_jobs.plain_gated(gated)}, slurm_jobs.describe_gated(gated, time.time())
    else:
        request = replace(_request(view, what, gpus), isolation=isolation or "")
        answer = explain.why(view, request, settings)
        plain, first = {}, ""
    paper = terminal()
    lines = [*paper.wrap("title", first, 0), *_lines(view, answer, paper)]
    emit({**plain, **_plain(view, answer)}, paper.finish(lines), as_json=as_json)
    if answer.refusal:
        ctx.exit(answer.refusal.fault.exit_code)
    return None


def _request(view: View, what: str, gpus: tuple[str, ...]) -> Request:
    try:
        return Request(parse_memory(what), "", gpus)
    except BadRequest:
        # Asked for by its name, or meant to be: then the answer is which names there are.
        known = any(what.lower() == profile.name.lower() for gpu in view.gpus for profile in gpu.profiles)
        if known or re.fullmatch(r"[0-9]+[cg]\.[0-9a-z.+-]*", what, re.IGNORECASE):
            return Request(0, what, gpus)
        raise


def _lines(view: View, answer: Answer, paper: Paper) -> Iterator[str]:
    yield answer.verdict
    for note in view.notes:
        yield from paper.wrap("quiet", note, 0)
    columns = Columns(view, [h for offer in answer.offers for h in offer.in_the_way], time.time(), paper)
    for offer in answer.offers:
        yield ""
        yield title(offer.gpu, paper)
        for line in offer.said:
            yield from paper.wrap("quiet" if offer.fits else "trouble", line, 2)
        if offer.profiles and not offer.fits:
            if offer.gpu.slices:
                yield f"  {bar(offer.gpu, holdings(view, offer.gpu), bool(offer.closed), paper)}"
            for holding in offer.in_the_way:
                yield from columns.lines(holding)
            yield from _way_out(view, offer, columns)


def _way_out(view: View, offer: Offer, columns: Columns) -> Iterator[str]:
    if offer.closed:
        return
    if offer.makes_room:
        ends = "this ends" if len(offer.makes_room) == 1 else "these end"
        each = " and ".join(_named(view, record) for record in offer.makes_room)
        yield from columns.paper.wrap("title", f"room when {ends}: {each}", 2)
        return
    for holding in offer.in_the_way:
        if holding.record is None and holding.instance:
            yield from columns.paper.wrap("title", "no owner's end makes room: what is foreign is in the way", 2)
            # In one piece, to be copied.
            name = f"{offer.gpu.uuid}:{holding.instance.id}"
            yield f"  run: gres-mig adopt OWNER {name}"
            yield f"  run: gres-mig reclaim --foreign {name} --yes"
            return


def _named(view: View, record: Record) -> str:
    where = f"{record.profile_name} at {record.placement}"
    if record.slice:
        where = f"a slice of {format_mib(record.memory_mib)}"
    return f"{record.owner} ({where})" if view.owners else where


def _say_owner(view: View, owner: Owner, as_json: bool) -> None:
    if not view.owners:
        raise NotPermitted(f"what {owner} holds is shown to root only", hint="see what is free with: gres-mig status")
    held = _held_by(view, owner)
    lines = [_held(record, holding, time.time()) for record, holding in held]
    ended = view.state.ended(owner)
    over = f"; its work ended {age((machine.now_ns() - ended) / 1e9)} ago" if ended >= 0 else ""
    plain = [{"gpu_uuid": record.gpu_uuid, **plain_holding(view, holding)} for record, holding in held]
    text = "\n".join(lines) or f"{owner} holds nothing on this node{over}"
    emit({"owner": str(owner), "holds": plain}, text, as_json=as_json)


def _held_by(view: View, owner: Owner) -> list[tuple[Record, Holding]]:
    by_record = {h.record.nonce: h for gpu in view.gpus for h in holdings(view, gpu) if h.record}
    found = []
    for record in view.state.named(owner):
        # Of a GPU that is not on the node any more nothing was seen.
        lost = Holding(record.placement, "lost", record.profile_name, record.memory_mib, record)
        found.append((record, by_record.get(record.nonce, lost)))
    return found


def _held(record: Record, holding: Holding, now: float) -> str:
    since = age(now - record.since)
    if isinstance(record, Allocation) and holding.kind == "allocation":
        return f"{describe(record)}, for {since}"
    stuck = f"; {', '.join(record.stuck.holders)}" if isinstance(record, Release) and record.stuck else ""
    return (
        f"{record.owner}, {holding.kind}: {record.profile_name} ({format_mib(record.memory_mib)}) for "
        f"{record.request} at {record.placement} of {record.gpu_uuid}, asked for {since} ago{stuck}"
    )


def _plain(view: View, answer: Answer) -> dict[str, Any]:
    choice = answer.choice
    return {
        "request": {
            "memory_mib": answer.request.memory_mib or None,
            "profile": answer.request.profile or None,
            "gpus": list(answer.request.gpus),
        },
        "fits": choice is not None,
        "verdict": answer.verdict,
        "code": answer.refusal.code if answer.refusal else None,
        "choice": {
            "gpu_uuid": choice.gpu_uuid,
            "profile": plain_profile(choice.profile),
            "placement": plain_placement(choice.placement),
            "isolation": choice.slice or None,
        }
        if choice
        else None,
        "gpus": [_plain_offer(view, offer) for offer in answer.offers],
    }


def _plain_offer(view: View, offer: Offer) -> dict[str, Any]:
    return {
        **plain_gpu(offer.gpu),
        "closed": offer.closed or None,
        "profiles": [plain_profile(profile) for profile in offer.profiles],
        "places": len(offer.places),
        "room_mib": offer.room_mib if offer.gpu.sliced else None,
        "free": [plain_placement(place) for place in offer.free],
        "fits": offer.fits,
        "but": offer.but or None,
        "in_the_way": [plain_holding(view, holding) for holding in offer.in_the_way],
        "makes_room": [
            {
                "owner": str(record.owner) if view.owners else None,
                "profile": record.profile_name,
                "placement": plain_placement(record.placement),
            }
            for record in offer.makes_room
        ],
    }

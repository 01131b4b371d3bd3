"""`gres-mig profiles`: what each model of GPU on this node offers, as its own NVML says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import click

from gres_mig.answers import emit
from gres_mig.cli import Node, json_option, pass_node
from gres_mig.commands.status import terminal
from gres_mig.look import look
from gres_mig.menu import menu_of
from gres_mig.models import Gpu, Placement, Profile, Settings
from gres_mig.show import Paper
from gres_mig.sizes import format_mib
from gres_mig.view import View
from gres_mig.view_json import plain_gpu, plain_placement, plain_profile

Use = Literal["by size", "by name", "not allowed"]

_HEADS = ("profile", "id", "MiB", "slices", "compute", "SMs", "fits", "asked", "places")
_RIGHT = frozenset({"id", "MiB", "slices", "compute", "SMs", "fits"})


@click.command()
@json_option
@pass_node
def profiles(node: Node, as_json: bool) -> None:
    """List the profiles of each model of GPU: how much memory, how many fit, and what may be asked for."""
    settings = node.settings
    view = look(settings)
    models = _models(view, settings)
    plain = [_plain(gpus, settings) for gpus in models]
    paper = terminal()
    text = paper.finish(_lines(view, models, settings, paper))
    emit({"models": plain, "notes": list(view.notes)}, text, as_json=as_json)


def most_at_once(profile: Profile) -> int:
    """How many of that profile fit on an empty GPU: as many as do not overlap, and no more than NVML says.

    Some profiles have more places than instances (`+me` has one instance), and an A30's NVML was seen to be
    off by one in its number of instances (mig-parted issue 157).
    """
    number, end = 0, 0
    for placement in sorted(profile.placements, key=lambda p: p.start + p.size):
        if placement.start >= end:
            number, end = number + 1, placement.start + placement.size
    return min(number, profile.instance_count)


def use(gpu: Gpu, profile: Profile, settings: Settings) -> Use:
    """How an owner comes by it: by asking for memory, by its name only, or not at all."""
    menu = menu_of(gpu, settings)
    if profile in menu.allowed:
        return "by size"
    return "by name" if profile in menu.nameable else "not allowed"


def _models(view: View, settings: Settings) -> list[list[Gpu]]:
    """The GPUs, those together that offer the same."""
    found: dict[tuple[str, tuple[Profile, ...]], list[Gpu]] = {}
    for gpu in sorted(view.gpus, key=lambda gpu: gpu.index):
        found.setdefault((gpu.model, gpu.profiles), []).append(gpu)
    return list(found.values())


def _lines(view: View, models: Sequence[list[Gpu]], settings: Settings, paper: Paper) -> Iterator[str]:
    if not models:
        yield "0 GPUs"
    for note in view.notes:
        yield from paper.wrap("quiet", note, 0)
    for number, gpus in enumerate(models):
        if number:
            yield ""
        first = gpus[0]
        slices = f", {first.slices} memory slices" if first.slices else ""
        memory = f", {format_mib(first.memory_mib)}" if first.memory_mib else ""
        yield paper.paint("title", f"{first.model or 'unknown model'}{memory}{slices}")
        for gpu in gpus:
            managed = "managed" if settings.manages(gpu) else "not managed"
            trouble = f", {gpu.trouble}" if gpu.trouble else ""
            yield from paper.wrap("quiet", f"GPU {gpu.index}  {gpu.uuid}  {managed}{trouble}", 2)
        if first.profiles:
            yield from _table(first, settings, paper)


def _table(gpu: Gpu, settings: Settings, paper: Paper) -> Iterator[str]:
    rows = [
        (
            profile.name,
            str(profile.id),
            f"{profile.memory_mib:,}",
            "/".join(sorted({str(p.size) for p in profile.placements})),
            str(profile.compute_slices),
            str(profile.multiprocessors),
            str(most_at_once(profile)),
            use(gpu, profile, settings),
            _places(profile.placements),
        )
        for profile in sorted(gpu.profiles, key=lambda p: (p.variant, p.memory_mib, p.multiprocessors, p.name))
    ]
    widths = [max(len(row[n]) for row in (_HEADS, *rows)) for n in range(len(_HEADS))]
    yield paper.paint("quiet", f"  {_row(_HEADS, widths)}")
    for row in rows:
        quiet = row[-2] != "by size"
        yield paper.paint("quiet", f"  {_row(row, widths)}") if quiet else f"  {_row(row, widths)}"


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = [
        cell.rjust(width) if head in _RIGHT else cell.ljust(width)
        for cell, width, head in zip(cells, widths, _HEADS, strict=True)
    ]
    return "  ".join(aligned).rstrip()


def _places(placements: Sequence[Placement]) -> str:
    """`0,3,6,9:3`, as NVIDIA's tools write it: starts, then the size."""
    sizes = dict.fromkeys(p.size for p in placements)
    return " ".join(f"{','.join(str(p.start) for p in placements if p.size == size)}:{size}" for size in sizes)


def _plain(gpus: Sequence[Gpu], settings: Settings) -> dict[str, Any]:
    first = gpus[0]
    return {
        "model": first.model,
        "memory_mib": first.memory_mib,
        "slices": first.slices,
        "gpus": [{**plain_gpu(gpu), "managed": settings.manages(gpu), "trouble": gpu.trouble or None} for gpu in gpus],
        "profiles": [
            {
                **plain_profile(profile),
                "compute_slices": profile.compute_slices,
                "multiprocessors": profile.multiprocessors,
                "placements": [plain_placement(placement) for placement in profile.placements],
                "most_at_once": most_at_once(profile),
                "variant": profile.variant,
                "asked": use(first, profile, settings),
            }
            for profile in first.profiles
        ],
    }

"""`gres-mig simulate`: makes a node without GPUs that behaves as one with them, and lists what can be in it."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from gres_mig import config_text
from gres_mig.answers import emit
from gres_mig.cli import json_option
from gres_mig.commands import misfortune, rehearse
from gres_mig.errors import BadRequest, NotPermitted
from gres_mig.files import make_folder
from gres_mig.models import Gpu
from gres_mig.nvml import Session
from gres_mig.simulator import assembly
from gres_mig.simulator import boards as packaged
from gres_mig.simulator.admin import Node
from gres_mig.sizes import format_mib

_MOST_GPUS = 32


@click.group(no_args_is_help=False)
def simulate() -> None:
    """Make simulated nodes, and play with them.

    To try gres-mig without a GPU, and to rehearse what may happen to one.
    """


class _Pairs(click.Command):
    """Keeps which `--count` follows which `--board`: click itself collects each option's values apart."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        values, _, order = self.make_parser(ctx).parse_args(list(args))
        left = {name: list(values[name]) for name in ("board", "count") if isinstance(values.get(name), list)}
        pairs: list[tuple[str, str | None]] = []
        for parameter in order:
            if parameter.name == "board":
                pairs.append((left["board"].pop(0), None))
            elif parameter.name == "count":
                if not pairs or pairs[-1][1] is not None:
                    raise click.UsageError("--count belongs after the --board it counts", ctx)
                pairs[-1] = (pairs[-1][0], left["count"].pop(0))
        ctx.meta["boards"] = pairs
        return super().parse_args(ctx, args)


class _Seconds(click.FloatRange):
    """A number of seconds; "nan" is inside every range as click compares."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value!r} is no number of seconds", param, ctx)
        return seconds


@simulate.command(cls=_Pairs)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--board", multiple=True, required=True, metavar="NAME", help="A model, see: gres-mig simulate boards.")
@click.option(
    "--count", multiple=True, type=click.IntRange(1, _MOST_GPUS), metavar="N", help="How many of the --board before it."
)
@click.option(
    "--managed", default="*", metavar="GPUS", show_default=True, help="`*`, `none`, or GPUs by UUID or index: 0,1,5."
)
@click.option("--mig", type=click.Choice(["on", "off"]), default="on", show_default=True, help="MIG mode of the GPUs.")
@click.option("--create-seconds", type=_Seconds(0, 600), default=0.0, help="Time a board takes to create.")
@click.option("--destroy-seconds", type=_Seconds(0, 600), default=0.0, help="Time it takes to destroy.")
@click.option(
    "--driver",
    "version",
    metavar="VERSION",
    help="Its driver, such as 615.10.04; by default that of the H200 measured.",
)
@click.option("--half-swapped", is_flag=True, help="Chips whose instance ids lie in the other half, as some do.")
@json_option
def create(
    folder: Path,
    managed: str,
    mig: str,
    create_seconds: float,
    destroy_seconds: float,
    version: str | None,
    half_swapped: bool,
    as_json: bool,
    **_: Any,
) -> None:
    """Make a simulated node in a new folder.

    `gres-mig --node DIR …` then works on it. --board and --count may be given again:
    --board rtx-pro-6000 --count 8 --board l40.
    """
    pairs = [(name, int(count or 1)) for name, count in click.get_current_context().meta["boards"]]
    _refuse_a_folder_in_use(folder)
    _refuse_what_is_no_version(version)
    chosen = _managed(managed, folder, sum(count for _, count in pairs))
    try:
        assembly.create(
            folder,
            pairs,
            mig=mig == "on",
            half_swapped=half_swapped,
            create_s=create_seconds,
            destroy_s=destroy_seconds,
        )
        if version:
            _load(folder, version)
        with Session(os.path.abspath(folder)) as driver:
            gpus = driver.gpus(lambda gpu: True)
    except OSError as error:
        raise NotPermitted(f"making a simulated node in {folder}: {error.strerror}") from error
    settings = config_text.write_node_config(folder, chosen, gpus)
    command = f"gres-mig --node {shlex.quote(str(folder))}"
    steps = _next_steps(command, gpus, [gpu for gpu in gpus if settings.manages(gpu)])
    shown = [_plain(gpu, managed=settings.manages(gpu)) for gpu in gpus]
    first = f"{folder} holds a node of {len(gpus)} simulated GPU{'s' * (len(gpus) != 1)}"
    text = "\n".join([first, *_lines(shown), *(f"next: {step}" for step in steps)])
    emit({"node": settings.simulator, "gpus": shown, "next": steps}, text, as_json=as_json)


@simulate.command()
@json_option
def boards(as_json: bool) -> None:
    """List the boards a simulated node can have."""
    figures = [packaged.data(name) for name in packaged.names()]
    shown = [
        {
            "board": board["board"],
            "model": board["model"],
            "memory_mib": board["memory_mib"],
            "mig": bool(board["profiles"]),
            "instances": board["max_instances"],
            "reset_for_mig": bool(board["profiles"]) and not board["resetless"],
            "mode_survives_reboot": board["mode_survives_reboot"],
        }
        for board in sorted(figures, key=lambda board: (board["memory_mib"], board["board"]))
    ]
    lines = [
        f"{b['board']:<14}{format_mib(b['memory_mib']):>12}  "
        + (f"MIG, up to {b['instances']} instances" if b["mig"] else "no MIG").ljust(25)
        + f"  {b['model']}"
        for b in shown
    ]
    emit({"boards": shown}, "\n".join(lines), as_json=as_json)


def _refuse_what_is_no_version(version: str | None) -> None:
    if version and not re.fullmatch(r"[1-9][0-9]{2}(\.[0-9]+){1,2}", version):
        raise BadRequest(f"{version!r} is no version of a driver", hint="write it as nvidia-smi does: 615.10.04")


def _load(folder: Path, version: str) -> None:
    Node(folder).configure(driver=version, nvml=f"13.{version}")
    # What a driver's memory limits need: a cgroup v2 hierarchy.
    make_folder(str(folder / "sys/fs/cgroup"))
    (folder / "sys/fs/cgroup/cgroup.controllers").touch()


def _refuse_a_folder_in_use(folder: Path) -> None:
    try:
        there = os.listdir(folder)
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise BadRequest(f"{folder} is not a folder") from error
    except OSError as error:
        raise NotPermitted(f"making a simulated node in {folder}: {error.strerror}") from error
    if "hardware.json" in there:
        raise BadRequest(f"{folder} already holds a simulated node", hint="choose another folder, or remove it")
    if there:
        raise BadRequest(f"{folder} is not empty", hint="choose a new folder, or an empty one")


def _managed(text: str, folder: Path, count: int) -> tuple[str, ...]:
    if text in ("*", "none"):
        return ("*",) if text == "*" else ()
    uuids = [assembly.gpu_uuid(str(folder), index) for index in range(count)]
    chosen = []
    for entry in text.split(","):
        named = entry.isascii() and entry.isdigit() and len(entry) < 4 and int(entry) < count
        uuid = uuids[int(entry)] if named else entry
        if uuid not in uuids:
            raise BadRequest(f"{entry!r} is no GPU of this node", hint=f"name them 0 to {count - 1}, or by UUID")
        chosen.append(uuid)
    return tuple(dict.fromkeys(chosen))


def _next_steps(command: str, gpus: Sequence[Gpu], managed: Sequence[Gpu]) -> list[str]:
    if not managed:
        return [f"{command} setup --write"]
    able = [gpu for gpu in managed if gpu.mig_current is not None]
    off = [f"{command} enable-mig {gpu.uuid}" for gpu in able if not gpu.mig_current][:1]
    return [*off, f"{command} allocate --owner manual:me --memory 8000"] if able else [f"{command} status"]


def _plain(gpu: Gpu, *, managed: bool) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "model": gpu.model,
        "memory_mib": gpu.memory_mib,
        "mig": gpu.mig_current,
        "managed": managed,
    }


def _lines(shown: Sequence[dict[str, Any]]) -> list[str]:
    modes = {None: "no MIG", True: "MIG on", False: "MIG off"}
    return [
        f"  GPU {gpu['index']:<2} {gpu['uuid']}  {gpu['model']}, {modes[gpu['mig']]}"
        + ("" if gpu["managed"] else ", not managed")
        for gpu in shown
    ]


rehearse.add_to(simulate)
misfortune.add_to(simulate)

"""`gres-mig setup`: shows or writes what makes this node's GPUs managed; it never changes a GPU."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import click

from gres_mig import config, delegation
from gres_mig.answers import emit, for_root
from gres_mig.cli import Node, json_option, pass_node
from gres_mig.commands import boot_unit, node_files
from gres_mig.errors import BadRequest, NodeFault, NotPermitted
from gres_mig.look import look
from gres_mig.models import Gpu, Settings
from gres_mig.placement import named
from gres_mig.service import systemd
from gres_mig.values import replace


@click.command()
@click.option("--gpus", metavar="GPUS", help="GPUs to manage, UUIDs or PCI addresses with commas between, or `*`.")
@click.option("--dry-run", is_flag=True, help="Show what would be written; that is what happens without --write.")
@click.option("--write", is_flag=True, help="Write it.")
@click.option("--mig-at-boot/--no-mig-at-boot", default=None, help="Whether the boot unit turns MIG on.")
@click.option("--service", is_flag=True, help="The unit of the service too, with its socket for notebook servers.")
@click.option("--delegate", metavar="USER", help="Let this one user make instances without root; `root` undoes it.")
@json_option
@pass_node
def setup(
    node: Node,
    gpus: str | None,
    dry_run: bool,
    write: bool,
    mig_at_boot: bool | None,
    service: bool,
    delegate: str | None,
    as_json: bool,
) -> None:
    """Write this node's configuration and boot unit.

    It lists as managed the GPUs named with --gpus, else those that are already, else all that have MIG. What an
    existing configuration says otherwise stays, and a copy of it is kept. No GPU is changed: the commands for that
    are printed.
    """
    if dry_run and write:
        raise BadRequest("--dry-run and --write are opposites", hint="leave one of them out")
    if delegate is not None:
        if gpus is not None or mig_at_boot is not None or service:
            raise BadRequest("--delegate stands alone", hint="set the node up first, then delegate it")
        return _delegate(node, delegate, write=write, as_json=as_json)
    before = _existing(node)
    settings = for_root(before, "setup --write") if write else before
    seen = look(settings)
    found = seen.gpus
    if not found and seen.notes:
        raise NodeFault(seen.notes[0])
    settings = replace(settings, managed=_managed(gpus, settings, found))
    if mig_at_boot is not None:
        settings = replace(settings, mig_at_boot=mig_at_boot)
    plan = node_files.plan(settings, found, _options(node, settings), with_service=service)
    kept = node_files.write(plan) if write else ""
    again = [] if gpus is None else ["--gpus", gpus]
    again += [] if mig_at_boot is None else ["--mig-at-boot" if mig_at_boot else "--no-mig-at-boot"]
    again += ["--service"] if service else []
    steps = [] if write else [shlex.join([*_command(node), "setup", "--write", *again])]
    steps += _next_steps(node, settings, found, service=service)
    shown = [_plain(gpu, managed=settings.manages(gpu)) for gpu in found]
    plain = {
        "written": write,
        "gpus": shown,
        "folders": [settings.state_dir],
        "files": [{"path": file.path, "state": file.state, "text": file.text} for file in plan.files],
        "kept": kept or None,
        "next": steps,
    }
    told = node_files.told(plan, kept, written=write)
    text = "\n".join([*(_line(gpu) for gpu in shown), *told, *(f"next: {step}" for step in steps)])
    emit(plain, text, as_json=as_json)
    return None


def _delegate(node: Node, name: str, *, write: bool, as_json: bool) -> None:
    settings = node.settings
    if not os.path.lexists(settings.config_path):
        raise BadRequest("this node is not set up yet", hint="run: gres-mig setup --write")
    if write and os.geteuid() != 0:
        raise NotPermitted("setup --delegate --write needs root", hint="without --write it shows what it would do")
    account = delegation.user(name)
    steps = delegation.plan(settings, account)
    if write:
        delegation.carry_out(steps)
    would = "" if write else "would be so: "
    after = [shlex.join([*_command(node), "setup", "--delegate", account.pw_name, "--write"])]
    if write:
        # /run and /dev are new after each boot.
        after = [] if settings.simulator else [f"systemctl daemon-reload && systemctl enable {boot_unit.NAME}"]
    granted = delegation.grants(account.pw_name, settings)
    told = [f"{step.path}: {would if step.needed else 'already: '}{step.text}" for step in steps]
    plain = {
        "written": write,
        "user": account.pw_name,
        "grants": granted,
        "steps": [{"path": step.path, "text": step.text, "needed": step.needed} for step in steps],
        "next": after,
    }
    emit(plain, "\n".join([*granted, *told, *(f"next: {step}" for step in after)]), as_json=as_json)


def _existing(node: Node) -> Settings:
    settings = config.defaults(node.config_file, node=node.folder)
    return node.settings if os.path.lexists(settings.config_path) else settings


def _managed(wanted: str | None, settings: Settings, found: Sequence[Gpu]) -> tuple[str, ...]:
    if wanted == "*":
        return ("*",)
    if wanted is None:
        return settings.managed or tuple(gpu.uuid for gpu in found if gpu.mig_current is not None)
    chosen = []
    for entry in wanted.split(","):
        gpu = named(found, entry.strip())
        # One that could not be read has no memory size; whether it has MIG will show when it is back.
        if gpu.mig_current is None and gpu.memory_mib:
            hint = "to share GPUs without MIG see: docs/slices.md"
            raise BadRequest(f"{gpu.uuid} ({gpu.model}) cannot be managed: {gpu.trouble}", hint=hint)
        chosen.append(gpu.uuid)
    return tuple(dict.fromkeys(chosen))


def _options(node: Node, settings: Settings) -> list[str]:
    """How the boot unit names this node."""
    if node.folder is not None:
        return ["--node", settings.simulator]
    return [] if node.config_file is None else ["--config", settings.config_path]


def _command(node: Node) -> list[str]:
    """How an admin names this node."""
    named = [] if node.folder is None else ["--node", str(node.folder)]
    return ["gres-mig", *named, *([] if node.config_file is None else ["--config", str(node.config_file)])]


def _next_steps(node: Node, settings: Settings, found: Sequence[Gpu], *, service: bool) -> Iterator[str]:
    if not settings.simulator:
        yield f"systemctl daemon-reload && systemctl enable {boot_unit.NAME}"
    if service and not settings.simulator:
        yield f"systemctl enable --now {systemd.NAME}"
    for gpu in found:
        if settings.manages(gpu) and gpu.mig_current is False:
            yield shlex.join([*_command(node), "enable-mig", gpu.uuid])


def _plain(gpu: Gpu, *, managed: bool) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "pci_bus_id": gpu.pci_bus_id,
        "model": gpu.model,
        "mig": gpu.mig_current,
        "trouble": gpu.trouble,
        "managed": managed,
    }


def _line(shown: dict[str, Any]) -> str:
    said = shown["trouble"] or ("MIG mode is on" if shown["mig"] else "shared by slices")
    managed = "managed" if shown["managed"] else "not managed"
    return f"GPU {shown['index']:<2} {shown['uuid']}  {shown['model']}: {said}, {managed}"

"""`gres-mig slurm`: sets a cluster up for migmem, checks a running one, says what may be asked of it."""

from __future__ import annotations

import difflib
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from gres_mig import __version__, presence
from gres_mig.answers import emit
from gres_mig.cli import Node, json_option, pass_node
from gres_mig.commands import boot_unit, node_files
from gres_mig.commands.doctor import told
from gres_mig.errors import BadRequest, NotPermitted
from gres_mig.models import Settings
from gres_mig.service import systemd
from gres_mig.values import replace
from gres_mig_slurm import admission, conf_lines, files, gate_lines, handover, profiles, sizes_file
from gres_mig_slurm import check as checks
from gres_mig_slurm import setup as planning
from gres_mig_slurm.conf_lines import Conf
from gres_mig_slurm.files import File
from gres_mig_slurm.profiles import NodeType
from gres_mig_slurm.setup import Place, Plan

conf_option = click.option("--slurm-conf", metavar="FILE", help="The cluster's slurm.conf, if it is elsewhere.")


@click.group(no_args_is_help=False)
def slurm() -> None:
    """Slurm: `sbatch --gres=migmem:8000`."""


@slurm.command()
@click.option("--dry-run", is_flag=True, help="Show what would be written; that is what happens without --write.")
@click.option("--write", is_flag=True, help="Write it, and keep a copy of each file of the site's.")
@click.option("--node", "node_part", is_flag=True, help="Only what a node needs: hooks and units.")
@click.option("--controller", "controller_part", is_flag=True, help="Only what the controller needs.")
@click.option("--nodes", metavar="NODES", help="Slurm's names of the nodes that are like this one, as n[1-4].")
@click.option("--edit/--no-edit", default=True, help="Whether slurm.conf and gres.conf are changed, or only shown.")
@click.option("--any-python", is_flag=True, hidden=True, help="For rehearsals: a Python that others can change.")
@conf_option
@json_option
@pass_node
def setup(
    node: Node,
    dry_run: bool,
    write: bool,
    node_part: bool,
    controller_part: bool,
    nodes: str | None,
    edit: bool,
    any_python: bool,
    slurm_conf: str | None,
    as_json: bool,
) -> None:
    """Write what this node and the controller need, or show it."""
    if dry_run and write:
        raise BadRequest("--dry-run and --write are opposites", hint="leave one of them out")
    if write and os.geteuid() != 0:
        raise NotPermitted("slurm setup --write needs root on this node", hint="see what it would write: --dry-run")
    settings = node.settings
    conf = conf_lines.read(os.path.abspath(slurm_conf or conf_lines.find()))
    place = replace(_place(settings, conf), any_python=any_python)
    parts = []
    if said := admission.chosen(conf, settings):
        settings = replace(settings, admission="gates")
    if node_part or not controller_part:
        if write:
            planning.refuse_what_others_can_change(place, conf)
        parts.append(Plan((said,) if said else ()))
        parts.append(planning.for_node(place, conf, _units(node, settings)))
    if controller_part or not node_part:
        like = nodes or _nodes_like_this(conf)
        kind = _kind(settings, place, like)
        named = conf_lines.hosts(like or (kind.nodes if kind else ""))
        # On a node that was sent its slurm.conf, what the controller needs is shown.
        edit = edit and (write or not place.is_sent)
        parts.append(planning.for_controller(place, conf, named, kind, edit=edit))
    plan = Plan(*(tuple(x for part in parts for x in getattr(part, name)) for name in Plan.field_names()))
    kept = [copy for file in plan.files if write and file.edit and file.state != "unchanged"
            if (copy := files.write(file))]  # fmt: skip
    steps = list(_next_steps(plan, settings, written=write))
    plain = {
        "written": write,
        "files": [{"path": f.path, "state": f.state, "edit": f.edit, "text": f.text} for f in plan.files],
        "kept": kept,
        "decide": list(plan.decide),
        "next": steps,
    }
    text = "\n".join([*_lines(plan, kept, written=write), *(f"next: {step}" for step in steps)])
    emit(plain, text, as_json=as_json)


@slurm.command()
@click.option("--name", metavar="NODE", default="", help="Slurm's name of this node, where its host is several.")
@conf_option
@json_option
@click.pass_context
@pass_node
def check(node: Node, ctx: click.Context, name: str, slurm_conf: str | None, as_json: bool) -> None:
    """Compare the running cluster with what migmem needs; exit 4 where there is a problem."""
    conf_path = os.path.abspath(slurm_conf or conf_lines.find())
    found = list(checks.findings(conf_path, node.settings, name))
    if told(found, as_json=as_json):
        ctx.exit(4)


@slurm.command(name="profiles")
@click.option("--write", is_flag=True, help="Add them to the file that the submit script reads.")
@click.option("--from", "other", metavar="FILE", help="What this command printed on a node of another type.")
@click.option("--nodes", metavar="NODES", help="Slurm's names of the nodes that are like this one, as n[1-4].")
@conf_option
@json_option
@pass_node
def sizes(node: Node, write: bool, other: str | None, nodes: str | None, slurm_conf: str | None, as_json: bool) -> None:
    """Say what each size counts of migmem on this node; with --write tell the submit script."""
    conf = conf_lines.read(os.path.abspath(slurm_conf or conf_lines.find()))
    settings = node.settings
    path = os.path.join(_place(settings, conf).etc, sizes_file.FILE_NAME)
    if other is not None:
        if not os.path.isfile(other):
            raise BadRequest(f"there is no file {other}", hint="make it with: gres-mig slurm profiles > FILE")
        added = planning.known_sizes(other).types
        if not added:
            raise BadRequest(f"{other} has no types of nodes", hint="make it with: gres-mig slurm profiles > FILE")
    else:
        added = (profiles.of_this_node(settings, nodes=nodes or _nodes_like_this(conf)),)
    if not write:
        emit(_plain(added), sizes_file.render(profiles.Sizes(added)).rstrip(), as_json=as_json)
        return
    if os.geteuid() != 0:
        raise NotPermitted("slurm profiles --write needs root", hint="see them without --write")
    known = replace(planning.known_sizes(path), placeholders=gate_lines.placeholders(conf))
    for kind in added:
        known = sizes_file.merged(known, planning.with_known_nodes(kind, known))
    file = files.planned(path, sizes_file.render(known), mode=0o644)
    if file.state != "unchanged":
        files.write(file)
    lines = [f"{path}: {'unchanged' if file.state == 'unchanged' else 'written'}"]
    lines += [f"{kind.name}: Gres=migmem:{kind.count_mib}" for kind in added]
    emit({"path": path, "state": file.state, **_plain(added)}, "\n".join(lines), as_json=as_json)


def _place(settings: Settings, conf: Conf) -> Place:
    return Place(
        conf=conf.path,
        python=os.path.abspath(sys.executable),
        config=settings.config_path,
        state=os.path.join(settings.state_dir, "state.json"),
        handover=handover.folder_of(settings),
        scontrol=shutil.which("scontrol") or "",
    )


def _nodes_like_this(conf: Conf) -> str:
    """The nodes of this one's line in slurm.conf: what is in one line is alike."""
    named = os.environ.get("SLURMD_NODENAME")
    names = (named,) if named else conf_lines.nodes_of(conf, socket.gethostname())
    lines = {line for name in names if (line := conf_lines.line_of(conf, name))}
    return ",".join(sorted(line.get("NodeName") or "" for line in lines)) or ",".join(names)


def _kind(settings: Settings, place: Place, nodes: str) -> NodeType | None:
    """What the nodes are that are set up: this one's type; on a controller without GPUs the one known of these nodes,
    or the only one."""
    if settings.manages_any:
        return profiles.of_this_node(settings, nodes=nodes)
    types = planning.known_sizes(os.path.join(place.etc, sizes_file.FILE_NAME)).types
    named = set(conf_lines.hosts(nodes))
    theirs = [kind for kind in types if named and named <= set(conf_lines.hosts(kind.nodes))] or types
    return replace(theirs[0], nodes=nodes or theirs[0].nodes) if len(theirs) == 1 else None


def _units(node: Node, settings: Settings) -> dict[str, str]:
    """The units of this node; a rehearsal on a simulated one leaves this machine's systemd alone."""
    if not settings.manages_any:
        return {}
    folder = os.path.join(settings.simulator, "systemd") if settings.simulator else boot_unit.FOLDER
    options = ["--node", settings.simulator] if node.folder is not None else []
    options += [] if node.config_file is None else ["--config", settings.config_path]
    unit = os.path.join(folder, systemd.NAME)
    return {
        os.path.join(folder, boot_unit.NAME): boot_unit.render(options),
        unit: node_files.service_unit(settings, options, socket=_serves_notebooks(unit)),
    }


def _serves_notebooks(unit: str) -> bool:
    """Whether `gres-mig setup --service` gave this node a socket; Slurm alone needs none, and users shall not go round
    it."""
    try:
        return "--no-socket" not in Path(unit).read_text(encoding="utf-8")
    except OSError:
        return False


def _next_steps(plan: Plan, settings: Settings, *, written: bool) -> Iterator[str]:
    changing = [os.path.basename(file.path) for file in plan.files if file.state != "unchanged"]
    if changing and not written:
        yield "the same command with --write"
    units = [name for name in changing if name.endswith(".service")]
    if units and not settings.simulator:
        yield f"systemctl daemon-reload && systemctl enable --now {' '.join(units)}"
    if "slurm.conf" in changing:
        yield "on every node, where it is not shared: the same slurm.conf, gres.conf and folder gres-mig"
        # In this order: a slurmd that still counts nothing is drained by a slurmctld that counts migmem (22.05.8).
        yield "on every node: systemctl restart slurmd"
        yield "then on the controller: systemctl restart slurmctld; until then jobs with migmem are refused"
    running = presence.running(settings.run_dir)
    if running and running.version != __version__:
        yield f"systemctl restart {systemd.NAME}"
    elif running and os.path.basename(settings.config_path) in changing:
        yield "gres-mig reload"
    yield "gres-mig slurm check"


def _lines(plan: Plan, kept: list[str], *, written: bool) -> Iterator[str]:
    for file in plan.files:
        if file.state == "unchanged":
            yield f"{file.path}: unchanged"
        elif not file.edit:
            yield f"{file.path}: yours to change:"
            yield from _shown(file)
        elif written:
            yield f"{file.path}: written"
        else:
            yield f"{file.path}: would be written"
            yield from _shown(file)
    yield from (f"{copy}: as it was" for copy in kept)
    yield from (f"yours to decide: {text}" for text in plan.decide)


def _shown(file: File) -> Iterator[str]:
    """The difference; of a new file of many lines only how many there are."""
    lines = file.text.splitlines()
    if file.before is None:
        yield from [f"    {line}" for line in lines] if len(lines) < 40 else [f"    {len(lines)} lines"]
        return
    if file.before == file.text:
        yield f"    owner root, mode {file.mode:04o}"
        return
    before = file.before.splitlines()
    yield from (
        f"    {line}" for line in difflib.unified_diff(before, lines, "as it is", "as it would be", lineterm="")
    )


def _plain(types: tuple[NodeType, ...]) -> dict[str, Any]:
    return {
        "types": [
            {
                "name": kind.name,
                "nodes": kind.nodes or None,
                "count_mib": kind.count_mib,
                "boards": [
                    {
                        "model": board.model,
                        "gpus": board.gpus,
                        "whole_mib": board.whole_mib,
                        "slice_overhead_mib": board.slice_overhead_mib if board.slice_overhead_mib >= 0 else None,
                        "profiles": [
                            {"name": p.name, "memory_mib": p.memory_mib, "price_mib": p.price_mib, "by_size": p.by_size}
                            for p in board.profiles
                        ],
                    }
                    for board in kind.boards
                ],
            }
            for kind in types
        ]
    }

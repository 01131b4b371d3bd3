"""`gres-mig doctor`: what is wrong with this node, and what to do about it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click

from gres_mig import config, machine
from gres_mig.allocator import Allocator
from gres_mig.answers import emit
from gres_mig.cli import Node, json_option, pass_node
from gres_mig.commands import boot_unit
from gres_mig.commands.status import terminal
from gres_mig.deadline import operate
from gres_mig.doctor import Finding, boot, driver, monitoring, neighbours, records, rivals
from gres_mig.doctor import node as checks
from gres_mig.doctor.service import service
from gres_mig.doctor.slices import is_one, slices
from gres_mig.doctor.systemd import Units
from gres_mig.errors import GresMigError, StateError
from gres_mig.locks import lock_holders
from gres_mig.look import MAY_NOT_LIST, look
from gres_mig.models import Allocation, Gpu, Settings
from gres_mig.nvml import Session
from gres_mig.show import Paper
from gres_mig.view import Drift, View, drift
from gres_mig_slurm import check, check_split, conf_lines

_SHOWN = {"ok": ("quiet", "ok"), "warning": ("foreign", "warning"), "problem": ("trouble", "PROBLEM")}


@click.command()
@json_option
@click.pass_context
@pass_node
def doctor(node: Node, ctx: click.Context, as_json: bool) -> None:
    """Check this node and say what to do next; exit 4 where there is a problem."""
    if told(list(examine(node)), as_json=as_json):
        ctx.exit(4)


def told(found: list[Finding], *, as_json: bool) -> int:
    """Print what was found; how many problems there are."""
    problems, warnings = (sum(each.level == level for each in found) for level in ("problem", "warning"))
    plain = [{"check": f.check, "level": f.level, "text": f.text, "todo": f.todo or None} for f in found]
    paper = terminal()
    text = paper.finish([*_lines(found, paper), f"{_number(problems, 'problem')}, {_number(warnings, 'warning')}"])
    emit({"findings": plain, "problems": problems, "warnings": warnings}, text, as_json=as_json)
    return problems


def examine(node: Node) -> Iterator[Finding]:
    """All checks, in the order in which one thing needs the other."""
    settings, wrong = _settings(node)
    root = Path(settings.simulator or "/")
    units = Units(root)
    # What concerns processes and disks is this machine's, on a simulated node too.
    own_proc = Path("/proc")
    owner = os.stat(settings.simulator).st_uid if os.path.isdir(settings.simulator) else 0
    state_file = os.path.join(settings.state_dir, "state.json")

    yield from checks.version()
    yield from checks.configuration(settings, wrong)
    yield from checks.validated(settings)
    yield from checks.permissions(settings, os.geteuid(), root)
    yield from checks.clock(time.time(), state_file)
    yield from checks.folder("records folder", settings.state_dir, private=True, owner=owner, proc=own_proc)
    yield from checks.folder("run folder", settings.run_dir, private=False, owner=owner, proc=own_proc)
    yield from records.damaged(state_file)
    yield from driver.binding()
    yield from _hardware(settings, root, is_configured=wrong is None)
    yield from boot.boot_unit(settings, units, boot_unit.NAME)
    yield from service(settings, root / "etc")
    managed = settings.manages_any
    yield from rivals.enabled(units, managed=managed)
    yield from rivals.processes(root / "proc", managed=managed)
    if managed:
        yield from neighbours.fabric(units, root)
        yield from neighbours.mps(root / "proc")
        yield from neighbours.preload(root / "etc")
    yield from monitoring.mapping(settings, owner, own_proc, root / "proc")
    yield from monitoring.reload(settings, root)
    yield from _slurm(settings)


def _settings(node: Node) -> tuple[Settings, GresMigError | None]:
    try:
        return node.settings, None
    except GresMigError as error:
        return config.defaults(node.config_file, node=node.folder), error


def _hardware(settings: Settings, root: Path, *, is_configured: bool) -> Iterator[Finding]:
    try:
        versions: tuple[str, str] | GresMigError = operate(settings, lambda allocator: _versions(settings))
    except GresMigError as error:
        versions = error
    yield from driver.driver(versions, root / "proc", root / "sys")
    try:
        view = look(settings)
        users = _users(settings, view)
    except StateError as error:
        todo = "; ".join(filter(None, (error.hint, "to see which is used here, run: gres-mig --version")))
        yield Finding("records", "problem", error.message, todo)
        return
    except GresMigError as error:
        # That the driver cannot be reached at all is said above.
        if not isinstance(versions, GresMigError):
            yield Finding("look", "problem", error.message, error.hint)
        yield from checks.locks(settings, (), Path("/proc"))
        return
    yield from checks.locks(settings, view.state.fences, Path("/proc"))
    yield from records.fences(view, settings)
    if view.owners:
        allocations = sum(isinstance(record, Allocation) for record in view.state.records)
        yield from records.drifted(_drift(settings, view), allocations)
    if isinstance(versions, GresMigError):
        return
    if is_configured:
        yield from checks.managed_gpus(view.gpus, settings)
    # That this user may not list a GPU's instances says nothing of the GPU.
    told = [gpu for gpu in view.gpus if view.owners or MAY_NOT_LIST not in gpu.trouble]
    divided = [gpu for gpu in told if not is_one(gpu, settings)]
    yield from driver.mig_mode(divided, settings, users, root, root / "sys", versions[0])
    yield from slices(told, settings)
    if not settings.simulator:
        yield from driver.capability_nodes(view.gpus, settings, root)
    yield from records.foreign(view, settings)
    if view.owners:
        yield from neighbours.device_names(root, view.gpus)


def _slurm(settings: Settings) -> Iterator[Finding]:
    """Whether Slurm is set up for migmem, on a machine that has it; a rehearsal has one only where it is named."""
    path = conf_lines.find()
    if not os.path.exists(path):
        return
    if settings.simulator and "SLURM_CONF" not in os.environ:
        text = f"this node is simulated: {path} is not looked at"
        yield Finding("Slurm", "ok", text, f"if they belong together: SLURM_CONF={path} gres-mig doctor")
        return
    if "migmem" not in conf_lines.read(path).value("GresTypes").lower().split(","):
        text = f"{path} does not count migmem"
        yield Finding("Slurm", "warning", text, "if jobs shall ask for GPU memory, run: gres-mig slurm setup")
        gpus: tuple[Gpu, ...] = ()
        with suppress(GresMigError):
            # Why that failed is said above.
            gpus = operate(settings, lambda allocator: allocator.look(everything=True))
        yield from check_split.on_this_node(path, settings, gpus)
        return
    yield from check.findings(path, settings)


def _drift(settings: Settings, view: View) -> list[Drift]:
    found = drift(view, time.time(), machine.now_ns(), lock_holders(settings.run_dir))
    # Of a fenced GPU it is said already that it cannot be read.
    return [each for each in found if each.kind != "unread" or each.gpu_uuid not in view.state.fences]


def _versions(settings: Settings) -> tuple[str, str]:
    with Session(settings.simulator) as session:
        return session.versions()


def _users(settings: Settings, view: View) -> dict[str, tuple[int, ...]]:
    """Who NVML says uses the managed GPUs whose MIG mode is to change."""
    changing = [
        gpu.uuid
        for gpu in view.gpus
        if settings.manages(gpu)
        and not gpu.sliced
        and (gpu.mig_current is False or gpu.mig_current is not gpu.mig_pending)
    ]

    def users(allocator: Allocator) -> dict[str, tuple[int, ...]]:
        found = {}
        for uuid in changing:
            # Through the allocator's own access: that is what the deadline watches.
            with allocator.access.session(uuid) as (session, gpu):
                found[uuid] = session.gpu_users(gpu)
        return found

    return operate(settings, users) if changing else {}


def _lines(found: list[Finding], paper: Paper) -> Iterator[str]:
    wide = max(len(each.check) for each in found)
    for each in found:
        colour, word = _SHOWN[each.level]
        first, *rest = paper.wrap("quiet" if each.level == "ok" else "title", each.text, wide + 11)
        yield f"{paper.paint(colour, f'{word:<7}')}  {each.check:<{wide}}  {first.lstrip()}"
        yield from rest
        if each.todo:
            # In one piece, to be copied.
            yield " " * (wide + 11) + paper.paint(colour, each.todo)


def _number(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"

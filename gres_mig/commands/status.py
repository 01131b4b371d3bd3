"""`gres-mig status`: each GPU as a bar of its memory slices, and whether the records say what the hardware says."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import click

from gres_mig import __version__, machine, presence
from gres_mig.answers import SCHEMA
from gres_mig.cli import Node, json_option, pass_node
from gres_mig.commands import slurm_jobs
from gres_mig.errors import Fault, GresMigError, NotPermitted
from gres_mig.locks import lock_holders
from gres_mig.look import look, publish
from gres_mig.models import Settings
from gres_mig.presence import Presence
from gres_mig.show import Paper, age, draw
from gres_mig.values import replace
from gres_mig.view import Drift, View, drift
from gres_mig.view_json import plain_drift, plain_view

_EVERY_S = 2.0
_ENTER, _HOME, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[H\x1b[2J", "\x1b[?25h\x1b[?1049l"


@click.command()
@click.option("--watch", is_flag=True, help="Draw it again every 2 seconds until interrupted.")
@click.option("--check", is_flag=True, help="Compare the records with the hardware; exit 4 where they differ.")
@json_option
@click.pass_context
@pass_node
def status(node: Node, ctx: click.Context, watch: bool, check: bool, as_json: bool) -> None:
    """Show each GPU: who holds what, and what is free."""
    settings = node.settings
    if watch:
        return _watch(lambda: _frame(settings, check, as_json)[0], screen=sys.stdout.isatty() and not as_json)
    text, differs = _frame(settings, check, as_json, publishing=True)
    click.echo(text)
    if differs:
        ctx.exit(4)
    return None


def terminal() -> Paper:
    """What stdout is; colour only on a terminal, and not where NO_COLOR asks for none."""
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    unicode = (sys.stdout.encoding or "utf-8").lower().replace("-", "").startswith("utf")
    return Paper(shutil.get_terminal_size().columns, colour, not unicode)


def _frame(settings: Settings, check: bool, as_json: bool, *, publishing: bool = False) -> tuple[str, bool]:
    """The text, and whether records and hardware differ."""
    view = look(settings)
    if check and not view.owners:
        raise NotPermitted("status --check needs to read the records", hint="run it as root")
    if publishing and (failed := publish(settings, view)):
        view = replace(view, notes=(*view.notes, failed))
    found = _drift(settings, view) if check else []
    waiting = slurm_jobs.waiting(view, settings)
    running = presence.running(settings.run_dir)
    if as_json:
        plain: dict[str, Any] = {"schema": SCHEMA, **plain_view(view, settings)}
        plain["waiting"] = [slurm_jobs.plain(job) for job in waiting]
        plain["service"] = _plain_service(running)
        if check:
            plain["drift"] = [plain_drift(each) for each in found]
        return json.dumps(plain), bool(found)
    paper = terminal()
    text = draw(view, settings, now=time.time(), paper=paper)
    if running:
        text += "\n\n" + paper.finish(paper.wrap("quiet", _service(running, time.time()), 0))
    if waiting:
        lines = (line for job in waiting for line in paper.wrap("", slurm_jobs.describe(job, time.time()), 2))
        text += "\n\n" + paper.finish([paper.paint("title", "put back for want of a place"), *lines])
    if check:
        verdict = "records and hardware do not agree:" if found else "records and hardware agree"
        text += "\n\n" + paper.finish([verdict, *(f"  {each.kind}: {each.text}" for each in found)])
    return text, bool(found)


def _service(running: Presence, now: float) -> str:
    """The service in a sentence: which it is, and whether it is what is installed and configured."""
    old = "" if running.version == __version__ else f" (installed is {__version__}: systemctl restart gres-mig)"
    changed = ", which changed since: gres-mig reload" if presence.is_outdated(running) else ""
    since, read = age(now - running.started), age(now - running.loaded)
    return (
        f"service {running.version}{old}, pid {running.pid}, for {since}; in force for {read}: "
        f"{running.config} ({running.sha256[:12] or 'no file'}){changed}"
    )


def _plain_service(running: Presence | None) -> dict[str, Any] | None:
    if running is None:
        return None
    return {
        "version": running.version,
        "pid": running.pid,
        "started": running.started,
        "socket": running.socket or None,
        "config": {
            "path": running.config,
            "sha256": running.sha256 or None,
            "loaded": running.loaded,
            "error": running.error or None,
        },
    }


def _drift(settings: Settings, view: View) -> list[Drift]:
    busy = lock_holders(settings.run_dir)
    return list(drift(view, time.time(), machine.now_ns(), busy))


def _watch(frame: Callable[[], str], *, screen: bool) -> None:
    def ended(number: int, _: FrameType | None) -> None:
        # So that the terminal is given back as it was, also by `timeout 60 gres-mig status --watch`.
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, ended)
    try:
        if screen:
            click.echo(_ENTER, nl=False)
        while True:
            try:
                text = frame()
            except GresMigError as error:
                if error.fault is Fault.REQUEST:
                    raise
                # A node that fails is what one watches for.
                text = f"gres-mig: {error}"
            click.echo(f"{_HOME}{_cut(text)}" if screen else text, nl=not screen)
            time.sleep(_EVERY_S)
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGTERM, before)
        if screen:
            click.echo(_LEAVE, nl=False)


def _cut(text: str) -> str:
    """As much as the terminal is high."""
    high = shutil.get_terminal_size().lines - 1
    lines = text.splitlines()
    if len(lines) <= high:
        return text
    return "\n".join([*lines[: high - 1], f"… {len(lines) - high + 1} more lines"])

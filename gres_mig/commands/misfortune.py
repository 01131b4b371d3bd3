"""Commands that let a simulated driver go wrong, and mend it."""

from __future__ import annotations

from pathlib import Path

import click

from gres_mig.cli import json_option
from gres_mig.commands.simulated import folder_argument, hands, index, say
from gres_mig.errors import BadRequest
from gres_mig.simulator import codes, faults
from gres_mig.simulator.admin import Node
from gres_mig.simulator.library import Library


@click.command()
@folder_argument
@click.argument("function")
@click.argument("action", type=click.Choice(faults.ACTIONS))
@click.option("--code", type=click.IntRange(0, 999), default=codes.UNKNOWN, show_default=True, help="What it returns.")
@click.option("--after", is_flag=True, help="After the call did its work, not before.")
@click.option("--gpu", help="Only calls for this GPU, by index or UUID.")
@click.option(
    "--nth", type=click.IntRange(1), default=1, show_default=True, help="From the n-th such call on the node."
)
@click.option(
    "--times", type=click.IntRange(0), default=1, show_default=True, help="So many calls; 0: all from then on."
)
@json_option
def fail(
    folder: Path,
    function: str,
    action: str,
    code: int,
    after: bool,
    gpu: str | None,
    nth: int,
    times: int,
    as_json: bool,
) -> None:
    """Let the next calls of a function fail.

    FUNCTION is one of NVML, or * for any; a call then returns a code, hangs, lies, or kills or stops the caller.
    A hang lasts until `mend`.
    """
    node = hands(folder)
    _refuse_an_unknown_function(node, function)
    which = None if gpu is None else index(node, gpu)
    number = node.plant(
        function, action, code=code, after=after, gpu=which, nth=nth, times=times, count="node", sticky=False
    )
    say(folder, f"fault {number}: {function} {action}", as_json, fault=number)


@click.command()
@folder_argument
@json_option
def mend(folder: Path, as_json: bool) -> None:
    """Remove what `fail` planted.

    Calls that hang go on.
    """
    hands(folder).mend()
    say(folder, "no faults are planted", as_json)


def add_to(group: click.Group) -> None:
    """Put these commands into `simulate`."""
    group.add_command(fail)
    group.add_command(mend)


def _refuse_an_unknown_function(node: Node, function: str) -> None:
    library = Library(node.store.folder)
    if function != "*" and not any(hasattr(library, function + version) for version in ("", "_v2", "_v3")):
        raise BadRequest(f"{function!r} is no NVML function that is simulated", hint="such as nvmlDeviceGetMigMode")

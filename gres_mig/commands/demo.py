"""`gres-mig demo`: plays the story on a node of its own, in a folder that it removes afterwards."""

from __future__ import annotations

import shlex
import shutil
import tempfile
import time

import click

from gres_mig.answers import emit
from gres_mig.cli import json_option
from gres_mig.commands.status import terminal
from gres_mig.demo import Demo
from gres_mig.errors import NodeFault


@click.command()
@click.option("--keep", is_flag=True, help="Keep the simulated node, to go on with.")
@json_option
def demo(keep: bool, as_json: bool) -> None:
    """Show the main job on simulated GPUs.

    It makes requests, kills processes, loses records, and checks on the way that all is as it says.
    """
    began = time.monotonic()
    try:
        folder = tempfile.mkdtemp(prefix="gres-mig-demo-")
    except OSError as error:
        raise NodeFault(f"making a folder for the demo: {error.strerror}", hint="name one: TMPDIR=…") from error
    story = Demo(folder, (lambda text: None) if as_json else click.echo, terminal())
    try:
        story.tell()
    finally:
        if not keep:
            shutil.rmtree(folder)
    took = time.monotonic() - began
    told = f"{story.checks} checks held, in {took:.1f} s; the GPUs were simulated, everything above NVML was not."
    if keep:
        told += f"\nnext: gres-mig --node {shlex.quote(folder)} status"
    emit({"checks": story.checks, "seconds": round(took, 3), "node": folder if keep else None}, told, as_json=as_json)

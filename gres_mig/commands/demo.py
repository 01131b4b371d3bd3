"""`gres-mig demo`: plays the story on a node of its own, in a folder that it removes afterwards."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable

import click

from gres_mig.answers import emit
from gres_mig.cli import json_option
from gres_mig.commands.status import terminal
from gres_mig.demo import jupyter, slurm
from gres_mig.demo.node import Demo
from gres_mig.errors import NodeFault

_PARTS = {"jupyter": "a Jupyter server", "slurm": "a Slurm cluster of two nodes"}


@click.command()
@click.option("--keep", is_flag=True, help="Keep the simulated node, to go on with.")
@json_option
def demo(keep: bool, as_json: bool) -> None:
    """Show the main job on simulated GPUs: on a node by itself, in a Jupyter server, and on a Slurm cluster.

    It makes requests, kills processes, loses records, and checks on the way that all is as it says.
    """
    began = time.monotonic()
    # So that the server and the cluster's daemons are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        folder = tempfile.mkdtemp(prefix="gres-mig-demo-")
    except OSError as error:
        raise NodeFault(f"making a folder for the demo: {error.strerror}", hint="name one: TMPDIR=…") from error
    try:
        checks, without = _tell(folder, (lambda text: None) if as_json else click.echo)
    finally:
        if not keep:
            shutil.rmtree(folder)
    took = time.monotonic() - began
    told = f"{checks} checks held, in {took:.1f} s; the GPUs were simulated, everything above NVML was not."
    if keep:
        told += f"\nnext: gres-mig --node {shlex.quote(folder)} status"
    for part, reason in reversed(without.items()):
        if reason:
            told = "\n".join([*terminal().wrap("", f"Left out: {_PARTS[part]}, for {reason}", 0), "", told])
    answer = {
        "checks": checks,
        "seconds": round(took, 3),
        "node": folder if keep else None,
        **{part: reason or "shown" for part, reason in without.items()},
    }
    emit(answer, told, as_json=as_json)


def _tell(folder: str, say: Callable[[str], None]) -> tuple[int, dict[str, str]]:
    """How many checks held, and of each part that needs more than Python why it was left out, if it was."""
    paper = terminal()
    without = {"jupyter": jupyter.left_out(), "slurm": slurm.left_out(folder)}
    story: Demo | jupyter.JupyterDemo | slurm.SlurmDemo = Demo(folder, say, paper)
    story.tell()
    checks = story.checks
    if not without["jupyter"]:
        story = jupyter.JupyterDemo(os.path.join(folder, "jupyter"), say, paper, story.chapter)
        story.tell()
        checks += story.checks
    if not without["slurm"]:
        # Slurm's accounts have to come by on their way to the cluster's files.
        os.chmod(folder, 0o711)
        story = slurm.SlurmDemo(os.path.join(folder, "slurm"), say, paper, story.chapter)
        story.tell()
        checks += story.checks
    return checks, without

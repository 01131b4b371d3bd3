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
from gres_mig.demo.node import Demo
from gres_mig.demo.slurm import SlurmDemo, left_out
from gres_mig.errors import NodeFault


@click.command()
@click.option("--keep", is_flag=True, help="Keep the simulated node, to go on with.")
@json_option
def demo(keep: bool, as_json: bool) -> None:
    """Show the main job on simulated GPUs, on a node by itself and, where there is Slurm, on a cluster.

    It makes requests, kills processes, loses records, and checks on the way that all is as it says.
    """
    began = time.monotonic()
    # So that the cluster's daemons are ended too.
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
    if without:
        told = "\n".join([*terminal().wrap("", f"Left out: a Slurm cluster of two nodes, for {without}", 0), "", told])
    answer = {
        "checks": checks,
        "seconds": round(took, 3),
        "node": folder if keep else None,
        "slurm": without or "shown",
    }
    emit(answer, told, as_json=as_json)


def _tell(folder: str, say: Callable[[str], None]) -> tuple[int, str]:
    """How many checks held, and why Slurm was left out, if it was."""
    paper = terminal()
    story = Demo(folder, say, paper)
    story.tell()
    if without := left_out(folder):
        return story.checks, without
    # Slurm's accounts have to come by on their way to the cluster's files.
    os.chmod(folder, 0o711)
    on_slurm = SlurmDemo(os.path.join(folder, "slurm"), say, paper, story.chapter)
    on_slurm.tell()
    return story.checks + on_slurm.checks, ""

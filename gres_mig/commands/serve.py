"""`gres-mig serve`: the loop that gives back what ended, retries what is stuck, and wakes jobs that wait."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

import click

from gres_mig.answers import for_root
from gres_mig.cli import Node, pass_node
from gres_mig.models import Record, Settings
from gres_mig.service import EVERY_S, Service


@click.command()
@click.option("--once", is_flag=True, help="One pass, then end; as slurmd starts, say.")
@click.option("--every", "every_s", type=click.FloatRange(0.1, 3600), default=EVERY_S, show_default=True, metavar="S",
              help="Seconds from pass to pass.")  # fmt: skip
@click.option("--pyslurm", default="", metavar="PYTHON", help="Ask Slurm through this interpreter's pyslurm first.")
@pass_node
def serve(node: Node, once: bool, every_s: float, pyslurm: str) -> None:
    """Settle what crashes and ended jobs left, and wake jobs that wait for a place; until it is ended."""
    logging.getLogger("gres_mig").setLevel(logging.INFO)
    service = Service(
        lambda: for_root(node.settings, "serve"), lambda settings: one_pass(settings, pyslurm), every_s=every_s
    )
    if once:
        service.once()
    else:
        service.run()


def one_pass(settings: Settings, pyslurm: str) -> None:
    """What a child of the service does; only there is the driver's library loaded."""
    from gres_mig.allocator import witnesses_alive
    from gres_mig.deadline import operate
    from gres_mig_slurm import wake
    from gres_mig_slurm.liveness import Liveness

    kinds = {"slurm": Liveness(node=os.environ.get("SLURMD_NODENAME", ""), pyslurm=pyslurm).alive}
    alive = _by_kind(kinds, witnesses_alive)
    try:
        operate(settings, lambda allocator: allocator.reconcile(), alive=alive)
    finally:
        # A job may start on GPUs that work while another one does not.
        wake.look_after(settings)


def _by_kind(
    kinds: Mapping[str, Callable[[Record], bool | None]], others: Callable[[Record], bool | None]
) -> Callable[[Record], bool | None]:
    def alive(record: Record) -> bool | None:
        return kinds.get(record.owner.name.partition(":")[0], others)(record)

    return alive

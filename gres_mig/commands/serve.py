"""`gres-mig serve`: gives back what ended, retries what is stuck, wakes jobs that wait, and serves notebook servers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence

import click

from gres_mig import log
from gres_mig.answers import for_root
from gres_mig.cli import Node, pass_node
from gres_mig.errors import StateError
from gres_mig.models import Record, Settings
from gres_mig.rooms import Held
from gres_mig.service import EVERY_S, Service


@click.command()
@click.option("--once", is_flag=True, help="One pass, then end; as slurmd starts, say.")
@click.option("--every", "every_s", type=click.FloatRange(0.1, 3600), default=EVERY_S, show_default=True, metavar="S",
              help="Seconds from pass to pass.")  # fmt: skip
@click.option("--no-socket", is_flag=True, help="Serve no notebook servers: users get instances through Slurm only.")
@click.option("--pyslurm", default="", metavar="PYTHON", help="Ask Slurm through this interpreter's pyslurm first.")
@pass_node
def serve(node: Node, once: bool, every_s: float, no_socket: bool, pyslurm: str) -> None:
    """Settle what crashes and ended owners left, wake jobs that wait for a place, serve notebook servers."""
    logging.getLogger("gres_mig").setLevel(logging.INFO)
    service = Service(
        lambda: for_root(node.settings, "serve"),
        lambda settings: one_pass(settings, pyslurm),
        every_s=every_s,
        socket=not no_socket,
        held=_held,
    )
    if once:
        service.once()
    else:
        service.run()


def one_pass(settings: Settings, pyslurm: str) -> None:
    """What a child of the service does; only there is the driver's library loaded."""
    from gres_mig.deadline import operate
    from gres_mig.witnesses import witnesses_alive
    from gres_mig_slurm import handover, wake
    from gres_mig_slurm.liveness import Liveness

    liveness = Liveness(node=os.environ.get("SLURMD_NODENAME", ""), pyslurm=pyslurm)
    alive = _by_kind({"slurm": liveness.alive}, witnesses_alive)
    try:
        operate(settings, lambda allocator: allocator.reconcile(), alive=alive)
    finally:
        # A job may start on GPUs that work while another one does not.
        wake.look_after(settings)
        try:
            handover.sweep(settings, liveness)
        except StateError as error:
            log.warning("hand-overs of jobs that are over stay: %s", error)


def _held(settings: Settings) -> Sequence[Held]:
    """The places that are kept for Slurm jobs; notebooks go round them as other jobs do."""
    from gres_mig_slurm import delayed

    return delayed.held(settings)


def _by_kind(
    kinds: Mapping[str, Callable[[Record], bool | None]], others: Callable[[Record], bool | None]
) -> Callable[[Record], bool | None]:
    def alive(record: Record) -> bool | None:
        return kinds.get(record.owner.name.partition(":")[0], others)(record)

    return alive

"""`gres-mig police`: what slices use of their GPUs, against what they were given."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import click

from gres_mig.allocator import Allocator
from gres_mig.answers import emit, for_root
from gres_mig.cli import Node, json_option, pass_node
from gres_mig.deadline import operate
from gres_mig.machine import boot_id, describe
from gres_mig.models import Gpu, Settings
from gres_mig.police import Use, patrol
from gres_mig.sizes import format_mib
from gres_mig.state import Store

_EVERY_S = 10.0
_SAID = {
    "": "keeps to it",
    "warn": "uses more than it was given",
    "terminate": "used more than it was given for too long, and was sent SIGTERM",
    "kill": "used more than it was given for too long, and was sent SIGKILL",
}


@click.command()
@click.option("--once", is_flag=True, help="Once, not every 10 seconds until interrupted.")
@json_option
@pass_node
def police(node: Node, once: bool, as_json: bool) -> None:
    """Compare what slices use with what they were given, and do what `over_grant` says; the service does it too."""
    while True:
        settings = for_root(node.settings, "police")
        found, gpus = operate(settings, partial(_patrol, settings))
        strangers = [(gpu, user) for gpu in gpus for user in gpu.users if not user.slice]
        lines = [
            f"{use.record.owner}: {format_mib(use.used_mib)} of {format_mib(use.given_mib)} on "
            f"{use.record.gpu_uuid}, isolation={use.record.isolation}: {_SAID[use.measure]}"
            for use in found
        ]
        lines += [
            f"of no slice: {describe(user.pid)} uses {format_mib(user.memory_mib)} of {gpu.uuid}"
            for gpu, user in strangers
        ]
        plain = {
            "slices": [_plain(use) for use in found],
            "foreign": [
                {"gpu_uuid": gpu.uuid, "pid": user.pid, "memory_mib": user.memory_mib} for gpu, user in strangers
            ],
        }
        emit(plain, "\n".join(lines) or "no slices", as_json=as_json)
        if once:
            return
        time.sleep(_EVERY_S)


def _patrol(settings: Settings, allocator: Allocator) -> tuple[tuple[Use, ...], tuple[Gpu, ...]]:
    gpus, store = allocator.look(), Store(settings, boot_id(settings.simulator))
    return patrol(store, settings, gpus, time.time()), tuple(gpu for gpu in gpus if gpu.sliced)


def _plain(use: Use) -> dict[str, Any]:
    return {
        "owner": str(use.record.owner),
        "gpu_uuid": use.record.gpu_uuid,
        "isolation": use.record.isolation,
        "given_mib": use.given_mib,
        "used_mib": use.used_mib,
        "pids": [user.pid for user in use.users],
        "measure": use.measure or None,
    }

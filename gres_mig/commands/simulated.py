"""What the commands that play with a simulated node share: how its parts are named, and how they answer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from gres_mig.answers import emit
from gres_mig.errors import BadRequest, NotPermitted
from gres_mig.simulator.admin import Node

folder_argument = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))


def hands(folder: Path) -> Node:
    """The hands on the node in that folder, if it is the caller's."""
    if not os.path.isfile(folder / "hardware.json"):
        hint = f"run: gres-mig simulate create {folder} --board rtx-pro-6000"
        raise BadRequest(f"{folder} holds no simulated node", hint=hint)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise NotPermitted(f"{folder} is not yours to change")
    return Node(folder)


def index(node: Node, text: str) -> int:
    """The index of a GPU that is named by it or by UUID."""
    uuids = node.uuids
    if text in uuids:
        return uuids.index(text)
    if text.isascii() and text.isdigit() and len(text) < 4 and int(text) < len(uuids):
        return int(text)
    raise BadRequest(f"{text!r} is no GPU of this node", hint=f"name one of 0 to {len(uuids) - 1}, or a UUID")


def place(node: Node, text: str) -> tuple[int, int | None]:
    """GPU and GPU instance of `GPU:GI`, or the GPU alone."""
    gpu, colon, number = text.partition(":")
    which = index(node, gpu)
    if not colon:
        return which, None
    there = {instance.id for instance in node.instances(which)}
    if not (number.isascii() and number.isdigit() and len(number) < 4 and int(number) in there):
        known = ", ".join(str(i) for i in sorted(there)) or "none"
        raise BadRequest(f"{text!r}: that GPU has no GPU instance {number!r}; its instances: {known}")
    return which, int(number)


def say(folder: Path, text: str, as_json: bool, **more: Any) -> None:
    """Print what was done."""
    emit({"node": os.path.abspath(folder), **more}, text, as_json=as_json)

"""The hands on a simulated node, as commands: what its owner, its admin and its bad luck can do to it."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from types import FrameType

import click

from gres_mig.cli import json_option
from gres_mig.commands.simulated import folder_argument, hands, index, place, say
from gres_mig.errors import BadRequest
from gres_mig.simulator.admin import Node

_gpu = click.argument("gpu")
_instance = click.argument("instance", metavar="GPU:GI")
_used = click.argument("used", metavar="GPU[:GI]")
_pid = click.option("--pid", type=click.IntRange(1), required=True, help="The process; until it ends, at the longest.")


@click.command()
@folder_argument
@json_option
def reboot(folder: Path, as_json: bool) -> None:
    """Reboot the node.

    Instances do not survive it, nor on newer boards does the MIG mode.
    """
    node = hands(folder)
    node.reboot()
    say(folder, f"rebooted; boot id {node.boot_id}", as_json, boot_id=node.boot_id)


@click.command()
@folder_argument
@json_option
def reload(folder: Path, as_json: bool) -> None:
    """Reload the driver; as a reboot, in the same boot."""
    hands(folder).reload_driver()
    say(folder, "driver reloaded; no instance is left", as_json)


@click.command()
@folder_argument
@_gpu
@json_option
def reset(folder: Path, gpu: str, as_json: bool) -> None:
    """Reset a GPU, by index or UUID.

    Its instances go, a pending MIG mode comes into force, and a lost GPU is back.
    """
    node = hands(folder)
    which = index(node, gpu)
    node.reset(which)
    say(folder, f"{node.uuids[which]} was reset; no instance is left on it", as_json, gpu_uuid=node.uuids[which])


@click.command()
@folder_argument
@_gpu
@json_option
def lose(folder: Path, gpu: str, as_json: bool) -> None:
    """Let a GPU fall off the bus.

    It is back after a reset or reboot.
    """
    node = hands(folder)
    which = index(node, gpu)
    node.lose(which)
    say(folder, f"{node.uuids[which]} is lost until a reset or reboot", as_json, gpu_uuid=node.uuids[which])


@click.command()
@folder_argument
@_gpu
@click.argument("mode", type=click.Choice(["on", "off"]))
@click.option("--pending", is_flag=True, help="Only pending: it comes into force with a reset.")
@json_option
def mig(folder: Path, gpu: str, mode: str, pending: bool, as_json: bool) -> None:
    """Turn MIG mode on or off by hand.

    As `nvidia-smi -mig` would, whoever manages the GPU.
    """
    node = hands(folder)
    which = index(node, gpu)
    current = bool(node.hardware()["gpus"][which]["mig"]) if pending else mode == "on"
    node.set_mig(which, current, pending=mode == "on")
    text = f"MIG is {'to be ' if pending else ''}{mode} on {node.uuids[which]}"
    say(folder, text, as_json, gpu_uuid=node.uuids[which], mig=current, pending=mode == "on")


@click.command()
@folder_argument
@_gpu
@click.argument("profile")
@click.option("--start", type=click.IntRange(0), help="At this memory slice; else where the driver likes.")
@click.option("--bare", is_flag=True, help="Without a compute instance, as a crash leaves it.")
@json_option
def make(folder: Path, gpu: str, profile: str, start: int | None, bare: bool, as_json: bool) -> None:
    """Make a foreign instance by hand.

    No record of gres-mig names it.
    """
    node = hands(folder)
    made = node.make(index(node, gpu), profile, start, bare=bare)
    text = f"made {made.profile} at {made.start}:{made.size}: {made.gpu_uuid}:{made.id}"
    uuid = next(iter(made.mig_uuids), None)
    say(folder, text, as_json, gpu_uuid=made.gpu_uuid, gi_id=made.id, mig_uuid=uuid)


@click.command()
@folder_argument
@_instance
@json_option
def destroy(folder: Path, instance: str, as_json: bool) -> None:
    """Destroy an instance by hand."""
    node = hands(folder)
    which, gi_id = place(node, instance)
    if gi_id is None:
        raise BadRequest(f"{instance!r} is not GPU:GI, a GPU's index or UUID and an instance's id")
    node.destroy(which, gi_id)
    say(folder, f"destroyed {instance}", as_json, gpu_uuid=node.uuids[which], gi_id=gi_id)


@click.command()
@folder_argument
@_used
@_pid
@click.option("--unlisted", is_flag=True, help="In no list of processes, as a monitoring agent.")
@json_option
def hold(folder: Path, used: str, pid: int, unlisted: bool, as_json: bool) -> None:
    """Let a process use a GPU or an instance.

    The driver then refuses to change it.
    """
    node = hands(folder)
    which, gi_id = place(node, used)
    node.hold(which, gi_id, _compute(node, which, gi_id), pid=pid, listed=not unlisted)
    say(folder, f"pid {pid} holds {used}", as_json, gpu_uuid=node.uuids[which], gi_id=gi_id, pid=pid)


@click.command()
@folder_argument
@_used
@_pid
@json_option
def release(folder: Path, used: str, pid: int, as_json: bool) -> None:
    """The opposite of `hold`."""
    node = hands(folder)
    which, gi_id = place(node, used)
    node.let_go(which, gi_id, _compute(node, which, gi_id), pid=pid)
    say(folder, f"pid {pid} let go of {used}", as_json, gpu_uuid=node.uuids[which], gi_id=gi_id, pid=pid)


@click.command()
@folder_argument
@click.argument("mig_uuid", metavar="MIG", envvar="CUDA_VISIBLE_DEVICES")
@click.option(
    "--every", type=click.FloatRange(0.001, 60), default=0.02, show_default=True, help="Seconds between steps."
)
@click.option("--steps", type=click.IntRange(1), help="End after so many; else with SIGTERM or Ctrl-C.")
def work(folder: Path, mig_uuid: str, every: float, steps: int | None) -> None:
    """Be a job's program on a MIG device.

    It keeps the device open and counts as long as it is there, a line each: the count, and seconds since it began.
    MIG is its UUID, or what CUDA_VISIBLE_DEVICES says:
    eval "$(gres-mig --node DIR env OWNER)".
    """
    from gres_mig.simulator.job import opened

    done = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        done.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    with opened(hands(folder).store.folder, mig_uuid) as job:
        click.echo(f"opened {mig_uuid}, {job.work():,} MiB")
        began, count = time.monotonic(), 0
        while not done.wait(every) and count != steps:
            job.work()
            count += 1
            click.echo(f"{count} {time.monotonic() - began:.3f}")


def add_to(group: click.Group) -> None:
    """Put these commands into `simulate`."""
    for command in (reboot, reload, reset, lose, mig, make, destroy, hold, release, work):
        group.add_command(command)


def _compute(node: Node, which: int, gi_id: int | None) -> int | None:
    """The compute instance a program would have open; a bare instance has none."""
    for instance in node.hardware()["gpus"][which]["instances"]:
        if instance["id"] == gi_id and instance["compute"]:
            return instance["compute"][0]["id"]
    return None

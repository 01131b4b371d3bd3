"""Commands about what a whole GPU does: its MIG mode, its fence, and what the boot unit runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click

from gres_mig import delegation
from gres_mig.allocator import Allocator
from gres_mig.answers import emit, for_root
from gres_mig.cli import Node, json_option, pass_node
from gres_mig.deadline import operate
from gres_mig.errors import Busy, GresMigError, TimedOut
from gres_mig.look import look, publish
from gres_mig.machine import boot_id
from gres_mig.mode import turn
from gres_mig.models import Gpu, Settings
from gres_mig.placement import named
from gres_mig.state import Store

_BOOT_S = 50.0
"""Less than the boot unit's TimeoutStartSec: what is not done by then is said, not cut off."""


@click.command()
@click.argument("gpu")
@json_option
@pass_node
def enable_mig(node: Node, gpu: str, as_json: bool) -> None:
    """Turn MIG on; the GPU has to be managed and idle.

    On Ampere boards it comes into force with a reset of the GPU.
    """
    _change(node, "enable-mig", gpu, on=True, as_json=as_json)


@click.command()
@click.argument("gpu")
@json_option
@pass_node
def disable_mig(node: Node, gpu: str, as_json: bool) -> None:
    """Turn MIG off; the GPU has to be managed and empty."""
    _change(node, "disable-mig", gpu, on=False, as_json=as_json)


@click.command()
@click.argument("gpu")
@json_option
@pass_node
def unfence(node: Node, gpu: str, as_json: bool) -> None:
    """Let a fenced GPU take work again.

    A GPU is fenced when a driver call on it did not return in time, and until the next boot.
    """
    settings = for_root(node.settings, "unfence", or_delegate=True)
    store = _store(settings)
    fences = store.read().fences
    # Without a look where that is possible: the driver may not answer this time either.
    gpu_uuid = gpu if gpu in fences else _named(settings, gpu)
    try:
        fenced = Allocator(settings, store, boot_id(settings.simulator)).unfence(gpu_uuid)
    except Busy as error:
        why = f"; it is fenced because {fences[gpu_uuid].reason}" if gpu_uuid in fences else ""
        raise Busy(
            f"unfencing {gpu_uuid}: a process is still working on it{why}",
            hint="when that process cannot be ended, reset the GPU or reboot the node",
        ) from error
    text = f"{gpu_uuid} takes work again" if fenced else f"{gpu_uuid} was not fenced"
    emit({"gpu_uuid": gpu_uuid, "unfenced": fenced}, text, as_json=as_json)


@click.command()
@json_option
@pass_node
def boot(node: Node, as_json: bool) -> int:
    """Do what has to be done once a boot.

    Settle what the last boot left; then, only where the configuration says mig_at_boot, turn MIG on for the managed
    idle GPUs.
    """
    settings = for_root(node.settings, "boot")
    ends = time.monotonic() + _BOOT_S
    errors: list[GresMigError] = []
    # First, for reconciling makes the folders where they are missing.
    _tried(errors, lambda: delegation.carry_out(delegation.renew(settings)))
    outcomes = _tried(errors, lambda: operate(settings, lambda allocator: allocator.reconcile())) or ()
    gpus = _tried(errors, lambda: _look(settings, errors, ends)) or ()
    shown = [_boot_one(settings, gpu, errors, ends) for gpu in gpus]
    if any(gpu["changed"] for gpu in shown) and time.monotonic() + settings.hardware_timeout_s <= ends:
        _tell_everybody(settings)
    lines = [f"settled {len(outcomes)} record{'s' * (len(outcomes) != 1)}", *(_line(gpu) for gpu in shown)]
    if not gpus and not errors:
        lines.append("no GPU of this node is managed")
    plain = {"settled": len(outcomes), "gpus": shown, "errors": [_plain(error) for error in errors]}
    emit(plain, "\n".join(lines), as_json=as_json)
    for error in errors:
        click.echo(f"gres-mig: {error}", err=True)
    return max((error.fault.exit_code for error in errors), default=0)


def _change(node: Node, command: str, gpu: str, *, on: bool, as_json: bool) -> None:
    settings = for_root(node.settings, command)
    gpu_uuid = _named(settings, gpu)
    changed = _turn(settings, gpu_uuid, on=on)
    if changed:
        _tell_everybody(settings)
    text = f"MIG mode of {gpu_uuid} is {'on' if on else 'off'}" + ("" if changed else " (already)")
    emit({"gpu_uuid": gpu_uuid, "mig": on, "changed": changed}, text, as_json=as_json)


def _turn(settings: Settings, gpu_uuid: str, *, on: bool) -> bool:
    store = _store(settings)
    # Through the allocator's own access: that is what the deadline watches.
    return operate(settings, lambda a: turn(settings, store, a.access, gpu_uuid, on=on))


def _tell_everybody(settings: Settings) -> None:
    """What is done is done, also where it cannot be looked at again now."""
    _tried([], lambda: publish(settings, look(settings)))


def _named(settings: Settings, text: str) -> str:
    return named(operate(settings, lambda allocator: allocator.look(everything=True)), text).uuid


def _store(settings: Settings) -> Store:
    return Store(settings, boot_id(settings.simulator))


def _tried(errors: list[GresMigError], work: Callable[[], Any]) -> Any:
    try:
        return work()
    except GresMigError as error:
        errors.append(error)
        return None


def _look(settings: Settings, errors: list[GresMigError], ends: float) -> tuple[Gpu, ...]:
    store = _store(settings)
    while True:
        before = store.read().fences.keys()
        try:
            return operate(settings, lambda allocator: allocator.look())
        except TimedOut as error:
            # The one that does not answer is fenced by now, and the next look leaves it out.
            late = time.monotonic() + settings.hardware_timeout_s > ends
            if late or store.read().fences.keys() == before:
                raise
            errors.append(error)


def _boot_one(settings: Settings, gpu: Gpu, errors: list[GresMigError], ends: float) -> dict[str, Any]:
    changed = False
    if settings.mig_at_boot and gpu.mig_current is False:
        if time.monotonic() + settings.hardware_timeout_s > ends:
            hint = f"run: gres-mig enable-mig {gpu.uuid}"
            errors.append(Busy(f"no time was left to turn on the MIG mode of {gpu.uuid}", hint=hint))
        else:
            changed = bool(_tried(errors, lambda: _turn(settings, gpu.uuid, on=True)))
    mig = True if changed else gpu.mig_current
    return {
        "gpu_uuid": gpu.uuid,
        "model": gpu.model,
        "mig": mig,
        "changed": changed,
        "trouble": "" if changed else gpu.trouble,
    }


def _line(shown: dict[str, Any]) -> str:
    said = shown["trouble"] or ("MIG mode is on" if shown["mig"] else "shared by slices")
    return f"{shown['gpu_uuid']}: {said}" + (", turned on now" if shown["changed"] else "")


def _plain(error: GresMigError) -> dict[str, Any]:
    return {"fault": error.fault.value, "code": error.code, "message": error.message, "hint": error.hint}

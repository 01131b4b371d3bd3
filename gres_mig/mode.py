"""Turns a GPU's MIG mode on or off: never unasked, only on a managed idle GPU, and read back."""

from __future__ import annotations

import os
import time

from gres_mig import log, machine, rooms
from gres_mig.access import Access
from gres_mig.errors import BadRequest, Busy, GresMigError, NodeFault
from gres_mig.models import Gpu, Settings, State
from gres_mig.nvml import Session
from gres_mig.state import Store

RESET_REQUIRED = 16
"""`NVML_ERROR_RESET_REQUIRED` (nvml.h): as an activation status, the mode comes into force with a reset."""

# Both keep every GPU's device file open by design, and step aside for a change of mode (NVIDIA/deepops pull 633);
# whether they do is the driver's to say. The kernel shows the first 15 characters of a command.
_STEP_ASIDE = frozenset({"nvidia-persiste", "nv-fabricmanage"})

# It kept GPUs from changing their mode while no process held one (NVIDIA/mig-parted issue 181).
_MODULES = ("nvidia_drm", "nvidia_modeset")


def turn(settings: Settings, store: Store, access: Access, gpu_uuid: str, *, on: bool) -> bool:
    """Bring that MIG mode into force; False when it was already, `Busy` when it is not afterwards.

    A mode that clients keep from coming into force is taken back, so that the GPU serves on as it was; one that
    waits for a reset stays pending.
    """
    doing = f"turning {'on' if on else 'off'} the MIG mode of {gpu_uuid}"
    with access.locked(gpu_uuid, time.monotonic() + settings.lock_wait_s):
        state = store.read()
        if gpu_uuid in state.fences:
            reason = state.fences[gpu_uuid].reason
            raise NodeFault(f"{doing}: it is fenced: {reason}", hint=f"run: gres-mig unfence {gpu_uuid}", code="HEALTH")
        with access.session(gpu_uuid) as (driver, gpu):
            if gpu.sliced:
                raise BadRequest(f"{doing}: it is shared by slices", hint="take it out of slices in the configuration")
            if gpu.mig_current is None:
                raise _without_mode(gpu, doing)
            if gpu.mig_current == gpu.mig_pending == on:
                return False
            if not on:
                _refuse_if_held(state, gpu, doing)
            if gpu.mig_current != on:
                _refuse_if_used(driver, settings, gpu, doing)
            status = driver.set_mig_mode(gpu, on)
        # A new session: the one that asked for the change need not be the one that sees it.
        with access.session(gpu_uuid) as (driver, gpu):
            if gpu.mig_current == gpu.mig_pending == on:
                log.info("turned %s the MIG mode of %s", "on" if on else "off", gpu_uuid)
                return True
            if status == RESET_REQUIRED and gpu.mig_pending == on:
                raise Busy(
                    f"{doing}: pending until the GPU is reset",
                    hint=f"when nothing uses it, run: nvidia-smi --gpu-reset -i {gpu.pci_bus_id}, or reboot the node",
                )
            in_the_way = (*_clients(driver, settings, gpu), *_modules(settings))
            if gpu.mig_pending == on:
                driver.set_mig_mode(gpu, not on)
    raise _not_in_force(doing, status, in_the_way)


def _without_mode(gpu: Gpu, doing: str) -> GresMigError:
    # What could not be read has no memory size either; a board without MIG has one.
    kind = BadRequest if gpu.memory_mib else NodeFault
    return kind(f"{doing}: {gpu.trouble}")


def _refuse_if_held(state: State, gpu: Gpu, doing: str) -> None:
    held = [f"{r.owner} ({r.profile_name} at {r.placement})" for r in state.records if r.gpu_uuid == gpu.uuid]
    held += [f"foreign instance {gpu.uuid}:{i.id} at {i.placement}" for i in rooms.unnamed(gpu, state)]
    if held:
        message = f"{doing}: its instances have to go first: {', '.join(held)}"
        raise Busy(message, hint="see: gres-mig status", blockers=held)


def _refuse_if_used(driver: Session, settings: Settings, gpu: Gpu, doing: str) -> None:
    # Before the driver is asked: it would keep the mode pending, and a GPU with a pending mode takes no work.
    clients = [client for client in _clients(driver, settings, gpu) if not _steps_aside(client)]
    if clients:
        raise Busy(f"{doing}: it is in use: {', '.join(clients)}", hint="end them and ask again", blockers=clients)


def _clients(driver: Session, settings: Settings, gpu: Gpu) -> tuple[str, ...]:
    """Who uses the GPU, as NVML lists it and as /proc shows it: a monitoring agent is in no list of NVML."""
    card = machine.device_nodes(gpu.minor, -1, (), settings.simulator or "/")[0]
    pids = {*driver.gpu_users(gpu), *(process.pid for process in machine.holders([card]))}
    return tuple(machine.describe(pid) for pid in sorted(pids))


def _steps_aside(client: str) -> bool:
    return not _STEP_ASIDE.isdisjoint(client.split())


def _modules(settings: Settings) -> tuple[str, ...]:
    folder = os.path.join(settings.simulator or "/", "sys/module")
    return tuple(f"kernel module {name}" for name in _MODULES if os.path.isdir(os.path.join(folder, name)))


def _not_in_force(doing: str, status: int, in_the_way: tuple[str, ...]) -> Busy:
    said = f"the driver answered {status}" if status else "the driver said it was done"
    who = ", ".join(in_the_way) or "nothing that shows in /proc"
    message = f"{doing}: {said}, yet it is not in force; in its way: {who}"
    return Busy(message, hint="end what uses the GPU and ask again", blockers=in_the_way)

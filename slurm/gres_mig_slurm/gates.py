"""Tells the controller for which sizes this node has a place now: features of the node, active while it has one."""

from __future__ import annotations

import os
import time

from gres_mig import log, machine, published, rooms
from gres_mig.deadline import operate
from gres_mig.errors import GresMigError, StateError
from gres_mig.models import Request, Settings
from gres_mig.published import Published
from gres_mig.state import Store
from gres_mig.values import replace
from gres_mig_slurm import delayed, openings, told
from gres_mig_slurm.openings import PREFIX

CHECK_S = 60.0
"""The controller is asked what it knows, and the hardware looked at, no more often: a restart of slurmctld, or a
reconfigure, opens all gates; who comes in by that is put back, and the gates are told anew then."""


def publish(settings: Settings, node: str = "", *, anew: bool = False) -> None:
    """Tell the controller what of this node's gates has changed; `anew`: ask it what it knows, too.

    Whatever goes wrong, jobs go on: one that is let in wrongly is put back, one that is kept out comes in later.
    """
    if settings.admission != "gates" and not told.is_any(settings):
        return
    try:
        with told.turn(settings) as ours:
            if ours and settings.admission == "gates":
                _publish(settings, node or _name(), anew=anew)
            elif ours:
                _open_all(settings, node or _name())
    except GresMigError as error:
        log.warning("Slurm is not told now what this node has places for: %s", error)


def look_after(settings: Settings, node: str = "") -> None:
    """What the service does from time to time: see what was made and ended by others than hooks, then publish."""
    if settings.admission == "gates":
        try:
            _look(settings)
        except GresMigError as error:
            log.warning("this node was not looked at: %s", error)
    publish(settings, node)


def closed_since(settings: Settings, request: Request) -> float:
    """Since when a job may have waited here for what it asks for; now where it did not have to."""
    now = time.time()
    try:
        spells, gpus = told.read(settings).spells, _seen(settings).gpus
    except StateError as error:
        log.warning("how long %s was not to be had here is not known: %s", request, error)
        return now
    names = {name for gpu in gpus for name in openings.features(gpu, request, settings)}
    closed = [spell for name in names if (spell := spells.get(name)) and not openings.was_open(spell, now)]
    return min([now, *(spell.closed for spell in closed)])


def _publish(settings: Settings, node: str, *, anew: bool) -> None:
    before, seen, waiting, now = told.read(settings), _seen(settings), delayed.read(settings), time.time()
    free = tuple(rooms.room(gpu, seen.state) for gpu in seen.gpus if settings.manages(gpu))
    opened = openings.with_place(free, waiting, settings)
    spells = openings.followed(before.spells, openings.sizes((room.gpu for room in free), settings), opened, now)
    begun = [record.since for record in seen.state.records]
    tried = openings.called(free, waiting, settings, now)
    tried |= openings.sounded(spells, begun, waiting, len(free), settings, now)
    gates = opened | {f"{name}{openings.TRY}" for name in tried}
    if anew or gates != before.gates or not 0 <= now - before.asked < CHECK_S:
        # Until the controller has answered, nobody knows what it was told.
        told.write(settings, replace(before, gates=None, spells=spells))
        _tell(node, gates)
        told.write(settings, told.Told(gates, now, spells))
    elif spells != before.spells:
        told.write(settings, replace(before, spells=spells))


def _tell(node: str, gates: frozenset[str]) -> None:
    from gres_mig_slurm import controller

    available, active = controller.features(node)
    if missing := gates.difference(available):
        names = ",".join(sorted(missing))
        log.warning("slurmctld knows no feature %s of %s: restart it, or see: gres-mig slurm check", names, node)
    # The site's own features stay as they are.
    wanted = [name for name in available if name in (gates if name.startswith(PREFIX) else active)]
    if set(wanted) != set(active):
        controller.activate(node, wanted)
        log.info("%s has places now for: %s", node, ", ".join(sorted(gates)) or "nothing")


def _open_all(settings: Settings, node: str) -> None:
    """With `admission` set back to `count` nobody would ever open what is closed now."""
    from gres_mig_slurm import controller

    available, active = controller.features(node)
    controller.activate(node, [name for name in available if name in active or name.startswith(PREFIX)])
    told.forget(settings)


def _look(settings: Settings) -> None:
    try:
        age_s = time.time() - _seen(settings).looked
    except StateError:
        # Nothing was published since the boot.
        age_s = CHECK_S
    if not 0 <= age_s < CHECK_S:
        gpus = operate(settings, lambda allocator: allocator.look())
        with Store(settings, machine.boot_id(settings.simulator)).transaction() as node:
            node.save(node.state, gpus=gpus)


def _seen(settings: Settings) -> Published:
    """The node by its records and by what was last seen of it: a hook has no time to look at all GPUs again."""
    boot_id = machine.boot_id(settings.simulator)
    seen = published.read(Store(settings, boot_id), boot_id)
    # What the driver called full was so before the last change.
    return replace(seen, gpus=tuple(replace(gpu, full_profiles=frozenset()) for gpu in seen.gpus))


def _name() -> str:
    """Slurm's name of this node."""
    import socket

    from gres_mig_slurm import conf_lines

    if name := os.environ.get("SLURMD_NODENAME", ""):
        return name
    names = conf_lines.nodes_of(conf_lines.read(conf_lines.find()), socket.gethostname())
    if len(names) != 1:
        raise StateError(f"slurm.conf has {len(names)} nodes of this host", hint="set SLURMD_NODENAME")
    return names[0]

"""One look at the node: everything for whom its records are readable, what was published for all others."""

from __future__ import annotations

import time
from collections.abc import Callable

from gres_mig import machine, published
from gres_mig.deadline import operate
from gres_mig.errors import NodeFault, StateError
from gres_mig.locks import lock_holders
from gres_mig.models import Gpu, Settings, State
from gres_mig.nvml import DriverError
from gres_mig.published import Published
from gres_mig.show import age
from gres_mig.slice_session import SliceSession
from gres_mig.state import Store
from gres_mig.values import replace
from gres_mig.view import View

_NO_DRIVER = frozenset({9, 12})
"""NVML_ERROR_DRIVER_NOT_LOADED and NVML_ERROR_LIBRARY_NOT_FOUND: a machine without GPUs, which is no fault."""

MAY_NOT_LIST = "(NVML code 4)"
"""How a GPU's trouble ends where the caller may not list its instances."""

_PUBLISH_AFTER_S = 60.0


def look(settings: Settings) -> View:
    """The node as it is now, as far as the caller may see it; nothing on it is changed."""
    boot_id = machine.boot_id(settings.simulator)
    store = Store(settings, boot_id)
    try:
        before = store.read()
    except StateError as error:
        if error.code != "NOPERM":
            raise
        return _for_everybody(settings, store, boot_id)
    gpus, note = _found(lambda: operate(settings, lambda allocator: allocator.look(everything=True)))
    if any(gpu.uuid in before.fences for gpu in gpus):
        # A fenced GPU is not read; its slices are those that were last seen.
        gpus = tuple(_with_profiles(gpu, _last(store, boot_id)) for gpu in gpus)
    return View(gpus, store.read(), before, time.time(), notes=note)


def publish(settings: Settings, view: View) -> str:
    """Let everybody see what this look found, where what they see is old; the reason if that cannot be written."""
    managed = tuple(gpu for gpu in view.gpus if settings.manages(gpu))
    if not (view.owners and managed):
        return ""
    if "node" in lock_holders(settings.run_dir):
        # Whoever it is publishes as well; and if it hangs there, to look must not.
        return ""
    store = Store(settings, view.state.boot_id)
    last = _last(store, view.state.boot_id)
    if last and last.gpus == managed and 0 <= view.looked - last.looked < _PUBLISH_AFTER_S:
        return ""
    try:
        with store.transaction() as node:
            node.save(node.state, gpus=managed)
    except StateError as error:
        # On a fresh node, where nothing is recorded yet, anybody sees all of it; root is who begins.
        return "" if error.code == "NOPERM" else f"what others see stays old: {error.message}"
    return ""


def _found(gpus: Callable[[], tuple[Gpu, ...]]) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    try:
        return gpus(), ()
    except NodeFault as error:
        if isinstance(error, DriverError) and error.nvml_code in _NO_DRIVER:
            return (), (str(error),)
        raise


def _last(store: Store, boot_id: str) -> Published | None:
    try:
        return published.read(store, boot_id)
    except StateError:
        return None


def _for_everybody(settings: Settings, store: Store, boot_id: str) -> View:
    try:
        last = published.read(store, boot_id)
        when = f"{age(time.time() - last.looked)} ago" if last.looked else "never"
        note = f"instances as root last saw them: {when}; owners are shown to root only"
    except StateError as error:
        last, note = Published(0.0, (), State(boot_id)), str(error)
    fences = last.state.fences

    def visible() -> tuple[Gpu, ...]:
        with SliceSession(settings) as driver:
            return driver.gpus(
                lambda gpu: True, lambda gpu: f"fenced: {fences[gpu.uuid].reason}" if gpu.uuid in fences else ""
            )

    # In a child, as root's look is: a driver call that hangs cannot be interrupted, waiting for a child can.
    gpus, no_driver = _found(lambda: operate(settings, lambda allocator: visible()))
    gpus = tuple(_merged(gpu, last) for gpu in gpus)
    return View(gpus, last.state, last.state, last.looked, owners=False, notes=(note, *no_driver))


def _merged(seen: Gpu, last: Published) -> Gpu:
    """What anybody may see now, and where only root may list the instances, what root saw last."""
    known = next((gpu for gpu in last.gpus if gpu.uuid == seen.uuid), None)
    if known and (MAY_NOT_LIST in seen.trouble or seen.sliced):
        return replace(known, index=seen.index)
    return _with_profiles(seen, last) if seen.uuid in last.state.fences else seen


def _with_profiles(gpu: Gpu, last: Published | None) -> Gpu:
    known = next((each for each in last.gpus if each.uuid == gpu.uuid), None) if last else None
    return replace(gpu, profiles=known.profiles) if known and not gpu.profiles else gpu

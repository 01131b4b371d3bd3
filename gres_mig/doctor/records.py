"""Checks of what the node has recorded, against what is there."""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Iterator, Sequence

from gres_mig.doctor.finding import Finding
from gres_mig.models import Settings
from gres_mig.view import Drift, View, holdings

_TODO = {
    "missing": "when its owner is done, run: gres-mig reclaim {owner}",
    "mismatch": "when its owner is done, run: gres-mig reclaim {owner}",
    "unread": "reset the GPU or reboot the node; if it is gone for good, run: gres-mig reclaim {owner}",
    "old intent": "run: gres-mig reconcile",
    "old release": "run: gres-mig reconcile",
    "stuck": "end what uses it, then run: gres-mig reclaim --orphans",
    "distrusted": "adopt or reclaim what is foreign, then run: gres-mig reconcile",
}


def drifted(found: Sequence[Drift], allocations: int) -> Iterator[Finding]:
    """Records and hardware say the same, and nothing is stuck or left over; `allocations` is how many are recorded."""
    missing = [each for each in found if each.kind == "missing"]
    if 1 < len(missing) == allocations:
        # No process gives all of them back at once; what does is a driver that was unloaded, or a reset.
        text = f"none of the {len(missing)} recorded instances is there: the driver was reloaded, or the GPUs reset"
        todo = "end the jobs and kernels that had them; run: gres-mig reconcile"
        yield Finding("records", "problem", text, todo)
        found = [each for each in found if each.kind != "missing"]
        if not found:
            return
    for each in found:
        yield Finding("records", "problem", each.text, _TODO[each.kind].format(owner=each.owner))
    if not found:
        yield Finding("records", "ok", "records and hardware agree")


def fences(view: View, settings: Settings) -> Iterator[Finding]:
    """No managed GPU is fenced."""
    for gpu in view.gpus:
        fence = view.state.fences.get(gpu.uuid)
        if fence and settings.manages(gpu):
            text = f"GPU {gpu.index} ({gpu.uuid}) is fenced: {fence.reason}"
            yield Finding("fences", "problem", text, f"when it answers again, run: gres-mig unfence {gpu.uuid}")


def foreign(view: View, settings: Settings) -> Iterator[Finding]:
    """Instances on managed GPUs that no record names hold slices for ever."""
    for gpu in view.gpus:
        if not settings.manages(gpu):
            continue
        for holding in holdings(view, gpu):
            if holding.record is None and holding.instance is not None:
                name = f"{gpu.uuid}:{holding.instance.id}"
                text = f"{holding.profile_name} at {holding.placement} of GPU {gpu.index} is foreign: {name}"
                todo = f"run: gres-mig adopt OWNER {name}, or gres-mig reclaim --foreign {name} --yes"
                yield Finding("foreign", "warning", text, todo)


def damaged(state_file: str) -> Iterator[Finding]:
    """No damaged records were set aside."""
    for path in sorted(glob.glob(f"{glob.escape(state_file)}.damaged-*")):
        text = f"damaged records were set aside: {path} ({os.path.getsize(path):,} bytes)"
        todo = f"when you know what became of the instances it names, run: rm {shlex.quote(path)}"
        yield Finding("records", "warning", text, todo)

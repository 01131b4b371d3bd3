"""Checks of what happens at boot: that the boot unit runs, ends, and is in its place among the others."""

from __future__ import annotations

from collections.abc import Iterator

from gres_mig.doctor.finding import Finding
from gres_mig.doctor.systemd import Units
from gres_mig.models import Settings

_BEFORE = ("nvidia-persistenced.service", "nvidia-fabricmanager.service")
"""They load the driver and bring the GPUs up."""

_AFTER = ("slurmd.service",)
"""Its prologs ask for instances as soon as it runs."""

_AGAIN = "run: gres-mig setup --write && systemctl daemon-reload"


def boot_unit(settings: Settings, units: Units, unit: str) -> Iterator[Finding]:
    """Where MIG mode is to be turned on at boot, that is done; in time, in its place, and not for ever."""
    if settings.mig_at_boot and not units.starts_at_boot(unit):
        text = f"mig_at_boot is true, but {unit} does not start at boot"
        yield Finding("boot", "warning", text, f"run: gres-mig setup --write && systemctl enable {unit}")
    elif units.starts_at_boot(unit):
        yield from _in_its_place(units, unit)


def _in_its_place(units: Units, unit: str) -> Iterator[Finding]:
    if not units.is_there(unit):
        text = f"{unit} is to start at boot, but there is no such unit"
        yield Finding("boot", "problem", text, _AGAIN)
        return
    early = [each for each in _AFTER if units.is_there(each) and not units.comes_after(each, unit)]
    late = [each for each in _BEFORE if units.starts_at_boot(each) and not units.comes_after(unit, each)]
    limit = units.value(unit, "TimeoutStartSec")
    if early:
        text = (
            f"{', '.join(early)} does not wait for {unit}: the first jobs may find MIG off or meet what the last left"
        )
        yield Finding("boot", "problem", text, _AGAIN)
    elif late:
        text = f"{unit} does not wait for {', '.join(late)}: the driver may not be there yet"
        yield Finding("boot", "problem", text, _AGAIN)
    elif limit in ("", "0", "infinity"):
        # A oneshot unit has none by itself, and one such kept nodes from booting (NVIDIA/mig-parted issue 68).
        text = f"{unit} has no TimeoutStartSec: a driver that hangs keeps the node from booting"
        yield Finding("boot", "problem", text, _AGAIN)
    else:
        yield Finding("boot", "ok", f"{unit} starts at boot, after the driver, before Slurm, for {limit} at most")

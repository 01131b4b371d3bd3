"""Checks for other programs that partition GPUs: of two that do, each undoes the other's work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gres_mig.doctor.finding import Finding, Level

_UNITS = {
    "nvidia-mig-manager.service": "NVIDIA's MIG manager applies a layout of its own at boot",
    # Azure/AgentBaker writes these two on AKS nodes.
    "mig-enable.service": "a unit that turns MIG mode on",
    "mig-partition.service": "a unit that makes instances at boot",
}

_CGROUP_TREES = ("", "unified", "systemd")
"""Where systemd keeps its services: version 2, both versions, version 1."""

_MAKERS = {
    "nvidia-mig-manager": "NVIDIA's MIG manager",
    "nvidia-mig-parted": "NVIDIA's MIG Partition Editor",
    "gpu-kubelet-plugin": "the DRA driver for NVIDIA GPUs",
    "vGPUmonitor": "HAMi",
    "mig-agent": "the nos MIG agent",
    "migagent": "the nos MIG agent",
}
"""Programs that make and destroy instances, by the name of their executable."""

_GIVERS = {
    "nvidia-device-plugin": "a Kubernetes device plugin",
    "k8s-device-plugin": "a Kubernetes device plugin",
    "nvidia-device-plugin-daemonset": "a Kubernetes device plugin",
}
"""Programs that hand out the GPUs and instances they find; HAMi's plugin, of the first name, makes some as well."""


def units(etc: Path, sys: Path, *, managed: bool, unit_folders: tuple[Path, ...] = ()) -> Iterator[Finding]:
    """Units of other managers that start at boot or run; `managed`: GPUs of this node are ours."""
    level: Level = "problem" if managed else "warning"
    folders = (etc / "systemd/system", *unit_folders)
    found = False
    for unit, what in _UNITS.items():
        enabled = any(starts_at_boot(folder, unit) for folder in folders)
        active = any((sys / "fs/cgroup" / tree / "system.slice" / unit).is_dir() for tree in _CGROUP_TREES)
        masked = os.path.realpath(etc / "systemd/system" / unit) == os.devnull
        if (enabled and not masked) or active:
            found = True
            state = " and ".join(word for word, is_so in (("enabled", enabled), ("active", active)) if is_so)
            yield Finding("other managers", level, f"{unit} is {state}: {what}", f"run: systemctl disable --now {unit}")
    if not found:
        yield Finding("other managers", "ok", "no unit of another MIG manager starts at boot")


def starts_at_boot(folder: Path, unit: str) -> bool:
    """Whether something in that folder of units wants the unit; the link alone counts, wherever it leads."""
    kinds = ("*.wants", "*.requires")
    return any(os.path.lexists(wanted / unit) for kind in kinds for wanted in folder.glob(kind))


def processes(proc: Path, *, managed: bool) -> Iterator[Finding]:
    """Running programs of other managers, in containers too, as /proc shows them."""
    for name, pids in sorted(_running(proc).items()):
        makes = name in _MAKERS
        level: Level = "problem" if makes and managed else "warning"
        what = f"{_MAKERS[name]} makes and destroys instances" if makes else f"{_GIVERS[name]} hands out GPUs it finds"
        where = ", ".join(f"pid {pid}" for pid in sorted(pids))
        todo = "let it have other GPUs than those in gpus of gres-mig's configuration, or end it"
        yield Finding("other managers", level, f"{name} runs ({where}): {what}", todo)


def _running(proc: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for folder in proc.glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text(errors="replace").split("\0")
        except OSError:
            continue
        # The first two: a script's name comes after its interpreter's.
        for word in words[:2]:
            name = os.path.basename(word)
            if name in _MAKERS or name in _GIVERS:
                found.setdefault(name, []).append(int(folder.name))
                break
    return found

"""Checks for other programs that partition GPUs: of two that do, each undoes the other's work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gres_mig.doctor.finding import Finding, Level
from gres_mig.doctor.processes import running
from gres_mig.doctor.systemd import Units

_UNITS = {
    "nvidia-mig-manager.service": "NVIDIA's MIG manager applies a layout of its own at boot",
    # Azure/AgentBaker writes these two on AKS nodes.
    "mig-enable.service": "a unit that turns MIG mode on",
    "mig-partition.service": "a unit that makes instances at boot",
}

_MAKERS = {
    "nvidia-mig-manager": "NVIDIA's MIG manager",
    "nvidia-mig-parted": "NVIDIA's MIG Partition Editor",
    "gpu-kubelet-plugin": "the DRA driver for NVIDIA GPUs",
    "vGPUmonitor": "HAMi",
    "instaslice-daemonset": "Instaslice",
    "das-daemonset": "Instaslice, now the dynamic accelerator slicer",
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


def enabled(units: Units, *, managed: bool) -> Iterator[Finding]:
    """Units of other managers that start at boot or run; `managed`: GPUs of this node are ours."""
    level: Level = "problem" if managed else "warning"
    found = False
    for unit, what in _UNITS.items():
        states = (("enabled", units.starts_at_boot(unit)), ("active", units.runs(unit)))
        state = " and ".join(word for word, is_so in states if is_so)
        if state:
            found = True
            yield Finding("other managers", level, f"{unit} is {state}: {what}", f"run: systemctl disable --now {unit}")
    if not found:
        yield Finding("other managers", "ok", "no unit of another MIG manager starts at boot")


def processes(proc: Path, *, managed: bool) -> Iterator[Finding]:
    """Running programs of other managers."""
    found: dict[str, list[str]] = {}
    for process in running(proc, _MAKERS.keys() | _GIVERS.keys()):
        found.setdefault(process.program, []).append(str(process.pid))
    for name, pids in sorted(found.items()):
        makes = name in _MAKERS
        level: Level = "problem" if makes and managed else "warning"
        what = f"{_MAKERS[name]} makes and destroys instances" if makes else f"{_GIVERS[name]} hands out GPUs it finds"
        where = ", ".join(f"pid {pid}" for pid in pids)
        todo = f"give it other GPUs than gres-mig's, or end it; run: ps -f -p {','.join(pids)}"
        yield Finding("other managers", level, f"{name} runs ({where}): {what}", todo)

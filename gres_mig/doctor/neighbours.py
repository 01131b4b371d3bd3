"""Checks of programs that gres-mig can share a node with, if they are set up for it."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gres_mig.doctor.finding import Finding
from gres_mig.doctor.processes import running
from gres_mig.doctor.systemd import Units
from gres_mig.models import Gpu

_FABRIC = "nvidia-fabricmanager.service"
_MPS = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
_MIG_UUID = r"MIG-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


def fabric(units: Units, root: Path) -> Iterator[Finding]:
    """Where GPUs are joined by NVSwitches, the service that programs them runs: CUDA starts on none without it."""
    if not glob.glob(str(root / "dev/nvidia-nvswitch[0-9]*")):
        return
    if units.runs(_FABRIC) or units.starts_at_boot(_FABRIC):
        yield Finding("fabric", "ok", f"{_FABRIC} is there for this node's NVSwitches")
    else:
        text = f"this node has NVSwitches, but {_FABRIC} is not enabled: CUDA says that the system is not ready"
        yield Finding("fabric", "problem", text, f"run: systemctl enable --now {_FABRIC}")


def mps(proc: Path) -> Iterator[Finding]:
    """No MPS of the node's own: its server uses GPUs as a whole, which keeps the first instance from being made.

    One that a user has in a job is that job's affair.
    """
    pids = [str(process.pid) for process in running(proc, _MPS) if process.is_of_root()]
    if pids:
        text = f"root runs CUDA MPS (pid {', '.join(pids)}): its server keeps a managed GPU in use"
        yield Finding("MPS", "warning", text, "run: echo quit | nvidia-cuda-mps-control")


def preload(etc: Path) -> Iterator[Finding]:
    """HAMi-core is loaded into slices only, not into each process of the node: it limits by index what MIG limits."""
    file = etc / "ld.so.preload"
    try:
        words = file.read_text(errors="replace").split()
    except OSError:
        return
    for word in words:
        if os.path.basename(word) == "libvgpu.so":
            text = f"{file} loads HAMi-core into every process: it sets their umask to 0 and takes instances for GPUs"
            yield Finding("HAMi-core", "problem", text, f"run: sed -i '\\#{word}#d' {file}")


def device_names(root: Path, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """What containers name by CDI is there; nvidia-cdi-refresh does not hear of instances that come and go.

    (NVIDIA/nvidia-container-toolkit issue 1828)
    """
    there = {compute.mig_uuid for gpu in gpus for instance in gpu.instances for compute in instance.compute_instances}
    for path in sorted(file for folder in ("etc/cdi", "run/cdi", "var/run/cdi") for file in (root / folder).glob("*")):
        try:
            named = set(re.findall(_MIG_UUID, path.read_text(errors="replace")))
        except OSError:
            continue
        gone = sorted(named - there)
        if gone:
            text = f"{path} names {len(gone)} MIG device(s) that are not there, the first is {gone[0]}"
            yield Finding("CDI", "warning", text, f"run: nvidia-ctk cdi generate --output={path}")

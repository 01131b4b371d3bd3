"""Checks of what lies between Python and the GPUs: binding, driver, MIG mode, device files."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from gres_mig import machine
from gres_mig.doctor.finding import Finding
from gres_mig.doctor.node import without
from gres_mig.errors import GresMigError
from gres_mig.models import Gpu, Settings
from gres_mig.view import has_no_mig

_OLDEST_BINDING = (13, 580)
"""What gres-mig is tested with; nvidia-ml-py 12.535 has only 10 of the 18 instance profiles."""

_MIG_SINCE = (
    (r"\bRTX PRO [456]000 ", (575, 51, 3)),
    (r"\bG?B200\b", (570, 133, 20)),
    (r"\bG?H[12]00\b", (525,)),
    (r"\b(?:A100|A30)\b", (450,)),
)
"""The first driver with MIG for a model, of NVIDIA's MIG guide; an older one may well know the board otherwise."""

_MODULES = ("nvidia_drm", "nvidia_modeset")
"""They kept GPUs from changing their mode while no process held one (NVIDIA/mig-parted issue 181)."""


def binding(path: Sequence[str] | None = None) -> Iterator[Finding]:
    """NVIDIA's binding is installed, and the deprecated distribution `pynvml` is not; looked for on `path`."""
    where = list(sys.path if path is None else path)
    found = {
        name: distribution.version
        for name in ("pynvml", "nvidia-ml-py")
        for distribution in metadata.Distribution.discover(name=name, path=where)
    }
    again = "run: pip uninstall --yes pynvml && pip install --force-reinstall nvidia-ml-py"
    if "nvidia-ml-py" not in found:
        yield Finding("binding", "problem", "nvidia-ml-py is not installed", "run: pip install nvidia-ml-py")
    elif _numbers(found["nvidia-ml-py"]) < _OLDEST_BINDING:
        text = f"nvidia-ml-py {found['nvidia-ml-py']} is older than {'.'.join(map(str, _OLDEST_BINDING))}"
        yield Finding("binding", "warning", text, "run: pip install --upgrade nvidia-ml-py")
    if "pynvml" in found and _numbers(found["pynvml"]) < (12,):
        # Up to 11.x it has a module pynvml of its own, which one is imported is a matter of chance.
        text = f"the deprecated distribution pynvml {found['pynvml']} puts a module in the place of NVIDIA's"
        yield Finding("binding", "problem", text, again)
    elif "pynvml" in found:
        text = f"the deprecated distribution pynvml {found['pynvml']} is installed beside nvidia-ml-py"
        yield Finding("binding", "warning", text, "run: pip uninstall --yes pynvml")
    elif _numbers(found.get("nvidia-ml-py", "0")) >= _OLDEST_BINDING:
        yield Finding("binding", "ok", f"nvidia-ml-py {found['nvidia-ml-py']}")


def driver(answer: tuple[str, str] | GresMigError, proc: Path, sysfs: Path) -> Iterator[Finding]:
    """The library answers (`answer`: driver and NVML version, or its error) and fits the kernel module."""
    module = _module_version(proc, sysfs)
    loaded = f"the kernel module is {module}" if module else "no kernel module nvidia is loaded"
    if isinstance(answer, GresMigError):
        command = "modprobe nvidia" if not module else "reboot" if "reboot" in answer.hint else "nvidia-smi"
        todo = "; ".join(filter(None, (answer.hint, "" if "run: " in answer.hint else f"run: {command}")))
        yield Finding("driver", "problem", f"{answer.message}; {loaded}", todo)
        return
    version, nvml = answer
    if module and module != version:
        text = f"{loaded}, the library says {version}"
        yield Finding("driver", "problem", text, "the driver was upgraded under a running system; run: reboot")
    elif not nvml.endswith(version):
        text = f"NVML {nvml} is not of driver {version}"
        yield Finding(
            "driver",
            "problem",
            text,
            "another libnvidia-ml.so.1 is found before its own; run: ldconfig -p | grep nvidia-ml",
        )
    else:
        yield Finding("driver", "ok", f"{version}, NVML {nvml}")


def mig_mode(
    gpus: Sequence[Gpu],
    settings: Settings,
    users: Mapping[str, Collection[int]],
    root: Path,
    sysfs: Path,
    version: str = "",
) -> Iterator[Finding]:
    """Each managed GPU can be partitioned, and if not, who blocks it; `users` are pids by GPU as NVML lists them.

    `version` is the driver's.
    """
    good = 0
    for gpu in gpus:
        name = f"GPU {gpu.index} ({gpu.uuid})"
        if not settings.manages(gpu) or gpu.trouble.startswith("fenced"):
            continue
        if has_no_mig(gpu):
            needed = _too_old(gpu, version)
            if needed:
                text = f"{name} has no MIG with driver {version}: an {gpu.model} has it since {needed}"
                yield Finding("MIG mode", "problem", text, f"install driver {needed} or newer, then run: reboot")
            elif settings.managed != ("*",):
                yield Finding(
                    "MIG mode", "problem", f"{name} is managed, but {gpu.trouble}", without(settings, gpu.uuid)
                )
        elif gpu.mig_current is not gpu.mig_pending:
            blockers = _blockers(gpu, users.get(gpu.uuid, ()), root, sysfs)
            text = f"{name}: {gpu.trouble}; in its way: {', '.join(blockers) or 'nothing that shows'}"
            todo = f"end what is in its way, then run: nvidia-smi --gpu-reset -i {gpu.pci_bus_id}, or reboot the node"
            yield Finding("MIG mode", "problem", text, todo)
        elif gpu.mig_current is False:
            blockers = _blockers(gpu, users.get(gpu.uuid, ()), root, sysfs)
            in_use = f"; in use by {', '.join(blockers)}" if blockers else ""
            yield Finding(
                "MIG mode", "problem", f"{name}: {gpu.trouble}{in_use}", f"run: gres-mig enable-mig {gpu.uuid}"
            )
        elif gpu.trouble:
            # Of one that does not even tell its address nothing can be reset alone.
            reset = f"run: nvidia-smi --gpu-reset -i {gpu.pci_bus_id}, or reboot the node"
            reset = reset if gpu.pci_bus_id else "run: reboot"
            todo = reset if gpu.lost else "run: dmesg | grep -i nvrm"
            yield Finding("MIG mode", "problem", f"{name}: {gpu.trouble}", todo)
        else:
            good += 1
    if good:
        yield Finding("MIG mode", "ok", f"in force on {good} managed GPU{'s' * (good != 1)}")
    elif settings.managed == ("*",) and gpus and all(has_no_mig(gpu) for gpu in gpus):
        text = "all GPUs are managed, and none of them has MIG"
        yield Finding("MIG mode", "warning", text, f"to share them: slices in {settings.config_path}; docs/slices.md")


def capability_nodes(gpus: Sequence[Gpu], settings: Settings, root: Path) -> Iterator[Finding]:
    """The device files through which instances are used are there; the driver makes none, its tools do."""
    partitioned = [gpu for gpu in gpus if settings.manages(gpu) and gpu.mig_current]
    if not partitioned:
        return
    table = root / "proc/driver/nvidia-caps/mig-minors"
    if not table.is_file():
        text = f"MIG mode is on, but there is no {table}"
        yield Finding(
            "device files",
            "problem",
            text,
            "on the host, not in a container, run: gres-mig doctor; else reinstall the driver",
        )
        return
    missing = [node for gpu in partitioned for node in _nodes(gpu, root) if not os.path.exists(node)]
    if missing:
        text = f"{len(missing)} device file(s) of instances are missing, the first is {missing[0]}"
        yield Finding("device files", "problem", text, "run as root, it makes them: nvidia-smi -L")
    else:
        yield Finding("device files", "ok", "those of all instances are there")


def _too_old(gpu: Gpu, version: str) -> str:
    """The driver that it takes to have MIG on that board; empty where this one is no older."""
    for model, since in _MIG_SINCE:
        if version and re.search(model, f"{gpu.model} ") and _numbers(version) < since:
            return ".".join(f"{number:02}" for number in since)
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def _module_version(proc: Path, sysfs: Path) -> str:
    for file, pattern in ((sysfs / "module/nvidia/version", r"\d[\d.]+"),
                          (proc / "driver/nvidia/version", r"\b\d{3}\.\d[\d.]*")):  # fmt: skip
        try:
            found = re.search(pattern, file.read_text())
        except OSError:
            continue
        if found:
            return found[0]
    return ""


def _blockers(gpu: Gpu, users: Collection[int], root: Path, sysfs: Path) -> list[str]:
    """A monitoring agent that only opened the GPU is in no list of NVML, so /proc is asked as well."""
    card = machine.device_nodes(gpu.minor, -1, (), str(root))[0]
    pids = {*users, *(process.pid for process in machine.holders([card]))}
    modules = [f"kernel module {name}" for name in _MODULES if (sysfs / "module" / name).is_dir()]
    return [*(machine.describe(pid) for pid in sorted(pids)), *modules]


def _nodes(gpu: Gpu, root: Path) -> Iterator[str]:
    for instance in gpu.instances:
        computes = (compute.id for compute in instance.compute_instances)
        yield from machine.device_nodes(gpu.minor, instance.id, computes, str(root))

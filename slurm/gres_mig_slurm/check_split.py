"""Checks that no GPU of a node is in both: given out whole as gres/gpu, and in parts as migmem or to notebooks.

It is read from the files alone, so that it can be said while no daemon runs.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Sequence

from gres_mig.doctor import Finding
from gres_mig.models import Gpu, Settings
from gres_mig_slurm import conf_lines
from gres_mig_slurm.conf_lines import Conf, Line

_WHOLE = ("gpu", "shard", "mps")
"""What Slurm makes of whole GPUs; shard and mps without a file are of the same ones as gpu."""
_FILES = ("File", "MultipleFiles")


def on_this_node(conf_path: str, settings: Settings, gpus: Sequence[Gpu], node: str = "") -> Iterator[Finding]:
    """What `split` finds in the files beside that slurm.conf; `node` is its name, where that is not its host's."""
    slurm = conf_lines.read(conf_path, lenient=True)
    etc = os.path.dirname(conf_path)
    gres, cgroup = (conf_lines.read(os.path.join(etc, name), lenient=True) for name in ("gres.conf", "cgroup.conf"))
    names = (node,) if node else conf_lines.nodes_of(slurm, socket.gethostname())
    for name in names:
        yield from split(slurm, gres, cgroup, name, settings, gpus)


def split(
    slurm: Conf, gres: Conf, cgroup: Conf, node: str, settings: Settings, gpus: Sequence[Gpu]
) -> Iterator[Finding]:
    """What keeps a node's GPUs from being split for certain, with the line to change."""
    managed = {gpu.minor: gpu for gpu in gpus if settings.manages(gpu)}
    lines = [line for line in gres.lines if _is_of(line, node)]
    whole = [line for line in lines if (line.get("Name") or "").lower() in _WHOLE]
    detecting = _detecting(lines)
    counted = _counted(slurm, node)
    found = False
    if not managed:
        return
    if detecting:
        found = True
        value = detecting.get("AutoDetect")
        text = f"{detecting.where} has AutoDetect={value}: it finds the managed GPUs of {node} as well"
        yield Finding(
            "split", "problem", text, f"{detecting.where}: {detecting.with_value('AutoDetect', 'off').strip()}"
        )
    for line in whole:
        if both := _minors(line) & managed.keys():
            found = True
            named = ", ".join(managed[minor].uuid for minor in sorted(both))
            text = f"{line.where} gives out {_named(both)}, which gres-mig manages: {named}"
            yield Finding("split", "problem", text, f"{line.where}: {_without(line, managed)}")
    if counted and not detecting and not any(_files(line) for line in whole):
        found = True
        text = f"{node} has {counted}, but {gres.path} does not say which device files these are"
        left = ",".join(f"/dev/nvidia{gpu.minor}" for gpu in gpus if gpu.minor not in managed) or "/dev/nvidia0"
        yield Finding("split", "problem", text, f"{gres.path}: NodeName={node} Name=gpu File={left}")
    given = set().union(*(_minors(line) for line in whole))
    if not found and given and _numbers_anew(slurm, cgroup) and min(managed) < max(given):
        found = True
        yield _misnumbered(settings, managed, given, gpus)
    if not found and given:
        yield Finding("split", "ok", f"gres/gpu of {node} has {_named(given)}, gres-mig has {_named(managed)}")


def _misnumbered(settings: Settings, managed: dict[int, Gpu], given: set[int], gpus: Sequence[Gpu]) -> Finding:
    # Slurm numbers a job's own GPUs from 0 where it keeps the others from it, and it keeps from it only what gres.conf
    # names (common_gres_set_env in gres_common.c, 22.05 to 24.11): a managed GPU before them is that 0.
    text = (
        f"/dev/nvidia{min(managed)} is managed and comes before /dev/nvidia{max(given)} of gres/gpu: "
        "with ConstrainDevices=yes the CUDA_VISIBLE_DEVICES of a job with that one names the managed one"
    )
    last = sorted(gpu.minor for gpu in gpus)[-len(managed) :]
    wanted = ",".join(gpu.uuid for gpu in gpus if gpu.minor in last)
    todo = f"manage the last {len(managed)}, and name the others in gres.conf; run: gres-mig setup --gpus {wanted}"
    return Finding("split", "problem", text, todo)


def _is_of(line: Line, node: str) -> bool:
    named = line.get("NodeName")
    return named is None or node in conf_lines.hosts(named)


def _detecting(lines: Sequence[Line]) -> Line | None:
    """The line that has slurmd look for GPUs; what is said for the node goes before what is said for all."""
    said = [line for line in lines if line.get("AutoDetect")]
    of_node = [line for line in said if line.get("NodeName")]
    return next((line for line in (of_node or said) if (line.get("AutoDetect") or "").lower() != "off"), None)


def _counted(slurm: Conf, node: str) -> str:
    """The gres/gpu that slurm.conf gives the node, such as `gpu:a100:2`."""
    line = conf_lines.line_of(slurm, node)
    entries = ((line.get("Gres") if line else None) or "").split(",")
    return ",".join(entry for entry in entries if entry.partition(":")[0].lower() == "gpu")


def _numbers_anew(slurm: Conf, cgroup: Conf) -> bool:
    return "cgroup" in slurm.value("TaskPlugin").lower() and cgroup.value("ConstrainDevices").lower() == "yes"


def _files(line: Line) -> tuple[str, ...]:
    return tuple(file for key in _FILES for file in conf_lines.hosts(line.get(key) or ""))


def _minors(line: Line) -> set[int]:
    return {int(match[1]) for file in _files(line) if (match := re.fullmatch(r".*/nvidia(\d+)", file))}


def _without(line: Line, managed: dict[int, Gpu]) -> str:
    """The line as it has to be; a comment where nothing is left of it."""
    key = next(key for key in _FILES if line.get(key))
    gone = {f"/dev/nvidia{minor}" for minor in managed}
    left = [file for file in _files(line) if file not in gone]
    # The capability nodes of a static instance are nothing without its GPU.
    if key == "MultipleFiles" or not left:
        return f"#{line.raw.strip()}"
    return line.with_value(key, ",".join(left)).strip()


def _named(minors: set[int] | dict[int, Gpu]) -> str:
    return ", ".join(f"/dev/nvidia{minor}" for minor in sorted(minors))

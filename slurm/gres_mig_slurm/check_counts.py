"""Checks of what nodes count: slurm.conf, the sizes that the submit script knows, and the GPUs that are there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from gres_mig.deadline import operate
from gres_mig.doctor import Finding
from gres_mig.errors import GresMigError
from gres_mig.models import Settings
from gres_mig_slurm import (
    check_gates,
    check_split,
    conf_lines,
    gate_lines,
    profiles,
    running,
    setup,
    sizes_file,
    wanted,
)
from gres_mig_slurm.conf_lines import Conf
from gres_mig_slurm.profiles import NodeType
from gres_mig_slurm.running import Cluster


def counts(cluster: Cluster) -> Iterator[Finding]:
    """Some node has migmem, every one what some type of node has, and slurmd everywhere says the same."""
    counted = {
        name: mib
        for name, node in cluster.nodes.items()
        if not gate_lines.is_placeholder(name) and (mib := wanted.counted_mib(node.get("Gres", ""))) is not None
    }
    if not counted:
        lines = (line for line in cluster.conf.of_kind("NodeName") if wanted.counted_mib(line.get("Gres") or ""))
        line = next(lines, None)
        todo = f"{line.where} says so already; {running.RESTART}" if line else "run: gres-mig slurm setup --write"
        yield Finding("counts", "problem", "no node of this cluster has migmem", todo)
        return
    for name in counted:
        state, reason = cluster.nodes[name].get("State", ""), cluster.nodes[name].get("Reason", "")
        if "INVALID_REG" in state:
            text = f"{name} is {state}: its slurmd reports another count than slurm.conf has"
            todo = f"on {name} run: systemctl restart slurmd; then: scontrol update nodename={name} state=resume"
            yield Finding("counts", "problem", text, todo)
        elif "DRAIN" in state and ("migmem" in reason or reason.startswith("gres-mig:")):
            text = f"{name} is {state}: {reason}"
            yield Finding("counts", "problem", text, f"run: scontrol update nodename={name} state=resume")
    try:
        types = _types(cluster)
    except GresMigError as error:
        yield Finding("sizes", "problem", error.message, error.hint)
        return
    if types is None:
        return
    known = {kind.count_mib for kind in types}
    for name, mib in counted.items():
        if mib not in known and name != cluster.here:
            text = f"{name} counts {mib:,} MiB, as no type of node in {sizes_file.FILE_NAME} does"
            yield Finding("counts", "warning", text, f"on {name} run: gres-mig slurm check")
    real = sum(not gate_lines.is_placeholder(name) for name in cluster.nodes)
    yield Finding("counts", "ok", f"{len(counted)} of {real} nodes have migmem")


def this_node(cluster: Cluster, gres: Conf, settings: Settings) -> Iterator[Finding]:
    """This node counts what its GPUs give, none of them is given out twice, and the submit script knows its type."""
    here = cluster.here
    if here not in cluster.nodes:
        return
    now = cluster.nodes[here].get("Gres", "")
    mib = wanted.counted_mib(now)
    if not settings.manages_any:
        if mib is not None:
            text = f"{here} counts {mib:,} MiB, but none of its GPUs is managed"
            yield Finding("this node", "problem", text, "run: gres-mig setup --write")
        return
    try:
        mine = profiles.of_this_node(settings)
        gpus = operate(settings, lambda allocator: allocator.look(everything=True))
    except GresMigError as error:
        yield Finding("this node", "problem", error.message, error.hint)
        return
    types = None
    # That it is damaged is told with the counts.
    with suppress(GresMigError):
        types = _types(cluster)
    if mib == mine.count_mib:
        yield Finding("this node", "ok", f"{here} counts {mib:,} MiB")
    else:
        said = "no migmem" if mib is None else f"{mib:,} MiB"
        text = f"{here} counts {said}, its GPUs give {mine.count_mib:,} MiB"
        todo = cluster.node_todo(here, "Gres", lambda gres: wanted.node_gres(gres, mine.count_mib), now)
        yield Finding("this node", "problem", text, todo)
    if types is not None and not any((kind.boards, kind.admission) == (mine.boards, mine.admission) for kind in types):
        text = f"{_sizes(cluster)} has no node like this one ({mine.name}, admission by {mine.admission})"
        yield Finding("sizes", "problem", text, "run: gres-mig slurm profiles --write")
    elif types is not None:
        yield Finding("sizes", "ok", _sizes(cluster))
    if mine.admission == "gates":
        yield from check_gates.gates(cluster, mine, settings)
    else:
        yield from check_gates.none(cluster)
    cgroup = conf_lines.read(os.path.join(cluster.etc, "cgroup.conf"), lenient=True)
    yield from check_split.split(cluster.conf, gres, cgroup, here, settings, gpus)


def _sizes(cluster: Cluster) -> str:
    return os.path.join(cluster.etc, sizes_file.FILE_NAME)


def _types(cluster: Cluster) -> tuple[NodeType, ...] | None:
    """The types that the submit script knows; None on a machine where it need not be."""
    path = _sizes(cluster)
    if not os.path.exists(path) and not cluster.is_controller:
        return None
    return setup.known_sizes(path).types

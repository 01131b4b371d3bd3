"""Checks of what gates need: this node's features, and placeholders for it wherever its jobs may wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gres_mig import presence
from gres_mig.doctor import Finding
from gres_mig.models import Settings
from gres_mig.service import systemd
from gres_mig_slurm import check_files, conf_lines, gate_lines, openings, setup
from gres_mig_slurm.profiles import NodeType
from gres_mig_slurm.running import Cluster

RELOAD = "run: gres-mig reload; without gres-mig.service: gres-mig serve --once"
_SETUP = "run: gres-mig slurm setup --write; then restart slurmd on every node, then slurmctld"


def gates(cluster: Cluster, mine: NodeType, settings: Settings) -> Iterator[Finding]:
    """This node's sizes are features that slurmctld knows, a closed one lets jobs wait instead of being refused, and
    somebody closes them again when slurmctld has opened all."""
    wrong = [*_features(cluster, mine), *_placeholders(cluster, mine), *_service(settings)]
    yield from wrong
    yield from check_files.submit_script(cluster, setup.GATES_LUA)
    if plugins := cluster.value("NodeFeaturesPlugins"):
        text = f"NodeFeaturesPlugins={plugins}: what it reports of a node may open gates until they are told again"
        yield Finding("gates", "warning", text, "watch: scontrol show node, ActiveFeatures")
    if not wrong:
        yield Finding("gates", "ok", f"{cluster.here} has a feature for each of its sizes, and placeholders")


def _features(cluster: Cluster, mine: NodeType) -> Iterator[Finding]:
    missing = set(gate_lines.features(mine)) - _words(cluster.nodes[cluster.here], "AvailableFeatures")
    if missing:
        line = conf_lines.line_of(cluster.conf, cluster.here)
        key = "Features" if line and line.get("Features") is not None else "Feature"
        text = f"{cluster.here} has no feature {', '.join(sorted(missing))}: jobs that need one are refused"
        todo = cluster.node_todo(cluster.here, key, lambda now: gate_lines.node_features(now, mine), "")
        yield Finding("gates", "problem", text, todo)


def _placeholders(cluster: Cluster, mine: NodeType) -> Iterator[Finding]:
    """In each partition of this node some node that is down has all that a job may ask of it."""
    here = cluster.nodes[cluster.here]
    needed = _words(here, "AvailableFeatures") | set(gate_lines.features(mine))
    all_of_them = {name: node for name, node in cluster.nodes.items() if gate_lines.is_placeholder(name)}
    for partition in sorted(_words(here, "Partitions")):
        there = (node for node in all_of_them.values() if partition in _words(node, "Partitions"))
        if not any(needed <= _words(node, "ActiveFeatures") for node in there):
            text = f"no placeholder in partition {partition} has all of {here['NodeName']}'s features"
            yield Finding("gates", "problem", f"{text}: a closed gate refuses jobs", _SETUP)
    for name, node in all_of_them.items():
        if not node.get("State", "").startswith("DOWN"):
            todo = f"run: scontrol update nodename={name} state=down reason=placeholder"
            yield Finding("gates", "problem", f"{name} is {node.get('State')}, though it is no machine", todo)


def _service(settings: Settings) -> Iterator[Finding]:
    running = presence.running(settings.run_dir)
    if running is None:
        text = f"{systemd.NAME} does not run here: a restart of slurmctld opens all gates, and nobody closes them again"
        yield Finding("gates", "problem", text, f"run: systemctl enable --now {systemd.NAME}")
    elif presence.is_outdated(running):
        text = f"{systemd.NAME} goes by a configuration that has changed since"
        yield Finding("gates", "problem", text, RELOAD)


def none(cluster: Cluster) -> Iterator[Finding]:
    """No gate was left closed when `admission` was set back to count."""
    here = cluster.nodes[cluster.here]
    ours = {name for name in _words(here, "AvailableFeatures") if name.startswith(openings.PREFIX)}
    if closed := ours - _words(here, "ActiveFeatures"):
        text = f"{cluster.here} goes by the count, and jobs wait behind {', '.join(sorted(closed))}"
        yield Finding("gates", "problem", text, RELOAD)


def _words(node: Mapping[str, str], key: str) -> set[str]:
    return {word for word in node.get(key, "").split(",") if word not in ("", "(null)")}

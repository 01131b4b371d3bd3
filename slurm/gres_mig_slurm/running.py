"""What a running cluster says of itself, beside what its slurm.conf says here."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping

from gres_mig.values import Value
from gres_mig_slurm import conf_lines, controller, wanted
from gres_mig_slurm.conf_lines import Conf, Line

_FIELD = re.compile(r"([A-Za-z_]+)=(\S*)")
RESTART = "restart slurmd on every node, then slurmctld"
"""In this order, or slurmctld drains a node whose slurmd still counts less (22.05.8)."""


class Cluster(Value):
    """What the controller says of itself, and what this machine's slurm.conf says."""

    conf: Conf
    running: Mapping[str, str]
    """`scontrol show config`."""
    nodes: Mapping[str, Mapping[str, str]]
    """`scontrol show node`, by name."""
    here: str
    """This node's name; empty where this machine is none."""

    @property
    def etc(self) -> str:
        """The folder of slurm.conf."""
        return os.path.dirname(self.conf.path)

    @property
    def is_controller(self) -> bool:
        """Whether slurmctld runs on this machine."""
        host = _short(socket.gethostname())
        return any(_short(value.partition("(")[0]) == host for value in self.values("SlurmctldHost"))

    def value(self, key: str) -> str:
        """What is in force of that key; of several values the first."""
        return next(iter(self.values(key)), "")

    def values(self, key: str) -> tuple[str, ...]:
        """All that is in force of a key of which there can be several: in 24.11 also of Prolog and Epilog."""
        # `SlurmctldHost[0]        = ctl(10.0.0.1)`
        found = (value for name, value in self.running.items() if name.partition("[")[0] == key.lower())
        return tuple(value for value in found if value not in ("", "(null)", "N/A"))

    def todo(self, key: str, needed: Callable[[str], str]) -> str:
        """What makes that key be in force as it is needed; `needed` says that of what the file has."""
        line = self.conf.setting(key)
        return self._todo(line, key, needed, "" if line else self.value(key))

    def node_todo(self, node: str, key: str, needed: Callable[[str], str], now: str) -> str:
        """What makes that key of a node be as it is needed; `now` is what the controller says of it."""
        return self._todo(conf_lines.line_of(self.conf, node), key, needed, now)

    def _todo(self, line: Line | None, key: str, needed: Callable[[str], str], now: str) -> str:
        said = line.get(key) if line else None
        if line and said and wanted.is_same(said, needed(said)):
            return f"{line.where} says so already; {RESTART}"
        return f"{line.where if line else self.conf.path}: {key}={needed(said or now)}"


def look(conf_path: str, node: str = "") -> Cluster:
    """The cluster now; `node` is this machine's name, where it is several nodes or has another name than its host."""
    conf = conf_lines.read(conf_path)
    names = conf_lines.nodes_of(conf, socket.gethostname())
    here = node or os.environ.get("SLURMD_NODENAME", "") or (names[0] if len(names) == 1 else "")
    running = {}
    for line in controller.shown("config").splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith(" "):
            running[key.strip().lower()] = value.strip()
    nodes = {}
    for line in controller.shown("node").splitlines():
        fields = dict(_FIELD.findall(line))
        if reason := re.search(r" Reason=(.*?)(?: \[\S+@\S+\]|$)", line):
            fields["Reason"] = reason[1]
        nodes[fields.get("NodeName", "")] = fields
    return Cluster(conf, running, nodes, here)


def _short(host: str) -> str:
    return host.partition(".")[0]

"""A real cluster whose nodes have gates: slurm.conf is what setup's own lines make of it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from slurm_cluster import HOOKS, Cluster

from gres_mig import config
from gres_mig.models import Settings
from gres_mig_slurm import conf_lines, gate_lines, profiles, setup, sizes_file
from gres_mig_slurm.profiles import NodeType, Sizes


class Gated(Cluster):
    """All nodes have gates but those `by_count`; `site` are features of their own, by node.

    Slurm counts `times` as much as there is, so that only gates keep a job without a place from starting.
    """

    def __init__(
        self,
        boards: Mapping[str, Any],
        *,
        site: Mapping[str, str] | None = None,
        by_count: tuple[str, ...] = (),
        times: int = 1,
        **more: Any,
    ) -> None:
        self.site, self.by_count, self._times = site or {}, by_count, times
        more["config"] = f'admission = "gates"\n{more.get("config", "")}'
        super().__init__(boards, priced=True, **more)

    def settings(self, node: str) -> Settings:
        """A node's settings as they are now."""
        return config.load(self.gpus(node) / "config.toml")

    def kind(self, node: str) -> NodeType:
        """What a node is to the submit script."""
        return profiles.of_this_node(self.settings(node), name=node, nodes=node)

    def active(self, node: str) -> set[str]:
        """The features of a node that are active now."""
        return {word for word in self.node(node)["ActiveFeatures"].split(",") if word not in ("", "(null)")}

    def wait_active(self, node: str, *names: str) -> None:
        """Until exactly these are."""
        self.until(lambda: self.active(node) == set(names), f"{names} active on {node}")

    def assert_healthy(self) -> None:
        """No machine is drained, down or has a reason against it, and no job is held."""
        assert {self.node(name)["Reason"] for name in self.nodes} == {""}
        held = self.run("squeue", "-h", "-t", "PD", "-o", "%A %r", user="root").stdout
        assert "held" not in held.lower()

    def wait_up(self) -> None:
        """Until the controller answers and no machine is without its slurmd."""

        def up() -> bool:
            states = self.node_states()
            return all(states.get(name, "*")[-1] != "*" for name in self.nodes)

        self.until(up, "the cluster up again", within=20)

    def _price(self) -> None:
        for name in self.by_count:
            file = self.gpus(name) / "config.toml"
            file.write_text(file.read_text().replace('admission = "gates"\n', ""))
        types = [self.kind(name) for name in self.nodes]
        self._counts = {each.nodes: each.count_mib * self._times for each in types}
        sizes = sizes_file.render(Sizes(tuple(types), placeholders=gate_lines.USUAL))
        (self.conf.parent / sizes_file.FILE_NAME).write_text(sizes)
        shutil.copy(HOOKS / setup.GATES_LUA, self.conf.parent / setup.GATES_LUA)
        self._given["lua"] = (HOOKS / setup.LUA).read_text()

    def _slurm_conf(self) -> str:
        text = super()._slurm_conf()
        for node, features in self.site.items():
            text = text.replace(f"NodeName={node} ", f"NodeName={node} Feature={features} ")
        for node in self.nodes:
            kind = self.kind(node)
            if kind.admission == "gates":
                self.conf.write_text(text)
                conf = conf_lines.read(str(self.conf))
                plan = gate_lines.plan(conf, [node], kind, {})
                added = (line.replace(f"migmem:{kind.count_mib}", f"migmem:{self._count(node)}") for line in plan.added)
                text = "".join([conf_lines.changed(conf, plan.changes)[conf.path], *(f"{line}\n" for line in added)])
        return text

    def _all_idle(self) -> bool:
        states = self.node_states()
        return [states.get(name) for name in self.nodes] == ["idle"] * len(self.nodes)

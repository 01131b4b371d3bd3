"""`gres-mig slurm setup` and `check` with gates: what is written makes jobs wait, and what is missing is told."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gpus import SETTINGS, gpu
from slurm_cluster import require_slurm
from test_slurm_setup import Bare

from gres_mig import config_schema, config_text, presence
from gres_mig.simulator.program import command, environment
from gres_mig.values import replace
from gres_mig_slurm import admission, check_gates, conf_lines, gate_lines, running
from gres_mig_slurm.profiles import node_type

require_slurm()

FEATURES = "migmem-24192,migmem-24192-try,migmem-48512,migmem-48512-try,migmem-97280,migmem-97280-try"
WHOLE = "--gres=migmem:90000"


class Site(Bare):
    """A cluster without migmem whose n1, with a feature of the site's own, is in two partitions."""

    def __init__(self) -> None:
        super().__init__(config="aged = 600  # of ours")

    @property
    def config(self) -> Path:
        return self.gpus("n1") / "config.toml"

    def _slurm_conf(self) -> str:
        text = super()._slurm_conf().replace("NodeName=n1 ", "NodeName=n1 Features=fast ")
        return f"{text}PartitionName=other Nodes=ALL\nPartitionName=third Nodes=n1\nPartitionName=cpu Nodes=cpu1\n"

    def _all_idle(self) -> bool:
        states = self.node_states()
        return [states.get(name) for name in self.nodes] == ["idle"] * len(self.nodes)

    def wait_up(self) -> None:
        self.until(self._all_idle, "the cluster up again", within=20)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site() as cluster:
        before = cluster.config.read_text()
        cluster.config.write_text(f'{before}admission = "gates"\n')
        cluster.before = cluster.findings()  # type: ignore[attr-defined]
        cluster.config.write_text(before)
        assert cluster.command("setup", "--write").code == 0
        cluster.restart()
        with service(cluster):
            yield cluster


@contextmanager
def service(site: Site) -> Iterator[None]:
    """`gres-mig serve` on n1, meanwhile."""
    process = subprocess.Popen(
        command("--config", str(site.config), "serve", "--no-socket"),
        env=environment(SLURM_CONF=str(site.conf), SLURMD_NODENAME="n1"),
    )
    try:
        site.until(lambda: presence.running(str(site.gpus("n1") / "run")), "the service running")
        yield
    finally:
        process.terminate()
        process.wait(20)


def test_what_setup_writes_for_gates_is_in_its_lines(site: Site) -> None:
    lines = site.conf.read_text().splitlines()
    (node,) = (line for line in lines if line.startswith("NodeName=n1 "))
    (placeholder,) = (line for line in lines if line.startswith("NodeName=migmem-full-"))
    nodes = dict(re.findall(r"^PartitionName=(\S+) Nodes=(\S+)", "\n".join(lines), re.MULTILINE))

    assert f"Features=fast,{FEATURES} " in node
    assert placeholder.startswith("NodeName=migmem-full-n1-[1-4] NodeAddr=127.0.0.1 Port=1 CPUs=32 RealMemory=24000 ")
    assert f"Gres=migmem:194560 Feature=fast,{FEATURES} State=DOWN " in placeholder
    assert nodes == {"main": "n1,cpu1,migmem-full-n1-[1-4]", "other": "ALL", "third": "n1,migmem-full-n1-[1-4]",
                     "cpu": "cpu1"}  # fmt: skip
    assert "placeholders 4" in (site.etc / "gres-mig-sizes.conf").read_text()


def test_to_write_again_changes_nothing(site: Site) -> None:
    again = site.command("setup", "--write", "--json")

    assert {file["state"] for file in again.plain["files"]} == {"unchanged"}


def test_a_job_waits_in_every_partition_while_all_gates_are_closed(site: Site) -> None:
    job = site.sbatch(WHOLE, "-pthird", script="sleep 300")
    site.wait(job, "RUNNING")
    other = site.sbatch(WHOLE, "-pother", script="sleep 300")
    site.wait(other, "RUNNING")
    site.until(lambda: site.node("n1")["ActiveFeatures"] == "fast", "all gates closed")
    waits = [site.sbatch(WHOLE, f"-p{name}") for name in ("main", "other", "third")]
    states = {site.wait(each, "PENDING")["Restarts"] for each in waits}
    site.cancel_all()

    assert states == {"0"}


def test_a_cluster_that_is_new_to_migmem_gets_gates_and_its_configuration_says_so(site: Site) -> None:
    lines = site.config.read_text().splitlines()

    assert lines[-2:] == [
        '# What keeps Slurm from starting jobs without a place: "count" or "gates".',
        'admission = "gates"',
    ]
    assert "aged = 600  # of ours" in lines
    assert "admission gates" in (site.etc / "gres-mig-sizes.conf").read_text()


def test_nothing_is_wrong_with_gates_that_setup_wrote(site: Site) -> None:
    assert site.findings() == []
    assert "1 of 2 nodes have migmem" in site.command("check").out


def test_what_gates_need_is_told_before_they_are_set_up(site: Site) -> None:
    gates = [finding for finding in site.before if finding["check"] == "gates"]  # type: ignore[attr-defined]
    partitions = [re.search(r"in partition (\w+)", finding["text"]) for finding in gates[1:-1]]

    assert gates[0]["text"].startswith("n1 has no feature migmem-24192, ")
    assert gates[0]["todo"].endswith(f": Features=fast,{FEATURES}")
    assert {found[1] for found in partitions if found} == {"main", "other", "third"}
    assert gates[-1]["todo"] == "run: systemctl enable --now gres-mig.service"


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("PartitionName=third Nodes=n1,migmem-full-n1-[1-4]", "PartitionName=third Nodes=n1", "in partition third"),
        (f"Features=fast,{FEATURES}", "Features=fast,migmem-24192", "n1 has no feature migmem-24192-try, "),
    ],
)
def test_what_is_wrong_with_gates_is_found(site: Site, old: str, new: str, text: str) -> None:
    before = site.conf.read_text()
    assert old in before
    site.conf.write_text(before.replace(old, new))
    try:
        site.restart()
        found = site.findings()
    finally:
        site.conf.write_text(before)
        site.restart()

    assert any(finding["check"] == "gates" and text in finding["text"] for finding in found), found


def test_a_placeholder_that_somebody_has_put_into_service_is_found(site: Site) -> None:
    name = "NodeName=migmem-full-n1-2"
    site.scontrol("update", name, "State=RESUME")
    (found,) = site.findings()
    site.scontrol("update", name, "State=DOWN", "Reason=placeholder")

    assert found["text"].startswith("migmem-full-n1-2 is ")
    assert found["todo"] == "run: scontrol update nodename=migmem-full-n1-2 state=down reason=placeholder"


def test_the_number_of_placeholders_that_a_site_wants_is_what_the_submit_script_goes_by(site: Site) -> None:
    before = site.conf.read_text()
    site.conf.write_text(before.replace("migmem-full-n1-[1-4]", "migmem-full-n1-[1-9]"))
    shown = site.command("setup", "--json").plain
    site.conf.write_text(before)
    texts = {file["path"].rpartition("/")[2]: file for file in shown["files"]}

    assert "placeholders 9\n" in texts["gres-mig-sizes.conf"]["text"]
    assert texts["slurm.conf"]["state"] == "unchanged"


def test_a_script_for_gates_of_another_version_is_found(site: Site) -> None:
    file = site.etc / "job_submit.gates.lua"
    text = file.read_text()
    file.write_text(f"{text}-- older\n")
    (found,) = site.findings()
    file.write_text(text)

    assert (found["check"], found["todo"]) == ("job_submit.gates.lua", "run: gres-mig slurm setup --write")


def test_gates_that_nobody_looks_after_are_found(site: Site) -> None:
    text = site.config.read_text()
    site.config.write_text(f"{text}# Changed.\n")
    (outdated,) = site.findings()
    site.config.write_text(text)
    told = site.gpus("n1") / "run" / presence.FILE
    kept = told.rename(told.with_suffix(".kept"))
    (alone,) = site.findings()
    kept.rename(told)

    assert (outdated["check"], outdated["todo"]) == ("gates", check_gates.RELOAD)
    assert (alone["check"], alone["todo"]) == ("gates", "run: systemctl enable --now gres-mig.service")


def test_gates_that_were_left_closed_are_found(site: Site) -> None:
    """By who goes by the count now."""
    with site.named():
        cluster = running.look(str(site.conf))
    left = {**cluster.nodes["n1"], "ActiveFeatures": "fast,migmem-24192"}
    none = replace(cluster, nodes={**cluster.nodes, "n1": {**left, "AvailableFeatures": "fast,migmem-24192"}})
    some = replace(cluster, nodes={**cluster.nodes, "n1": {**left, "AvailableFeatures": "fast,migmem-24192,migmem-1"}})

    assert list(check_gates.none(none)) == []
    (found,) = check_gates.none(some)
    assert found.text == "n1 goes by the count, and jobs wait behind migmem-1"


NEW = "ClusterName=lab\nNodeName=n1 CPUs=8\n"


@pytest.mark.parametrize(
    ("conf", "config", "is_chosen"),
    [
        (NEW, 'gpus = "*"\n', True),
        (NEW, 'gpus = "*"\n# admission = "count"\n', True),
        (NEW, 'admission = "count"\ngpus = "*"\n', False),
        (NEW, 'gpus = "*"\n[node.n1]\nadmission = "count"\n', False),
        (NEW, 'slices = "*"\n', False),
        (NEW.replace("n1", "n1 Gres=migmem:24000"), 'gpus = "*"\n', False),
        (f"{NEW}NodeName=n2 Gres=migmem:24000\nNodeName=migmem-full-n2-[1-4] State=DOWN\n", 'gpus = "*"\n', True),
        (f"{NEW}TopologyPlugin=topology/tree\n", 'gpus = "*"\n', False),
        (f"{NEW}NodeFeaturesPlugins=node_features/helpers\n", 'gpus = "*"\n', False),
        ("", 'gpus = "*"\n', False),
    ],
)
def test_gates_are_chosen_where_nobody_has_said_otherwise(
    tmp_path: Path, conf: str, config: str, *, is_chosen: bool
) -> None:
    file = tmp_path / "slurm.conf"
    if conf:
        file.write_text(conf)
    (tmp_path / "config.toml").write_text(config)
    managed = ("*",) if "gpus" in config else ()
    settings = replace(SETTINGS, config_path=str(tmp_path / "config.toml"), managed=managed)

    chosen = admission.chosen(conf_lines.read(str(file)), settings)

    assert (chosen is not None) == is_chosen
    assert chosen is None or config_schema.validate(chosen.text, settings).admission == "gates"


def test_the_line_that_chooses_stands_where_the_comment_showed_it_or_above_the_first_table(tmp_path: Path) -> None:
    """As `gres-mig setup` writes the file, and as a person does."""
    settings = replace(SETTINGS, config_path=str(tmp_path / "config.toml"), allowed={"NVIDIA A30": ("1g.6gb",)})
    written = config_text.render(settings)

    assert config_text.saying(written, "admission", "gates") == written.replace(
        '# admission = "count"', 'admission = "gates"'
    )
    assert config_text.saying('gpus = "*"\n\n[profiles]', "admission", "gates") == (
        'gpus = "*"\n\n# What keeps Slurm from starting jobs without a place: "count" or "gates".\n'
        'admission = "gates"\n[profiles]'
    )


def planned(tmp_path: Path, text: str, *nodes: str) -> tuple[list[str], list[str]]:
    """The lines of that slurm.conf as they become, and what is added to them."""
    file = tmp_path / "slurm.conf"
    file.write_text(text)
    conf = conf_lines.read(str(file))
    kind = node_type([gpu("a30")], replace(SETTINGS, admission="gates"))
    plan = gate_lines.plan(conf, nodes, kind, {})
    return conf_lines.changed(conf, plan.changes)[str(file)].splitlines(), list(plan.added)


A30 = "migmem-5952,migmem-5952-try,migmem-11968,migmem-11968-try,migmem-24000,migmem-24000-try"


def test_what_a_site_says_for_all_nodes_stays_true_of_each(tmp_path: Path) -> None:
    text = "NodeName=DEFAULT CPUs=8 Feature=fast Gres=foo:2\nNodeName=n[1-2]\nNodeName=n3 Feature=slow\n"
    lines, added = planned(tmp_path, text, "n1", "n2")

    assert lines[1:] == [f"NodeName=n[1-2] Feature=fast,{A30}", "NodeName=n3 Feature=slow"]
    assert added[0].startswith(
        "NodeName=migmem-full-n1-[1-4] NodeAddr=127.0.0.1 Port=1 CPUs=8 Gres=foo:2,migmem:24000 "
    )
    assert f" Feature=fast,{A30} " in added[0]


def test_a_partition_gets_those_placeholders_that_it_has_not(tmp_path: Path) -> None:
    text = (
        f"NodeName=n1 Feature={A30}\nNodeName=migmem-full-n1-[1-3] Gres=migmem:24000 Feature={A30}\n"
        "PartitionName=some Nodes=n1,migmem-full-n1-[1-2]\nPartitionName=all Nodes=ALL\n"
        "NodeSet=set Nodes=n1\nPartitionName=none Nodes=n9\n"
    )
    lines, added = planned(tmp_path, text, "n1")

    assert lines[2:4] == [
        "PartitionName=some Nodes=n1,migmem-full-n1-[1-2],migmem-full-n1-3",
        "PartitionName=all Nodes=ALL",
    ]
    assert added == []
    assert lines[:2] == text.splitlines()[:2]
    assert lines[5] == "PartitionName=none Nodes=n9"


def test_placeholders_are_called_so_that_they_are_known_again() -> None:
    assert gate_lines.is_placeholder("migmem-full-n1-3")
    assert not gate_lines.is_placeholder("n1")

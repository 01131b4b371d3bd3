"""`gres-mig setup`: what it shows, what it writes, what it never does."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Answer, here

from gres_mig import config, mounts
from gres_mig.commands import boot_unit
from gres_mig.errors import StateError
from gres_mig.simulator.admin import Node
from gres_mig.simulator.program import environment

RTX, L40, A30 = 0, 1, 2


class Cluster:
    """A node that manages nothing yet: an RTX PRO 6000, an L40, an A30; MIG is off."""

    def __init__(self, folder: Path) -> None:
        boards = ("--board", "rtx-pro-6000", "--board", "l40", "--board", "a30")
        assert here("simulate", "create", folder, *boards, "--managed", "none", "--mig", "off").code == 0
        self.folder, self.node = folder, Node(folder)
        self.node.configure(log="all")
        self.config, self.unit = folder / "config.toml", folder / "systemd" / boot_unit.NAME

    @property
    def uuids(self) -> tuple[str, ...]:
        return self.node.uuids

    @property
    def managed(self) -> tuple[str, ...]:
        return config.load(node=self.folder).managed

    def setup(self, *words: str) -> Answer:
        return here("--node", self.folder, "setup", *words)

    def files(self) -> dict[str, str]:
        """All that is in its folder, but for what each look writes."""
        there = (path for path in self.folder.rglob("*") if path.is_file() and "run" not in path.parts)
        return {str(path): path.read_text() for path in there if path.name != "calls.jsonl"}

    def copies(self) -> list[Path]:
        return sorted(self.folder.glob("config.toml.bak-*"))


@pytest.fixture
def cluster(memory: Path) -> Cluster:
    """The node to be set up."""
    return Cluster(memory / "node")


@pytest.fixture
def nobody() -> Iterator[None]:
    """Not root, for the time of a test."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    yield
    os.setresuid(0, 0, 0)


@pytest.mark.parametrize("words", [[], ["--dry-run"], ["--gpus", "*", "--mig-at-boot"]])
def test_without_write_all_is_shown_and_nothing_is_changed(cluster: Cluster, words: list[str]) -> None:
    before = cluster.files()

    answer = cluster.setup(*words)

    assert answer.code == 0
    assert cluster.files() == before
    assert f"{cluster.config}: would be written" in answer.out
    assert f"{cluster.unit}: would be written" in answer.out
    assert "ExecStart=" in answer.out
    assert re.search(r'^ +\+.*"GPU-|^ +\+gpus = "\*"', answer.out, re.MULTILINE)


def test_the_gpus_that_have_mig_are_managed_and_the_others_named_in_comments(cluster: Cluster) -> None:
    assert cluster.setup("--write").code == 0

    text = cluster.config.read_text()
    assert cluster.managed == (cluster.uuids[RTX], cluster.uuids[A30])
    assert re.search(rf'^    "{cluster.uuids[A30]}",  # GPU 2, NVIDIA A30$', text, re.MULTILINE)
    assert re.search(rf'^    # "{cluster.uuids[L40]}",  # GPU 1, NVIDIA L40$', text, re.MULTILINE)


def test_only_the_gpus_that_are_named_are_managed(cluster: Cluster) -> None:
    cluster.setup("--gpus", cluster.uuids[A30], "--write")

    assert cluster.managed == (cluster.uuids[A30],)


@pytest.mark.parametrize("digits", [8, 4, 0])
def test_a_gpu_is_named_by_pci_address_and_stored_by_uuid(cluster: Cluster, digits: int) -> None:
    address = cluster.node.hardware()["gpus"][A30]["pci"].lower()

    cluster.setup("--gpus", address[8 - digits :].removeprefix(":"), "--write")

    assert cluster.managed == (cluster.uuids[A30],)


def test_all_are_managed_where_a_star_is_said(cluster: Cluster) -> None:
    cluster.setup("--gpus", "*", "--write")

    assert cluster.managed == ("*",)


@pytest.mark.parametrize("named", ["GPU-0", "0", "", "nonsense", "{},"])
def test_what_is_no_gpu_of_this_node_is_refused(cluster: Cluster, named: str) -> None:
    before = cluster.files()

    answer = cluster.setup("--gpus", named.format(cluster.uuids[RTX]), "--write")

    assert answer.code == 2
    assert "is no GPU of this node" in answer.err
    assert cluster.files() == before


def test_a_board_without_mig_cannot_be_named(cluster: Cluster) -> None:
    answer = cluster.setup("--gpus", cluster.uuids[L40], "--write")

    assert answer.code == 2
    assert "no MIG" in answer.err
    assert cluster.managed == ()


def test_what_a_configuration_says_otherwise_stays_and_a_copy_is_kept(cluster: Cluster) -> None:
    cluster.config.write_text('# mine\ngpus = []\nplacement = "spread"\nreserve = "2G"\n')

    answer = cluster.setup("--mig-at-boot", "--write")

    settings = config.load(node=cluster.folder)
    (copy,) = cluster.copies()
    assert (settings.placement, settings.reserve_mib, settings.mig_at_boot) == ("spread", 2048, True)
    assert copy.read_text().startswith("# mine\n")
    assert f"{copy}: the configuration as it was" in answer.out


def test_managed_gpus_stay_managed_unless_others_are_named(cluster: Cluster) -> None:
    cluster.setup("--gpus", cluster.uuids[A30], "--write")
    cluster.setup("--mig-at-boot", "--write")
    kept = cluster.managed
    cluster.setup("--gpus", cluster.uuids[RTX], "--no-mig-at-boot", "--write")

    assert kept == (cluster.uuids[A30],)
    assert cluster.managed == (cluster.uuids[RTX],)


def test_what_is_there_already_is_not_written_again(cluster: Cluster) -> None:
    cluster.setup("--write")
    before, copies = cluster.files(), cluster.copies()

    answer = cluster.setup("--write")

    assert f"{cluster.config}: unchanged" in answer.out
    assert f"{cluster.unit}: unchanged" in answer.out
    assert (cluster.files(), cluster.copies()) == (before, copies)


def test_each_configuration_that_is_replaced_is_kept(cluster: Cluster) -> None:
    texts = []
    for words in (["--gpus", "*"], ["--mig-at-boot"], ["--no-mig-at-boot"]):
        texts.append(cluster.config.read_text())
        cluster.setup(*words, "--write")

    assert sorted(copy.read_text() for copy in cluster.copies()) == sorted(texts)


def test_a_configuration_that_says_nonsense_is_not_replaced(cluster: Cluster) -> None:
    cluster.config.write_text('placement = "spred"\n')

    answer = cluster.setup("--write")

    assert answer.code == 4
    assert f"{cluster.config}:1: placement" in answer.err
    assert cluster.config.read_text() == 'placement = "spred"\n'


def test_the_folder_of_the_records_is_its_owners_alone(cluster: Cluster) -> None:
    (cluster.folder / "state").chmod(0o755)

    shown, written = cluster.setup(), cluster.setup("--write")

    line = f"{cluster.folder / 'state'}: would be made, mode 0700"
    assert line in shown.out
    assert line.replace("would be ", "") in written.out
    assert (cluster.folder / "state").stat().st_mode & 0o777 == 0o700


def test_no_gpu_is_changed_and_the_commands_for_it_are_printed(cluster: Cluster) -> None:
    answer = cluster.setup("--gpus", "*", "--mig-at-boot", "--write")

    steps = re.findall(r"^next: (.*)$", answer.out, re.MULTILINE)
    assert [call for call in cluster.node.calls() if call["mutating"]] == []
    assert cluster.node.calls()
    assert steps == [
        f"gres-mig --node {cluster.folder} enable-mig {cluster.uuids[RTX]}",
        f"gres-mig --node {cluster.folder} enable-mig {cluster.uuids[A30]}",
    ]
    assert here(*shlex.split(steps[0])[1:]).code == 0


def test_the_command_it_shows_next_does_what_it_showed(cluster: Cluster) -> None:
    shown = cluster.setup("--gpus", cluster.uuids[A30], "--mig-at-boot", "--json").plain

    here(*shlex.split(shown["next"][0])[1:])

    assert cluster.setup("--gpus", cluster.uuids[A30], "--mig-at-boot", "--json").plain["files"] == [
        {**file, "state": "unchanged"} for file in shown["files"]
    ]
    assert config.load(node=cluster.folder).mig_at_boot


def test_a_node_that_manages_nothing_refuses_and_names_this_command(cluster: Cluster) -> None:
    ask = ("--node", cluster.folder, "allocate", "--owner", "manual:a", "--memory", "8000")
    refused = here(*ask)
    cluster.setup("--write")
    here("--node", cluster.folder, "enable-mig", cluster.uuids[RTX])

    assert refused.code == 4
    assert "no GPU of this node is managed; run: gres-mig setup" in refused.err
    assert here(*ask).code == 0


def test_dry_run_and_write_are_opposites(cluster: Cluster) -> None:
    assert cluster.setup("--dry-run", "--write").code == 2


def test_only_root_writes(memory: Path, nobody: None) -> None:
    file = memory / "config.toml"

    answer = here("--config", file, "setup", "--write")

    assert answer.code == 2
    assert "setup --write needs root" in answer.err


def test_a_simulated_node_is_its_makers_own(memory: Path, request: pytest.FixtureRequest) -> None:
    memory.chmod(0o755)
    cluster = Cluster(memory / "node")
    root = os.geteuid() == 0
    request.getfixturevalue("nobody")

    answer = cluster.setup("--write")

    # Who is not root made it himself.
    assert ("is not yours to change" in answer.err) == root
    assert answer.code == (2 if root else 0)


def test_the_unit_says_when_it_runs_and_for_how_long(cluster: Cluster) -> None:
    cluster.setup("--write")
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(cluster.unit)

    assert unit["Service"]["Type"] == "oneshot"
    assert unit["Service"]["TimeoutStartSec"] == "60"
    assert {"StartLimitIntervalSec", "StartLimitBurst"} <= set(unit["Unit"])
    assert "slurmd.service" in unit["Unit"]["Before"].split()
    assert "nvidia-persistenced.service" in unit["Unit"]["After"].split()
    # Ordering only: what is required by another unit could keep it from starting.
    assert not {"Requires", "BindsTo", "RequiredBy"} & {key for section in unit.values() for key in section}
    assert "systemctl" not in cluster.unit.read_text()
    assert cluster.unit.stat().st_mode & 0o777 == 0o644


def test_systemd_has_nothing_to_say_about_the_unit(cluster: Cluster) -> None:
    cluster.setup("--write")
    analyze = shutil.which("systemd-analyze")

    said = subprocess.run([analyze or "true", "verify", cluster.unit], capture_output=True, text=True, check=False)

    # Of the units it is ordered after some are not on every machine; systemd says nothing about those either.
    assert said.returncode == 0
    assert boot_unit.NAME not in said.stderr


def test_what_the_unit_runs_can_be_run_from_anywhere(cluster: Cluster, tmp_path: Path) -> None:
    cluster.setup("--write")
    (line,) = re.findall(r"^ExecStart=(.*)$", cluster.unit.read_text(), re.MULTILINE)

    done = subprocess.run(
        shlex.split(line), cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )

    assert os.path.isabs(shlex.split(line)[0])
    assert done.returncode == 0, done.stderr
    assert "settled 0 records" in done.stdout


def test_systemd_gets_odd_words_as_they_are() -> None:
    text = boot_unit.render(["--node", '/srv/a b/100%/$HOME/"x"\\'])

    assert r'--node "/srv/a b/100%%/$$HOME/\"x\"\\" boot' in text


MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:26 / /proc rw,nosuid - proc proc rw
40 22 0:45 / /home rw - nfs4 server:/home rw,vers=4.2
41 40 8:2 / /home/local rw - xfs /dev/sdb1 rw
42 22 0:46 / /var/lib/gres\040mig rw - lustre mgs@tcp:/fs rw
43 22 0:47 / /srv rw shared:9 master:2 - cifs //server/share rw
44 22 8:3 / /srv rw - ext4 /dev/sdc1 rw
45 22 0:50 / /scratch rw - fuse.sshfs host: rw
""".lstrip()


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc that says `MOUNTS`."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mountinfo").write_text(MOUNTS)
    return tmp_path


@pytest.mark.parametrize("folder", ["/home/alice/state", "/var/lib/gres mig/state", "/scratch/x"])
def test_records_on_a_network_file_system_are_refused(proc: Path, folder: str) -> None:
    with pytest.raises(StateError, match="network file system") as refused:
        mounts.refuse_a_network_file_system(folder, proc)

    assert refused.value.code == "CONFIG"


@pytest.mark.parametrize("folder", ["/var/lib/gres-mig", "/home/local/state", "/homeless", "/srv/state"])
def test_records_on_a_disk_of_the_node_are_fine(proc: Path, folder: str) -> None:
    mounts.refuse_a_network_file_system(folder, proc)

    assert mounts.file_system(folder, proc) in {"ext4", "xfs"}

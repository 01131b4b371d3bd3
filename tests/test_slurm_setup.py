"""`gres-mig slurm setup` and `check`: what is written runs a cluster, and what is wrong with one is told."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import Cluster, require_slurm

from gres_mig.errors import ConfigError
from gres_mig.values import replace
from gres_mig_slurm import check_counts, check_files, conf_lines, running, setup, wanted
from tests.command_line import Answer, here

require_slurm()

SITE_LUA = """\
function slurm_job_submit(job_desc, part_list, uid)
  job_desc.comment = "seen by the site"
  return slurm.SUCCESS
end
function slurm_job_modify(job_desc, job_rec, part_list, uid)
  return slurm.SUCCESS
end
return slurm.SUCCESS
"""


class Bare(Cluster):
    """A cluster that has never heard of migmem: n1 with two RTX PRO 6000, cpu1 with none."""

    def __init__(self, extra: str = "", config: str = 'admission = "count"') -> None:
        boards = {"n1": [("rtx-pro-6000", 2)], "cpu1": [("l40", 1)]}
        super().__init__(boards, hooks=False, prolog_flags="", extra=extra, config=config)

    @property
    def etc(self) -> Path:
        return self.conf.parent

    def command(self, *words: str) -> Answer:
        """`gres-mig slurm WORDS` on n1, with the Python that runs the tests, whoever may change that."""
        more = ("--any-python",) if words[0] == "setup" else ()
        with self.named():
            return here("--node", self.gpus("n1"), "slurm", *words, *more)

    @contextmanager
    def named(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(self.conf))
            patch.setenv("SLURMD_NODENAME", "n1")
            yield

    def findings(self) -> list[dict[str, Any]]:
        """What `gres-mig slurm check` finds that is not right."""
        answer = self.command("check", "--json")
        found: list[dict[str, Any]] = answer.plain["findings"]
        assert answer.code == (4 if answer.plain["problems"] else 0)
        return [finding for finding in found if finding["level"] != "ok"]

    def restart(self) -> None:
        """In the order that setup says."""
        for name in (*self.nodes, "slurmctld"):
            self.stop(name)
            self.start(name)
        self.wait_up()

    def _write_files(self) -> None:
        super()._write_files()
        (self.etc / "gres.conf").unlink()
        self.prepare()

    def prepare(self) -> None:
        """What the site does before the cluster comes up."""

    def _slurm_conf(self) -> str:
        lines = super()._slurm_conf().splitlines()
        kept = [line.replace(f" Gres=migmem:{self._count('n1')}", "") for line in lines if "GresTypes" not in line]
        return "\n".join(line.partition(" Gres=")[0] for line in kept) + "\n"


class Site(Bare):
    """A cluster with hooks, flags and a submit script of its own, set up for migmem before it comes up."""

    def prepare(self) -> None:
        folder = self.folder / "site"
        (folder / "prolog.d").mkdir(parents=True)
        (folder / "log").mkdir(mode=0o777)
        (folder / "log").chmod(0o777)
        for name in ("prolog.d/10.sh", "prolog.d/20.sh", "epilog.sh"):
            self._program(folder / name, f"echo {name} >>{folder}/log/$SLURM_JOB_ID")
        self._program(folder / "task_prolog.sh", "echo export SITE=yes")
        (self.etc / "job_submit.lua").write_text(SITE_LUA)
        with self.conf.open("a") as conf:
            conf.write(f"Prolog={folder}/prolog.d/*.sh # ours\nEpilog={folder}/epilog.sh\n")
            conf.write(f"TaskProlog={folder}/task_prolog.sh\nPrologFlags=Alloc\nJobSubmitPlugins=lua")
        self.shown = self.command("setup", "--dry-run")
        self.written = self.command("setup", "--write")

    def _program(self, path: Path, line: str) -> None:
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def job(site: Site) -> int:
    """A job with migmem that has run there."""
    job = site.sbatch("--gres=migmem:8000", script="echo mine=$CUDA_VISIBLE_DEVICES; echo site=$SITE")
    site.wait(job, "COMPLETED")
    site.wait_free()
    return job


def everything(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Each file below a folder: its mode, its time and what is in it."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            status = path.stat()
            found[str(path)] = status.st_mode, status.st_mtime_ns, path.read_bytes()
    return found


def test_a_job_runs_on_a_cluster_that_setup_wrote(site: Site, job: int) -> None:
    assert site.written.code == 0, site.written
    assert "gres-mig: 1g.24gb (24,192 MiB) for 8,000 MiB" in site.output(job)
    assert "mine=MIG-" in site.output(job)
    assert site.job(job)["TresPerNode"].endswith("migmem:24320")
    site.assert_healthy()


def test_the_sites_own_hooks_and_submit_script_go_on_working(site: Site, job: int) -> None:
    # Slurm runs what a pattern matches in reverse order.
    assert (site.folder / "site" / "log" / str(job)).read_text() == "prolog.d/20.sh\nprolog.d/10.sh\nepilog.sh\n"
    assert "site=yes" in site.output(job)
    assert "seen by the site" in site.scontrol("-o", "show", "job", str(job))


def test_a_node_without_gpus_runs_jobs_as_before(site: Site) -> None:
    job = site.sbatch("-wcpu1", script="echo plain")
    site.wait(job, "COMPLETED")

    assert site.output(job) == "plain\n"
    site.assert_healthy()


def test_to_write_again_changes_nothing(site: Site) -> None:
    before = everything(site.etc)

    again = site.command("setup", "--write", "--json")

    assert {file["state"] for file in again.plain["files"]} == {"unchanged"}
    assert again.plain["kept"] == []
    assert everything(site.etc) == before


def test_of_the_sites_files_a_copy_is_kept(site: Site) -> None:
    (copy,) = site.etc.glob("slurm.conf.bak-*")

    assert "migmem" not in copy.read_text()
    assert (site.etc / "job_submit.site.lua").read_text() == SITE_LUA


def test_nothing_is_wrong_with_a_cluster_that_setup_wrote(site: Site) -> None:
    assert site.findings() == []


def test_doctor_makes_the_same_checks(site: Site) -> None:
    with site.named():
        found = here("--node", site.gpus("n1"), "doctor", "--json").plain["findings"]

    assert {"PrologFlags", "hooks", "counts"} <= {finding["check"] for finding in found if finding["level"] == "ok"}


def rewrite(file: str, old: str, new: str) -> Callable[[Site], None]:
    """Put other words into a file in slurm.conf's folder."""

    def plant(site: Site) -> None:
        path = site.etc / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return plant


def add(file: str, line: str) -> Callable[[Site], None]:
    """Put a line at a file's end."""

    def plant(site: Site) -> None:
        path = site.etc / file
        path.write_text(f"{path.read_text()}{line}\n")

    return plant


def remove(file: str) -> Callable[[Site], None]:
    return lambda site: (site.etc / file).unlink()


def mode(file: str, bits: int) -> Callable[[Site], None]:
    return lambda site: (site.etc / file).chmod(bits)


@pytest.mark.parametrize(
    ("plant", "name", "text", "todo"),
    [
        (mode("gres-mig/prolog.sh", 0o644), "hooks", "prolog.sh is not executable", "chmod 0755"),
        (mode("gres-mig/epilog.sh", 0o775), "hooks", "can be written by others", "chmod go-w"),
        (mode("gres-mig", 0o777), "hooks", "can be written by others", "chmod go-w"),
        (lambda site: shutil.chown(site.etc / "gres-mig/epilog.sh", 5), "hooks", "belongs to uid 5", "chown root:root"),
        (remove("gres-mig/task_prolog.sh"), "hooks", "task_prolog.sh: No such file", "setup --write"),
        (add("gres-mig/prolog.sh", "# older"), "hooks", "prolog.sh is not the one of gres-mig", "setup --write"),
        (rewrite("gres-mig/gres-mig.env", "PYTHON=/", "PYTHON=/no"), "hooks", "names no Python", "setup --write"),
        (rewrite("gres-mig/gres-mig.env", "epilog.sh", "gone.sh"), "chain", "EPILOG_CHAIN", "correct it"),
        (add("gres.conf", "AutoDetect=nvml"), "split", "AutoDetect=nvml", "gres.conf:4: AutoDetect=off"),
        (add("gres.conf", "Name=gpu File=/dev/nvidia[1-2]"), "split", "/dev/nvidia1", "gres.conf:4: Name=gpu"),
        (rewrite("gres.conf", "CountOnly", "One_Sharing"), "gres.conf", "but a count", "Name=migmem Flags=CountOnly"),
        (remove("gres.conf"), "gres.conf", "has no line for migmem", "gres.conf: Name=migmem Flags=CountOnly"),
        (remove("gres-mig-sizes.conf"), "sizes", "has no node like this one", "slurm profiles --write"),
        (rewrite("gres-mig-sizes.conf", "24192", "24190"), "sizes", "has no node like this one", "slurm profiles"),
        (rewrite("gres-mig-sizes.conf", "format 1", "format 2"), "sizes", "not understood", "slurm profiles"),
        (rewrite("job_submit.lua", "gres-mig:1:", "other"), "job_submit.lua", "is not gres-mig's", "setup --write"),
        (add("job_submit.lua", "-- older"), "job_submit.lua", "of another version", "setup --write"),
        (mode("job_submit.site.lua", 0o666), "chain", "which others can write", "chmod go-w"),
        (remove("job_submit.lua"), "job_submit.lua", "No such file", "setup --write"),
    ],
)
def test_a_file_that_is_wrong_is_found(
    site: Site, tmp_path: Path, plant: Callable[[Site], None], name: str, text: str, todo: str
) -> None:
    kept = shutil.copytree(site.etc, tmp_path / "etc")
    try:
        plant(site)

        found = site.findings()
    finally:
        shutil.rmtree(site.etc / "gres-mig")
        shutil.copytree(kept, site.etc, dirs_exist_ok=True)

    assert [finding["check"] for finding in found] == [name], found
    assert found[0]["level"] == "problem"
    assert text in found[0]["text"]
    assert todo in found[0]["todo"]


def test_a_node_that_was_drained_by_us_is_found_until_it_is_resumed(site: Site) -> None:
    site.scontrol("update", "NodeName=n1", "State=DRAIN", "Reason=gres-mig: NVML: told by a test")
    (found,) = site.findings()
    site.scontrol("update", "NodeName=n1", "State=RESUME")

    assert (found["check"], found["level"]) == ("counts", "problem")
    assert found["text"].endswith(": gres-mig: NVML: told by a test")
    assert found["todo"] == "run: scontrol update nodename=n1 state=resume"


def test_a_name_that_no_node_has_is_refused(site: Site) -> None:
    answer = site.command("check", "--name", "n7")

    assert answer.code == 2
    assert answer.err == "gres-mig: this cluster has no node n7; its nodes: cpu1, n1\n"


def test_a_file_that_says_so_already_is_not_what_has_to_be_changed(site: Site) -> None:
    """What is in force is not what the file says: somebody has written it and restarted nothing."""
    counts = {name: {**node, "Gres": ""} for name, node in look_at(site).nodes.items()}
    written = replace(look_at(site), nodes=counts)

    (unknown,) = check_counts.counts(written)
    todo = written.node_todo("n1", "Gres", lambda gres: wanted.node_gres(gres, 194560), "")

    assert unknown.todo == todo
    assert todo.startswith(f"{site.conf}:")
    assert todo.endswith(" says so already; restart slurmd on every node, then slurmctld")


def look_at(site: Site) -> running.Cluster:
    """What check goes by."""
    with site.named():
        return running.look(str(site.conf))


def test_settings_that_are_wrong_are_found_with_the_line_to_change(site: Site) -> None:
    before = site.conf.read_text()
    wrong = {
        "PrologFlags=Alloc,Contain,DeferBatch": "PrologFlags=Alloc,Serial",
        "PrologEpilogTimeout=300": "PrologEpilogTimeout=20",
        "BatchStartTimeout=60": "BatchStartTimeout=10",
        ",nohold_on_prolog_fail": "",
        "JobSubmitPlugins=lua": "JobSubmitPlugins=require_timelimit",
        "Gres=migmem:194560": "Gres=migmem:195774",
        f"Prolog={site.etc}/gres-mig/prolog.sh": "Prolog=/bin/true",
    }
    text = before
    for right, other in wrong.items():
        assert right in text, right
        text = text.replace(right, other)
    site.conf.write_text(text)
    try:
        site.restart()

        todo = [finding["todo"] for finding in site.findings()]
    finally:
        site.conf.write_text(before)
        site.restart()

    numbers = {line.partition("=")[0]: number for number, line in enumerate(text.splitlines(), 1)}
    node = next(number for number, line in enumerate(text.splitlines(), 1) if line.startswith("NodeName=n1 "))
    where = {key: f"{site.conf}:{number}: {key}=" for key, number in numbers.items()}
    assert f"{where['PrologFlags']}Alloc,Serial,Contain,DeferBatch" in todo
    assert f"{where['PrologEpilogTimeout']}60" in todo
    assert f"{where['BatchStartTimeout']}60" in todo
    assert f"{where['JobSubmitPlugins']}require_timelimit,lua" in todo
    assert f"{where['Prolog']}{site.etc}/gres-mig/prolog.sh" in todo
    assert any(line.startswith(where["SchedulerParameters"]) and "nohold_on_prolog_fail" in line for line in todo)
    assert f"{site.conf}:{node}: Gres=migmem:194560" in todo
    # 24.11 has drained it for the count; and a slurmd that was just started again registers a moment later.
    site.scontrol("update", "NodeName=n1", "State=RESUME", check=False)
    site.until(lambda: site.findings() == [], f"nothing found, but {site.findings()}")


def test_a_running_cluster_changes_over_without_a_drained_node() -> None:
    with Bare() as cluster:
        running = cluster.sbatch("-wn1", script="while ! [ -e go ]; do sleep 0.1; done; echo done")
        cluster.wait(running, "RUNNING")
        before = {finding["check"] for finding in cluster.findings()}

        assert cluster.command("setup", "--write").code == 0
        cluster.restart()
        job = cluster.sbatch("--gres=migmem:2g.48gb", script="echo mine=$CUDA_VISIBLE_DEVICES")
        cluster.wait(job, "COMPLETED")
        (cluster.home / "go").touch()
        cluster.wait(running, "COMPLETED")

        assert {"PrologFlags", "GresTypes", "JobSubmitPlugins", "hooks", "gres.conf", "counts", "this node"} <= before
        assert "mine=MIG-" in cluster.output(job)
        assert cluster.output(running) == "done\n"
        assert cluster.findings() == []
        cluster.assert_healthy()
        cluster.stop("slurmctld")
        (silent,) = cluster.findings()
        assert silent["check"] == "slurmctld"


# Without daemons: what becomes of a slurm.conf.


@pytest.fixture
def etc(tmp_path: Path) -> Iterator[Path]:
    """The files of a cluster that is never brought up."""
    cluster = Bare()
    cluster._write_files()
    yield cluster.etc
    cluster.close()


def written(etc: Path, slurm_conf: str, *words: str) -> Answer:
    """`setup --write` on that slurm.conf, with the Python that runs the tests."""
    return written_by_python(etc, slurm_conf, "--any-python", *words)


def written_by_python(etc: Path, slurm_conf: str, *words: str) -> Answer:
    """The same, where it matters who may change that Python."""
    (etc / "slurm.conf").write_text(slurm_conf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURMD_NODENAME", "n1")
        return here("--node", etc.parent / "n1", "slurm", "setup", "--slurm-conf", etc / "slurm.conf", *words)


@pytest.mark.parametrize("bits", [0o1777, 0o775])
def test_a_python_that_others_can_change_is_not_written_down_for_root(
    etc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    folder.chmod(bits)
    monkeypatch.setattr(sys, "executable", str(folder / "bin" / "python"))
    conf = "ClusterName=lab\nNodeName=n1\n"

    shown = written_by_python(etc, conf)
    refused = written_by_python(etc, conf, "--write")

    assert shown.code == 0
    assert f"yours to decide: {folder} can be written by others" in " ".join(shown.out.split())
    assert refused.code == 4
    assert "can be written by others" in refused.err
    assert "/opt/gres-mig" in refused.err
    assert not (etc / "gres-mig").exists()


@pytest.mark.parametrize("named", ["prolog.d/*.sh", "prolog.d/10.sh"])
def test_a_site_hook_that_others_can_change_is_not_chained(etc: Path, tmp_path: Path, named: str) -> None:
    program = tmp_path / "prolog.d" / "10.sh"
    program.parent.mkdir(mode=0o755)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o775)
    conf = f"ClusterName=lab\nNodeName=n1\nProlog={tmp_path}/{named}\n"

    shown = written(etc, conf)
    refused = written(etc, conf, "--write")
    program.chmod(0o755)
    right = written(etc, conf, "--write")

    assert f"yours to decide: {program} can be written by others than root" in shown.out
    assert (refused.code, right.code) == (4, 0)
    assert f"would run the site's own {program}, but {program} can be written" in refused.err
    assert f"run: chmod go-w {program}" in refused.err


def test_a_python_that_others_can_change_is_found(etc: Path, tmp_path: Path) -> None:
    cluster = set_up(etc)
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    tmp_path.chmod(0o1777)
    env = etc / "gres-mig" / "gres-mig.env"
    env.write_text(
        env.read_text().replace("ANY_PYTHON=yes\n", "").replace(f"PYTHON={sys.executable}", f"PYTHON={python}")
    )

    found = [finding for finding in check_files.hooks(cluster) if str(tmp_path) in finding.text]

    assert [(finding.level, finding.todo) for finding in found] == [("problem", f"run: chmod go-w {tmp_path}")]


def test_a_folder_that_the_jobs_users_cannot_enter_is_found(etc: Path) -> None:
    cluster = set_up(etc)
    handover = Path(setup.assigned(str(etc / "gres-mig" / "gres-mig.env"))["HANDOVER"])
    handover.mkdir(parents=True, exist_ok=True)
    for folder in (etc / "gres-mig", handover.parent):
        folder.chmod(0o700)

    found = list(check_files.hooks(cluster))

    assert [finding.todo for finding in found if str(etc.parent) in finding.text] == [
        f"run: chmod a+x {etc / 'gres-mig'}",
        f"run: chmod a+x {handover.parent}",
    ]


def test_the_umask_of_who_sets_up_closes_no_folder(etc: Path) -> None:
    before = os.umask(0o077)
    try:
        set_up(etc)
    finally:
        os.umask(before)

    assert (etc / "gres-mig").stat().st_mode & 0o777 == 0o755
    assert (etc / "gres-mig" / "task_prolog.sh").stat().st_mode & 0o777 == 0o755


def set_up(etc: Path) -> running.Cluster:
    """What a cluster says of itself once it was set up and restarted."""
    written(etc, "ClusterName=lab\nNodeName=n1\n", "--write")
    in_force = {key.lower(): f"{etc}/gres-mig/{name}" for key, name in wanted.HOOKS.items()}
    return running.Cluster(conf_lines.read(str(etc / "slurm.conf")), in_force, {}, "n1")


def test_a_node_that_only_shares_its_gpus_is_counted_and_priced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, etc = tmp_path / "node", tmp_path / "etc"
    assert here("simulate", "create", node, "--board", "l40", "--driver", "615.10.04").code == 0
    (node / "config.toml").write_text('slices = "*"\nexperimental_driver_limit = true\n')
    etc.mkdir()
    (etc / "slurm.conf").write_text("ClusterName=lab\nNodeName=n1\n")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    words = ("slurm", "setup", "--write", "--any-python", "--slurm-conf", etc / "slurm.conf", "--json")

    files = here("--node", node, *words).plain["files"]

    (kind,) = setup.known_sizes(str(etc / "gres-mig-sizes.conf")).types
    (board,) = kind.boards
    assert (board.model, board.profiles, board.slice_overhead_mib) == ("NVIDIA L40", (), 0)
    assert f"NodeName=n1 Gres=migmem:{board.whole_mib}\n" in (etc / "slurm.conf").read_text()
    assert "gres-mig.service" in {os.path.basename(file["path"]) for file in files}


def test_a_dry_run_changes_nothing(etc: Path) -> None:
    before = everything(etc.parent)
    conf = (etc / "slurm.conf").read_text()

    for words in ((), ("--dry-run",), ("--node",), ("--controller",)):
        answer = written(etc, conf, *words)
        assert answer.code == 0, answer
        assert "would be written" in answer.out

    after = everything(etc.parent)
    # The file itself was written by this test.
    assert {path: (mode, text) for path, (mode, _, text) in after.items() if "/run/" not in path} == {
        path: (mode, text) for path, (mode, _, text) in before.items()
    }


def test_only_what_has_to_be_is_changed_in_slurm_conf(etc: Path) -> None:
    nodes = f"NodeName=n1 NodeHostname={socket.gethostname()}"
    conf = (
        "ClusterName=lab # mine\n"
        "GresTypes=gpu  # as it was\n"
        "PrologFlags=NoHold,X11\n"
        "PrologEpilogTimeout=100\n"
        f"NodeName=DEFAULT Gres=gpu:4\n{nodes} CPUs=4 \\\n  RealMemory=1000 # one\nNodeName=other\n"
    )

    written(etc, conf, "--write")

    assert (etc / "slurm.conf").read_text() == (
        "ClusterName=lab # mine\n"
        "GresTypes=gpu,migmem  # as it was\n"
        "PrologFlags=X11,Contain,DeferBatch\n"
        "PrologEpilogTimeout=100\n"
        f"NodeName=DEFAULT Gres=gpu:4\n{nodes} CPUs=4 \\\n  RealMemory=1000 Gres=gpu:4,migmem:194560  # one\n"
        "NodeName=other\n"
        "# BEGIN gres-mig: written by gres-mig slurm setup\n"
        f"Prolog={etc}/gres-mig/prolog.sh\nEpilog={etc}/gres-mig/epilog.sh\n"
        f"TaskProlog={etc}/gres-mig/task_prolog.sh\n"
        "BatchStartTimeout=60\nJobSubmitPlugins=lua\nSchedulerParameters=nohold_on_prolog_fail\n"
        "# END gres-mig\n"
    )


def test_a_line_in_an_included_file_is_changed_there(etc: Path) -> None:
    (etc / "nodes.conf").write_text("NodeName=n[1-2] CPUs=4 Gres=gpu:2,migmem:1 State=UNKNOWN\n")

    written(etc, "ClusterName=lab\nInclude nodes.conf\n", "--write")

    assert (etc / "nodes.conf").read_text() == "NodeName=n[1-2] CPUs=4 Gres=gpu:2,migmem:194560 State=UNKNOWN\n"
    assert "nodes n[1-2]\n" in (etc / "gres-mig-sizes.conf").read_text()


def test_a_line_of_nodes_that_are_not_alike_is_left_to_a_person(etc: Path) -> None:
    conf = "ClusterName=lab\nNodeName=n[1-3] CPUs=4\n"

    answer = written(etc, conf, "--write", "--nodes", "n[1-2]", "--json")

    (decide,) = answer.plain["decide"]
    assert "slurm.conf:2 is of n3 too" in decide
    assert "Gres=migmem:194560" in decide
    assert "NodeName=n[1-3] CPUs=4\n" in (etc / "slurm.conf").read_text()


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ("# Ansible managed\nClusterName=lab\nNodeName=n1\n", ()),
        ("ClusterName=lab\nNodeName=n1\n", ("--no-edit",)),
    ],
)
def test_a_slurm_conf_that_others_hand_out_is_shown_and_not_written(
    etc: Path, conf: str, words: tuple[str, ...]
) -> None:
    answer = written(etc, conf, "--write", *words)

    assert (etc / "slurm.conf").read_text() == conf
    assert f"{etc}/slurm.conf: yours to change:" in answer.out
    assert "+NodeName=n1 Gres=migmem:194560" in answer.out
    assert (etc / "gres-mig" / "prolog.sh").exists()


def test_a_node_learns_the_sites_own_hooks_from_a_slurm_conf_that_is_set_up(etc: Path) -> None:
    written(etc, "ClusterName=lab\nProlog=/usr/local/sbin/site_prolog\nNodeName=n1\n", "--write")
    shutil.rmtree(etc / "gres-mig")

    written(etc, (etc / "slurm.conf").read_text(), "--write", "--node")

    assert setup.assigned(str(etc / "gres-mig" / "gres-mig.env"))["PROLOG_CHAIN"] == "/usr/local/sbin/site_prolog"


def test_what_a_controller_sent_is_not_changed_on_the_node(etc: Path) -> None:
    sent = conf_lines.Conf(conf_lines.PATHS[1], {conf_lines.PATHS[1]: "ClusterName=lab\n"}, ())
    place = setup.Place(sent.path, "/usr/bin/python3", "config.toml", "state.json", "handover")

    files = setup.for_node(place, sent, {}).files
    shown = setup.for_controller(place, sent, ("n1",), None, edit=False).files

    assert {os.path.dirname(file.path) for file in files} == {"/etc/slurm/gres-mig"}
    assert {os.path.basename(file.path) for file in shown} >= {"slurm.conf", "gres.conf", "job_submit.lua"}
    assert not any(file.edit for file in shown)
    with pytest.raises(ConfigError, match="was sent by the controller"):
        setup.for_controller(place, sent, ("n1",), None, edit=True)


def test_the_units_start_before_slurmd(etc: Path) -> None:
    written(etc, "ClusterName=lab\nNodeName=n1\n", "--write")

    for name in ("gres-mig-boot.service", "gres-mig.service"):
        assert "slurmd.service" in (etc.parent / "n1" / "systemd" / name).read_text().partition("Before=")[2]


def test_another_type_of_node_is_added_to_the_sizes(etc: Path) -> None:
    written(etc, "ClusterName=lab\nNodeName=n1\n", "--write")
    sizes = etc / "gres-mig-sizes.conf"
    other = etc / "other.conf"
    other.write_text(sizes.read_text().replace("type 2x", "type 1x").replace("nodes n1", "nodes b[1-9]"))

    conf = ("--slurm-conf", etc / "slurm.conf")
    answer = here("--node", etc.parent / "n1", "slurm", "profiles", "--write", "--from", other, *conf)

    assert answer.code == 0
    assert [(kind.name[:2], kind.nodes) for kind in setup.known_sizes(str(sizes)).types] == [
        ("1x", "b[1-9]"),
        ("2x", "n1"),
    ]


def test_a_controller_without_gpus_is_set_up_for_one_type_of_node_after_the_other(etc: Path) -> None:
    """By what its sizes file knows of them."""
    written(etc, "ClusterName=lab\nNodeName=a[1-2]\nNodeName=b[1-9]\n", "--write", "--nodes", "a[1-2]")
    sizes = etc / "gres-mig-sizes.conf"
    one = sizes.read_text()
    other = one.replace("type 2x", "type 1x").replace("nodes a[1-2]", "nodes b[1-9]").replace("board 2 ", "board 1 ")
    sizes.write_text(one + other.partition("\n\n")[2])
    config = etc.parent / "none.toml"
    config.write_text("gpus = []\n")
    conf = "ClusterName=lab\nNodeName=a[1-2]\nNodeName=b[1-9]\n"
    (etc / "slurm.conf").write_text(conf)
    words = ("slurm", "setup", "--write", "--controller", "--slurm-conf", etc / "slurm.conf", "--json")

    unnamed = here("--config", config, *words)
    for nodes in ("a[1-2]", "b[1-9]"):
        assert here("--config", config, *words, "--nodes", nodes).code == 0

    lines = (etc / "slurm.conf").read_text().splitlines()
    assert any("--nodes" in text for text in unnamed.plain["decide"])
    assert lines[1:3] == ["NodeName=a[1-2] Gres=migmem:194560", "NodeName=b[1-9] Gres=migmem:97280"]


def test_somebody_else_than_root_only_looks(etc: Path) -> None:
    os.seteuid(65534)
    try:
        answer = here("--node", etc.parent / "n1", "slurm", "setup", "--write", "--slurm-conf", etc / "slurm.conf")
    finally:
        os.seteuid(0)

    assert answer.code == 2
    assert "needs root" in answer.err


@pytest.mark.parametrize("key", ["Prolog", "Epilog"])
def test_a_hook_that_slurm_conf_names_before_another_one_runs_once(etc: Path, key: str) -> None:
    """Slurm 24.05 and later run what each line names, and 22.05 the last alone."""
    written(etc, "ClusterName=lab\nNodeName=n1\n", "--write")
    conf, name = (etc / "slurm.conf").read_text(), f"{key.lower()}.sh"

    written(etc, f"{conf}{key}=/usr/local/sbin/site\n", "--write")

    lines = (etc / "slurm.conf").read_text().splitlines()
    assert [line for line in lines if line.startswith(f"{key}=")] == [f"{key}={etc}/gres-mig/{name}"]
    assert lines[-1] == f"{key}={etc}/gres-mig/{name}"
    assert f"# {key}={etc}/gres-mig/{name}" in lines
    assert setup.assigned(str(etc / "gres-mig" / "gres-mig.env"))[f"{key.upper()}_CHAIN"] == "/usr/local/sbin/site"


def test_a_hook_of_the_sites_that_has_the_name_of_ours_is_not_taken_for_it(etc: Path, tmp_path: Path) -> None:
    cluster = set_up(etc)
    (tmp_path / "prolog.sh").write_text("#!/bin/sh\n")
    theirs = replace(cluster, running={**cluster.running, "prolog": str(tmp_path / "prolog.sh")})

    (found,) = check_files.hooks(theirs)

    assert found.text.startswith(f"Prolog is {tmp_path}/prolog.sh: gres-mig's is not run")


def test_a_link_to_a_hook_in_a_folder_of_hooks_is_ours(etc: Path, tmp_path: Path) -> None:
    cluster = set_up(etc)
    (tmp_path / "10-site").write_text("#!/bin/sh\n")
    (tmp_path / "50-gres-mig").symlink_to(etc / "gres-mig" / "prolog.sh")
    folder = replace(cluster, running={**cluster.running, "prolog": f"{tmp_path}/*"})

    assert [finding.text for finding in check_files.hooks(folder)] == [f"{etc}/gres-mig"]


def test_other_hooks_may_run_beside_ours(etc: Path) -> None:
    """Slurm 24.11 runs each Prolog and each Epilog that slurm.conf has, and numbers them when it is asked."""
    written(etc, "ClusterName=lab\nNodeName=n1\n", "--write")
    ours = {"epilog[0]": "epilog.sh", "prolog[1]": "prolog.sh", "taskprolog": "task_prolog.sh"}
    in_force = {"prolog[0]": "/bin/true", **{key: f"{etc}/gres-mig/{name}" for key, name in ours.items()}}
    cluster = running.Cluster(conf_lines.read(str(etc / "slurm.conf")), in_force, {}, "n1")

    found = list(check_files.hooks(cluster))

    assert [(finding.level, finding.text) for finding in found] == [("ok", f"{etc}/gres-mig")]


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("n1", ("n1",)),
        ("n[1-3,7],gpu1", ("n1", "n2", "n3", "n7", "gpu1")),
        ("n[08-10]", ("n08", "n09", "n10")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("/dev/nvidia[0-1]", ("/dev/nvidia0", "/dev/nvidia1")),
    ],
)
def test_host_lists_are_read_as_slurm_reads_them(expression: str, names: tuple[str, ...]) -> None:
    assert conf_lines.hosts(expression) == names

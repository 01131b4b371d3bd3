"""What users may ask of migmem, on a real controller: what it counts, what is refused, and what is said."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpus import SETTINGS, gpu
from hypothesis import HealthCheck, given
from hypothesis import settings as searching
from hypothesis import strategies as st
from slurm_cluster import HOOKS, Cluster, require_slurm

from gres_mig.models import Request
from gres_mig.slice_models import Slicing
from gres_mig.values import replace
from gres_mig_slurm import sizes_file
from gres_mig_slurm.profiles import Sizes, node_type

require_slurm()

A100 = node_type([gpu("a100-40")], SETTINGS, nodes="n1")
RTX = node_type([gpu("rtx-pro-6000", i) for i in range(2)], SETTINGS, nodes="n2")
SIZES = Sizes((A100, RTX))

EXAMPLES = "write MiB, such as migmem:8000, or migmem:8K for 8,192"
NAMES = "1g.5gb, 1g.10gb, 2g.10gb, 3g.20gb, 4g.20gb, 7g.40gb, 1g.24gb, 2g.48gb, 4g.96gb"
LARGEST = "is more than any GPU of this cluster gives; the largest is 4g.96gb (97,280 MiB)"
TWICE = "migmem was asked for twice: a job has one instance on each of its nodes; for several, submit an array"
INVALID = "Invalid generic resource (gres) specification"
DENIED = "Access/permission denied"


class WithFoo(Cluster):
    """A cluster whose nodes have another generic resource beside migmem."""

    def _slurm_conf(self) -> str:
        text = super()._slurm_conf()
        return text.replace("GresTypes=migmem", "GresTypes=foo,migmem").replace("Gres=migmem:", "Gres=foo:4,migmem:")

    def _write_files(self) -> None:
        super()._write_files()
        with (self.conf.parent / "gres.conf").open("a") as stream:
            stream.write("Name=foo Flags=CountOnly\n")
        (self.conf.parent / sizes_file.FILE_NAME).write_text(sizes_file.render(SIZES))


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """An A100 on n1, two RTX PRO 6000 on n2; the submit plugin, and no other hooks."""
    before = request.session.testsfailed
    boards = {"n1": [("a100-40", 1)], "n2": [("rtx-pro-6000", 2)]}
    counts = {"n1": A100.count_mib, "n2": RTX.count_mib}
    lua = (HOOKS / "job_submit.lua").read_text()
    with WithFoo(boards, lua=lua, counts=counts, hooks=False) as cluster:
        yield cluster
        cluster.kept = cluster.kept or request.session.testsfailed > before


@pytest.fixture
def sizes(cluster: Cluster) -> Iterator[Path]:
    """The sizes file, put right after the test."""
    file = cluster.conf.parent / sizes_file.FILE_NAME
    yield file
    file.unlink(missing_ok=True)
    file.write_text(sizes_file.render(SIZES))


@pytest.fixture
def site(cluster: Cluster) -> Iterator[Path]:
    """The place of the site's own script, where there is none."""
    file = cluster.conf.parent / "job_submit.site.lua"
    yield file
    file.unlink(missing_ok=True)


def submit(cluster: Cluster, *options: str, **more: object) -> subprocess.CompletedProcess[str]:
    """Submit a job that is held, and nothing else."""
    return cluster.run("sbatch", "--parsable", "--hold", *options, "--wrap=true", check=False, **more)


def submitted(cluster: Cluster, *options: str) -> str:
    """The id of a held job that was taken."""
    told = submit(cluster, *options)
    assert told.returncode == 0, told.stderr
    return told.stdout.strip()


def fields(cluster: Cluster, job: str) -> dict[str, str]:
    """A job's fields with the spaces in them; generic resources as 22.05 and later versions write them alike."""
    line = cluster.scontrol("-o", "show", "job", job).splitlines()[0]
    found = dict(re.findall(r"(\S+?)=(.*?)(?= \S+?=|\s*$)", line))
    found = {key: value.strip() for key, value in found.items()}
    return {**found, "Gres": re.sub(r"gres[:/]", "", found.get("TresPerNode", ""))}


def log(cluster: Cluster) -> str:
    """The controller's log."""
    return (cluster.folder / "log" / "slurmctld.log").read_text(errors="replace")


# What counts


@pytest.mark.parametrize(
    ("asked", "counted", "kept", "said"),
    [
        ("migmem:8000", "migmem:10042", "8000", "8,000 MiB counts as 10,042 MiB: what 1g.10gb (9,856 MiB) takes"),
        ("migmem:8K", "migmem:10042", "8K", "8,192 MiB counts as 10,042 MiB: what 1g.10gb (9,856 MiB) takes"),
        ("migmem:8k", "migmem:10042", "8K", "8,192 MiB counts as 10,042 MiB: what 1g.10gb (9,856 MiB) takes"),
        ("migmem:08000", "migmem:10042", "8000", "8,000 MiB counts as 10,042 MiB: what 1g.10gb (9,856 MiB) takes"),
        ("migmem:1", "migmem:5025", "1", "1 MiB counts as 5,025 MiB: what 1g.5gb (4,864 MiB) takes"),
        ("migmem:97280", "migmem:97280", "97280", ""),
        ("migmem:2g.48gb", "migmem:48640", "2g.48gb", "2g.48gb counts as 48,640 MiB: what 2g.48gb (48,512 MiB) takes"),
        ("migmem:2G.48GB", "migmem:48640", "2g.48gb", "2g.48gb counts as 48,640 MiB: what 2g.48gb (48,512 MiB) takes"),
        ("migmem:1g.24gb+me", "migmem:24320", "1g.24gb+me", "1g.24gb+me counts as 24,320 MiB"),
        ("migmem:1g.24gb:1", "migmem:24320", "1g.24gb", "1g.24gb counts as 24,320 MiB"),
        ("migmem:8000,foo:2", "migmem:10042,foo:2", "8000", "8,000 MiB counts as 10,042 MiB"),
        ("foo:2,migmem:8000", "foo:2,migmem:10042", "8000", "8,000 MiB counts as 10,042 MiB"),
    ],
)
def test_a_request_counts_as_its_share_and_what_was_written_is_kept(
    cluster: Cluster, asked: str, counted: str, kept: str, said: str
) -> None:
    told = submit(cluster, f"--gres={asked}")

    assert told.returncode == 0, told.stderr
    job = fields(cluster, told.stdout.strip())
    assert (job["Gres"], job["AdminComment"]) == (counted, f"gres-mig:1:{kept}")
    assert (f"sbatch: migmem: {said}" if said else "") in told.stderr
    assert ("migmem" in told.stderr) is bool(said)


BOUNDARIES = sorted(
    {mib + more for node in SIZES.types for p in node.boards[0].profiles for mib in [p.memory_mib] for more in (0, 1)}
    - {97281}
)


@pytest.mark.parametrize("mib", BOUNDARIES)
def test_at_every_boundary_the_controller_counts_as_the_package_does(cluster: Cluster, mib: int) -> None:
    job = fields(cluster, submitted(cluster, f"--gres=migmem:{mib}"))

    able = [node for node in SIZES.types if node.boards[0].price_mib(Request(mib))]
    assert job["Gres"] == f"migmem:{SIZES.price_mib(Request(mib))}"
    assert job.get("ExcNodeList", "(null)") == ("n1" if A100 not in able else "(null)")


@pytest.mark.parametrize("asked", [(), ("--gres=foo:2",), ("--gres=none",)], ids=["nothing", "foo", "none"])
def test_a_job_without_migmem_is_left_as_it_is(cluster: Cluster, asked: tuple[str, ...]) -> None:
    told = submit(cluster, *asked)

    assert (told.returncode, told.stderr) == (0, "")
    job = fields(cluster, told.stdout.strip())
    assert job["Gres"] == ("foo:2" if "--gres=foo:2" in asked else "")
    assert "AdminComment" not in job


def test_with_slurms_own_word_before_it_the_same_is_asked_for(cluster: Cluster) -> None:
    """sbatch of 22.05 takes `gres:migmem`, that of 24.11 `gres/migmem`, and neither takes the other's."""
    told = [submit(cluster, f"--gres=gres{mark}migmem:8000") for mark in ":/"]

    taken = [fields(cluster, each.stdout.strip()) for each in told if each.returncode == 0]
    assert {(job["Gres"], job["AdminComment"]) for job in taken} == {("migmem:10042", "gres-mig:1:8000")}


def test_every_task_of_an_array_has_the_request(cluster: Cluster) -> None:
    job = submitted(cluster, "--gres=migmem:8000", "--array=0-2")
    cluster.scontrol("hold", f"{job}_1")

    parts = [fields(cluster, f"{job}_{task}") for task in (0, 1, 2)]

    assert {(part["Gres"], part["AdminComment"]) for part in parts} == {("migmem:10042", "gres-mig:1:8000")}


def test_on_several_nodes_it_counts_on_each(cluster: Cluster) -> None:
    job = fields(cluster, submitted(cluster, "--gres=migmem:8000", "-N2", "-n4"))

    assert (job["Gres"], job["NumNodes"].partition("-")[0]) == ("migmem:10042", "2")


def test_a_line_in_the_script_and_a_variable_ask_as_the_option_does(cluster: Cluster) -> None:
    script = cluster.run(
        "sbatch", "--parsable", "--hold", input="#!/bin/sh\n#SBATCH --gres=migmem:8000\ntrue\n", stdin=None
    )
    variables = {**cluster._defaults("games")["env"], "SBATCH_GRES": "migmem:8000"}
    variable = submit(cluster, env=variables)

    kept = [fields(cluster, told.stdout.strip())["AdminComment"] for told in (script, variable)]
    assert kept == ["gres-mig:1:8000"] * 2


@pytest.mark.parametrize("command", ["srun", "salloc"])
def test_interactive_commands_count_and_are_told_the_same(cluster: Cluster, command: str) -> None:
    show = "scontrol -o show job $SLURM_JOB_ID"

    told = cluster.run(command, "--gres=migmem:8000", "-n1", "sh", "-c", show)

    assert f"{command}: migmem: 8,000 MiB counts as 10,042 MiB" in told.stderr
    assert "AdminComment=gres-mig:1:8000 " in told.stdout


def test_a_gpu_is_counted_full_when_it_is(cluster: Cluster) -> None:
    """Four 1g and a 3g fill an A100; priced at a seventh each, the four would keep the 3g out."""
    asked = [4000, 4000, 4000, 4000, 16000]
    running = [cluster.sbatch(f"--gres=migmem:{mib}", "-wn1", script="sleep 600") for mib in asked]
    for job in running:
        cluster.wait(job, "RUNNING")

    more = cluster.sbatch("--gres=migmem:4000", "-wn1", script="sleep 600")

    cluster.until(lambda: cluster.job(more)["Reason"] == "Resources", "the next one waiting for resources")
    cluster.run("scancel", *map(str, (*running, more)))


# What is refused


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("migmem:8G", "migmem counts MiB, and 8G is no number of them: write 8K or 8192"),
        ("migmem:8g", "migmem counts MiB, and 8g is no number of them: write 8K or 8192"),
        ("migmem:8GB", "migmem counts MiB, and 8GB is no number of them: write 8K or 8192"),
        ("migmem:8GiB", "migmem counts MiB, and 8GiB is no number of them: write 8K or 8192"),
        ("migmem:8KB", "migmem counts MiB, and 8KB is no number of them: write 8K or 8192"),
        ("migmem:8000M", "migmem counts MiB, and 8000M is no number of them: write 8000"),
        ("migmem:8000MB", "migmem counts MiB, and 8000MB is no number of them: write 8000"),
        ("migmem:1T", "migmem counts MiB, and 1T is no number of them: write 1024K or 1048576"),
        ("migmem:8.5G", "migmem counts MiB, and 8.5G is no number of them: write 8704"),
        ("migmem:8000.5", "migmem counts MiB, and 8000.5 is no number of them: write 8001"),
        ("migmem:8000*2", f"migmem counts MiB, and 8000*2 is no number of them: {EXAMPLES}"),
        ("migmem:8K:1", f"migmem counts MiB, and 8K:1 is no number of them: {EXAMPLES}"),
        ("migmem:0", f"migmem:0 asks for nothing: leave it out, or {EXAMPLES}"),
        ("migmem:0K", f"migmem:0K asks for nothing: leave it out, or {EXAMPLES}"),
        ("migmem", f"migmem needs a size: {EXAMPLES}"),
        ("migmem:much", f"migmem:much is no size and no profile of this cluster: {EXAMPLES}, or one of {NAMES}"),
        ("migmem:K", f"migmem:K is no size and no profile of this cluster: {EXAMPLES}, or one of {NAMES}"),
        ("migmem:-5", f"migmem:-5 is no size and no profile of this cluster: {EXAMPLES}, or one of {NAMES}"),
        (
            "migmem:a100:8000",
            f"migmem:a100:8000 is no size and no profile of this cluster: {EXAMPLES}, or one of {NAMES}",
        ),
        (
            "migmem:1g.24gb:2",
            f"migmem:1g.24gb:2 is no size and no profile of this cluster: {EXAMPLES}, or one of {NAMES}",
        ),
        ("migmem:1g.99gb", f"migmem:1g.99gb is no size and no profile of this cluster: {EXAMPLES}, or one of {NAMES}"),
        ("migmem:é", f"migmem:?? is no size and no profile of this cluster: {EXAMPLES}, or one of {NAMES}"),
        ("migmem:97281", f"migmem: 97,281 MiB {LARGEST}"),
        ("migmem:100K", f"migmem: 102,400 MiB {LARGEST}"),
        ("migmem:" + "9" * 60, f"migmem: {'9' * 37}... MiB {LARGEST}"),
        ("migmem:8000,migmem:4000", TWICE),
        ("migmem:8000,migmem:8000", TWICE),
        ("migmem:8000,foo:1,migmem:4000", TWICE),
    ],
)
def test_what_can_never_be_had_is_refused_with_what_to_write(cluster: Cluster, asked: str, said: str) -> None:
    told = submit(cluster, f"--gres={asked}")

    assert told.returncode != 0
    assert told.stderr.splitlines() == [
        f"sbatch: error: {said}",
        f"sbatch: error: Batch job submission failed: {INVALID}",
    ]


def test_exclusive_is_refused_together_with_migmem_and_alone_is_not(cluster: Cluster) -> None:
    alone, together = submit(cluster, "--exclusive"), submit(cluster, "--exclusive", "--gres=migmem:8000")

    assert alone.returncode == 0
    assert together.returncode != 0
    assert "--exclusive takes all migmem of a node for one instance: leave out --exclusive or migmem" in together.stderr


def test_exclusive_is_taken_where_the_site_allows_it(cluster: Cluster, sizes: Path) -> None:
    sizes.write_text(sizes_file.render(replace(SIZES, exclusive="allow")))

    job = fields(cluster, submitted(cluster, "--exclusive", "--gres=migmem:8000"))

    assert (job["Gres"], job["AdminComment"]) == ("migmem:10042", "gres-mig:1:8000")


def test_a_heterogeneous_job_with_migmem_is_refused_and_without_is_not(cluster: Cluster) -> None:
    without, with_it = submit(cluster, "--gres=foo:1", ":", "-n1"), submit(cluster, "-n1", ":", "--gres=migmem:8000")

    assert without.returncode == 0
    assert with_it.returncode != 0
    assert "migmem cannot be had by a heterogeneous job: submit its components as jobs of their own" in with_it.stderr


def test_an_interactive_command_is_refused_with_the_same_words(cluster: Cluster) -> None:
    told = cluster.run("srun", "--gres=migmem:8G", "true", check=False)

    assert told.returncode != 0
    assert "srun: error: migmem counts MiB, and 8G is no number of them: write 8K or 8192" in told.stderr


def test_by_task_is_refused(cluster: Cluster) -> None:
    if "--tres-per-task" not in cluster.run("sbatch", "--help").stdout:
        job = submitted(cluster)

        told = cluster.run("scontrol", "update", f"JobId={job}", "TresPerTask=gres:migmem:8000", check=False)

        assert (told.returncode, INVALID in told.stderr) == (1, True)
        assert "migmem is asked for by node, not by task: --gres=migmem:8000" in log(cluster)
    else:
        told = submit(cluster, "--tres-per-task=gres/migmem:8000", "-n2")

        assert told.returncode != 0
        assert "migmem is asked for by node, not by task: --gres=migmem:8000" in told.stderr


# A waiting job


@pytest.mark.parametrize(
    ("who", "change", "counted", "kept", "said"),
    [
        ("games", "Gres=migmem:8000", "migmem:10042", "8000", ""),
        ("games", "Gres=migmem:10042", "migmem:10042", "8000", ""),
        ("games", "Gres=migmem:8000,foo:1", "migmem:10042,foo:1", "8000", ""),
        ("games", "TimeLimit=5", "migmem:10042", "8000", ""),
        ("games", "Gres=migmem:16000", "migmem:10042", "8000", DENIED),
        ("games", "Gres=migmem:1", "migmem:10042", "8000", DENIED),
        ("games", "Gres=migmem:2g.48gb", "migmem:10042", "8000", DENIED),
        ("games", "Gres=migmem:8G", "migmem:10042", "8000", INVALID),
        ("games", "Gres=migmem:1,migmem:2", "migmem:10042", "8000", INVALID),
        ("games", "AdminComment=gres-mig:1:90000", "migmem:10042", "8000", DENIED),
        ("games", "AdminComment=", "migmem:10042", "8000", DENIED),
        ("root", "Gres=migmem:16000", "migmem:20092", "16000", ""),
        ("root", "Gres=migmem:2g.48gb", "migmem:48640", "2g.48gb", ""),
        ("root", "Gres=migmem:8G", "migmem:10042", "8000", INVALID),
        ("root", "AdminComment=seen by root", "migmem:10042", "8000 seen by root", ""),
        ("slurm", "Gres=migmem:16000", "migmem:20092", "16000", ""),
    ],
)
def test_a_waiting_jobs_request_changes_only_with_what_the_hooks_go_by(
    cluster: Cluster, who: str, change: str, counted: str, kept: str, said: str
) -> None:
    job = submitted(cluster, "--gres=migmem:8000")

    told = cluster.run("scontrol", "update", f"JobId={job}", change, user=who, check=False)

    assert said in told.stderr
    assert (told.returncode == 0) is (not said)
    after = fields(cluster, job)
    assert (after["Gres"], after["AdminComment"]) == (counted, f"gres-mig:1:{kept}")


def test_who_may_not_change_a_request_is_told_what_to_do(cluster: Cluster) -> None:
    job = submitted(cluster, "--gres=migmem:8000")

    told = cluster.run("scontrol", "update", f"JobId={job}", "Gres=migmem:16000", check=False)

    # Slurm 22.05 hands no words of ours to scontrol, and puts them into its log instead.
    words = "migmem: only root and operators change what a waiting job asks for: cancel it and submit again"
    assert words in told.stderr or f'Message discarded: ("{words}")' in log(cluster)


def test_a_user_may_give_migmem_up(cluster: Cluster) -> None:
    job = submitted(cluster, "--gres=migmem:8000")

    cluster.run("scontrol", "update", f"JobId={job}", "Gres=")

    assert fields(cluster, job)["Gres"] == ""


def test_a_user_cannot_add_migmem_to_a_waiting_job(cluster: Cluster) -> None:
    job = submitted(cluster)

    told = cluster.run("scontrol", "update", f"JobId={job}", "Gres=migmem:8000", check=False)

    assert DENIED in told.stderr
    assert fields(cluster, job)["Gres"] == ""


def test_what_root_asks_for_anew_is_kept_from_nodes_that_cannot_serve_it(cluster: Cluster) -> None:
    job = submitted(cluster, "--gres=migmem:8000")

    cluster.scontrol("update", f"JobId={job}", "Gres=migmem:50000")

    assert fields(cluster, job)["ExcNodeList"] == "n1"


def test_nodes_that_the_user_excludes_stay_excluded(cluster: Cluster) -> None:
    job = fields(cluster, submitted(cluster, "--gres=migmem:50000", "-xn2"))

    assert job["ExcNodeList"] == "n[1-2]"


# The sizes file


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file or directory"),
        ("", "its format is not 1"),
        ("format 2\n", "its format is not 1"),
        ("format 1\n", "it has no sizes"),
        ("format 1\ntype a\nprofile 1g.6gb 1 1 size\n", "is not understood: profile 1g.6gb 1 1 size"),
        (
            "format 1\ntype a\nboard 1 9 A30\nprofile 1g.6gb one 1 size\n",
            "is not understood: profile 1g.6gb one 1 size",
        ),
        ("format 1\nos.execute('touch /tmp/x')\n", "is not understood: os.execute('touch /tmp/x')"),
        ("\0\x01\xff", "is not understood: "),
    ],
    ids=["missing", "empty", "newer", "no profiles", "no board", "no number", "code", "bytes"],
)
def test_without_a_sizes_file_only_migmem_is_refused_and_the_admin_is_told_what_to_run(
    cluster: Cluster, sizes: Path, text: str | None, reason: str
) -> None:
    sizes.unlink()
    if text is not None:
        sizes.write_bytes(text.encode("latin-1"))

    without, with_it = submit(cluster, "--gres=foo:1"), submit(cluster, "--gres=migmem:8000")

    assert without.returncode == 0
    assert with_it.returncode != 0
    assert reason in with_it.stderr
    assert f"its admin has to run: gres-mig slurm profiles --write {sizes}" in with_it.stderr


L40 = replace(gpu("l40", 1), sliced=True, backend="cooperative")
SHARED = node_type([L40], replace(SETTINGS, slicing=Slicing(("*",))), nodes="n2")


@pytest.mark.parametrize("mib", [1, 4864, 4865, 19968, 40192, 40193, 44173, 44174])
def test_a_slice_of_any_size_counts_as_the_package_says(cluster: Cluster, sizes: Path, mib: int) -> None:
    mixed = Sizes((A100, SHARED))
    sizes.write_text(sizes_file.render(mixed))

    told = submit(cluster, f"--gres=migmem:{mib}")

    if mib == 44174:
        assert "is more than any GPU of this cluster gives; the largest is a slice (44,173 MiB)" in told.stderr
        return
    job = fields(cluster, told.stdout.strip())
    assert job["Gres"] == f"migmem:{mixed.price_mib(Request(mib))}"
    assert job.get("ExcNodeList", "(null)") == ("n1" if mib > 40192 else "(null)")


@pytest.mark.parametrize("asked", ["mig:8000", "MIG:08000", "mig:8K"])
def test_who_insists_on_mig_is_counted_for_it_and_kept_from_nodes_that_only_share(
    cluster: Cluster, sizes: Path, asked: str
) -> None:
    sizes.write_text(sizes_file.render(Sizes((A100, SHARED))))

    job = fields(cluster, submitted(cluster, f"--gres=migmem:{asked}"))

    kept = asked.lower().replace("0800", "800").replace("k", "K")
    assert (job["Gres"], job["AdminComment"]) == ("migmem:10042", f"gres-mig:1:{kept}")
    assert job["ExcNodeList"] == "n2"


def test_on_a_cluster_of_slices_alone_nothing_else_is_promised(cluster: Cluster, sizes: Path) -> None:
    sizes.write_text(sizes_file.render(Sizes((SHARED,))))

    right, named, insists = (submit(cluster, f"--gres=migmem:{asked}") for asked in ("8000", "1g.5gb", "mig:8000"))

    assert fields(cluster, right.stdout.strip())["Gres"] == "migmem:8512"
    assert "migmem: 8,000 MiB counts as 8,512 MiB: what a slice (8,000 MiB) takes of a GPU" in right.stderr
    assert f"migmem:1g.5gb is no size and no profile of this cluster: {EXAMPLES}\n" in named.stderr
    assert "8,000 MiB is more than any GPU of this cluster gives; the largest is none" in insists.stderr


def test_a_new_sizes_file_is_in_force_at_once(cluster: Cluster, sizes: Path) -> None:
    sizes.write_text(sizes_file.render(Sizes((RTX,))))

    job = fields(cluster, submitted(cluster, "--gres=migmem:8000"))

    assert job["Gres"] == "migmem:24320"


# The site's own script

SITE = """
function slurm_job_submit(job_desc, part_list, submit_uid)
  if job_desc.comment == "small" then job_desc.gres = "migmem:4000" end
  if job_desc.comment == "no" then slurm.log_user("not on %s", "a Sunday") return slurm.ERROR end
  if job_desc.comment then job_desc.admin_comment = job_desc.comment end
end
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
  return job_desc.comment == "no" and slurm.ERROR or slurm.SUCCESS
end
return slurm.SUCCESS
"""


def test_the_sites_script_comes_first_and_what_it_changes_is_counted(cluster: Cluster, site: Path) -> None:
    site.write_text(SITE)

    job = fields(cluster, submitted(cluster, "--comment=small"))

    assert (job["Gres"], job["AdminComment"]) == ("migmem:5025", "gres-mig:1:4000 small")


def test_what_the_sites_script_refuses_is_refused(cluster: Cluster, site: Path) -> None:
    site.write_text(SITE)
    job = submitted(cluster)

    told = submit(cluster, "--comment=no", "--gres=migmem:8000")
    changed = cluster.run("scontrol", "update", f"JobId={job}", "Comment=no", check=False)

    assert told.returncode != 0
    assert told.stderr.startswith("sbatch: error: not on a Sunday\n")
    assert changed.returncode != 0


@pytest.mark.parametrize(
    ("gres", "kept"), [((), None), (("--gres=migmem:8000",), "gres-mig:1:8000 and more")], ids=["without", "with"]
)
def test_nobody_but_us_says_what_was_asked_for(
    cluster: Cluster, site: Path, gres: tuple[str, ...], kept: str | None
) -> None:
    site.write_text(SITE)

    job = fields(cluster, submitted(cluster, "--comment=gres-mig:1:90000 and more", *gres))

    assert job.get("AdminComment") == kept


def test_a_site_script_is_in_force_as_soon_as_it_changes_and_gone_when_it_is_removed(
    cluster: Cluster, site: Path
) -> None:
    comments = []
    for text in (SITE, SITE.replace("= job_desc.comment end", '= "changed" end'), None):
        site.unlink(missing_ok=True)
        if text:
            site.write_text(text)
        comments.append(fields(cluster, submitted(cluster, "--comment=x")).get("AdminComment"))

    assert comments == ["x", "changed", None]


@pytest.mark.parametrize("broken", ["syntax(", "error('at load')"])
def test_a_site_script_that_does_not_load_leaves_the_one_before_in_force(
    cluster: Cluster, site: Path, broken: str
) -> None:
    site.write_text(SITE)
    submitted(cluster)
    site.write_text(broken)
    os.utime(cluster.conf.parent / "job_submit.lua", None)

    job = fields(cluster, submitted(cluster, "--comment=x", "--gres=migmem:8000"))

    assert job["AdminComment"] == "gres-mig:1:8000 x"
    assert re.search(rf"{site}.*, using previous script", log(cluster))


# Whatever goes wrong


odd_texts = st.text(st.sampled_from("0123456789kKgGmMBi.:,*+-=%#;/()[]'\"\\ \t$`gfxéx"), max_size=20)


@searching(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(odd_texts)
def test_no_text_however_odd_is_more_than_it_can_bear(cluster: Cluster, text: str) -> None:
    told = submit(cluster, f"--gres=migmem:{text}")

    assert told.returncode != 0 or "gres-mig:1:" in fields(cluster, told.stdout.strip())["AdminComment"]
    assert "internal error in job_submit.lua" not in log(cluster)


def test_an_internal_error_refuses_migmem_and_lets_all_others_pass(cluster: Cluster, site: Path) -> None:
    site.write_text("kept = table.insert\ntable.insert = nil\n")

    without, with_it = submit(cluster, "--gres=foo:1"), submit(cluster, "--gres=migmem:8000")

    site.write_text("table.insert = kept\n")
    assert without.returncode == 0
    assert with_it.returncode != 0
    assert "migmem: an internal error of the submit plugin, told in slurmctld's log; tell your admin" in with_it.stderr
    assert "gres-mig: internal error in job_submit.lua: " in log(cluster)
    assert submit(cluster, "--gres=migmem:8000").returncode == 0

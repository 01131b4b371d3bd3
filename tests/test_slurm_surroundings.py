"""What happens around our hooks, on a real cluster: other scripts, slurmd that stops, Slurm's own limits, odd jobs."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from slurm_cluster import Cluster, brought_up, require_slurm

require_slurm()

REGISTERED = "_handle_node_reg_resp: slurmctld sent back"
STOPPING = "got shutdown request|Caught SIGTERM"
"""As 22.05 and 24.11 say it."""


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One node with one GPU."""
    with brought_up(request, {"n1": [("rtx-pro-6000", 1)]}) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def clean(cluster: Cluster) -> Iterator[None]:
    """After each test nothing is left of it, and no node is out of service."""
    yield
    cluster.hands("n1").mend()
    cluster.cancel_all()
    cluster.assert_healthy()


def running(cluster: Cluster) -> int:
    """A job that runs on an instance of its own."""
    job = cluster.sbatch("--gres=migmem:8000", script="echo begun; sleep 300")
    cluster.until(lambda: "begun" in cluster.output(job), f"{job} running on its instance")
    return job


# slurmd


@pytest.mark.parametrize("places", [0, 4])
def test_a_slurmd_that_begins_anew_counts_the_same_whether_its_gpus_are_empty_or_full(
    cluster: Cluster, places: int
) -> None:
    jobs = [running(cluster) for _ in range(places)]
    before, registered = cluster.node("n1"), logged(cluster, REGISTERED)
    cluster.stop("n1")
    cluster.start("n1")
    cluster.until(lambda: logged(cluster, REGISTERED) > registered, "n1 registered anew")
    after = cluster.node("n1")

    assert (after["Gres"], after["State"], after["Reason"]) == (before["Gres"], before["State"], "")
    assert {cluster.state(job) for job in jobs} <= {"RUNNING"}


def test_a_prolog_goes_on_to_its_end_while_slurmd_stops_and_its_job_runs_later(cluster: Cluster) -> None:
    hands = cluster.hands("n1")
    hang = hands.plant("nvmlGpuInstanceCreateComputeInstance", "hangs", count="node")
    job = cluster.sbatch("--gres=migmem:8000", script="echo begun; sleep 300")
    cluster.until(lambda: hands.fired(hang), "the prolog in the driver")
    before = logged(cluster, STOPPING)
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(cluster.stop, "n1")
        cluster.until(lambda: logged(cluster, STOPPING) > before, "slurmd about to stop")
        hands.mend()
        stopped.result()
    (made,) = cluster.state_of("n1")["records"]
    cluster.start("n1")
    cluster.until(lambda: "begun" in cluster.output(job), "running", within=60)

    assert made["kind"] == "allocation"
    assert cluster.state_of("n1")["records"] == [made]
    assert cluster.job(job)["Restarts"] == "0"


# Slurm's own limit, and other scripts


def test_a_prolog_that_slurmd_ends_for_its_time_leaves_nothing(cluster: Cluster) -> None:
    cluster.reconfigure("PrologEpilogTimeout=2\nSchedulerParameters=nohold_on_prolog_fail")
    hands = cluster.hands("n1")
    hang = hands.plant("nvmlGpuInstanceCreateComputeInstance", "hangs", count="node")
    job = cluster.sbatch("--gres=migmem:8000", script="echo begun")
    cluster.until(lambda: "DRAIN" in cluster.node("n1")["State"], "drained by Slurm")
    fired, reason = hands.fired(hang), cluster.node("n1")["Reason"]
    hands.mend()
    cluster.scancel(job)
    cluster.wait_free()
    cluster.until(lambda: cluster.state_of("n1")["records"] == [], "all settled")
    cluster.resume("n1")
    cluster.reconfigure("")

    assert fired
    assert reason == "Prolog error"
    assert cluster.output(job) == ""


@pytest.mark.parametrize(("theirs", "is_first"), [("10-theirs", False), ("90-theirs", True)])
def test_another_prolog_that_fails_leaves_no_instance_whichever_is_first(
    cluster: Cluster, theirs: str, is_first: bool
) -> None:
    """slurmd runs those that a pattern names from the last to the first, until one fails (22.05)."""
    folder = cluster.folder / "prolog.d"
    folder.mkdir()
    (folder / "50-gres-mig").symlink_to(cluster.hooks / "prolog.sh")
    (folder / theirs).write_text("#!/bin/sh\nexit 1\n")
    (folder / theirs).chmod(0o755)
    cluster.reconfigure(f"Prolog={folder}/*\nSchedulerParameters=nohold_on_prolog_fail")
    job = cluster.sbatch("--gres=migmem:8000", script="echo begun")
    cluster.until(lambda: "DRAIN" in cluster.node("n1")["State"], "drained by Slurm")
    cluster.scancel(job)
    cluster.wait_free()
    state = cluster.state_of("n1")
    shutil.rmtree(folder)
    cluster.resume("n1")
    cluster.reconfigure("")

    assert state["records"] == []
    assert (f"slurm:lab:{job}" in [each["owner"] for each in state["tombstones"]]) is not is_first
    assert cluster.output(job) == ""


# Odd jobs


def test_nothing_is_written_where_a_jobs_output_points_to(cluster: Cluster) -> None:
    """Neither when its prolog fails nor when it runs: root writes in root's own folders only."""
    target, link, work = cluster.folder / "roots-own", cluster.home / "link", cluster.home / "work"
    target.write_text("as it was\n")
    link.symlink_to(target)
    work.symlink_to(cluster.hooks)
    before = sorted(os.listdir(cluster.hooks))
    hands = cluster.hands("n1")
    hands.plant("nvmlDeviceCreateGpuInstanceWithPlacement", "returns", code=999, times=0)
    job = cluster.sbatch("--gres=migmem:8000", f"--output={link}", f"--error={link}", f"--chdir={work}")
    cluster.wait_drained("n1")
    at_fault = target.read_text()
    hands.mend()
    cluster.resume("n1")
    cluster.until(lambda: cluster.state(job) not in ("PENDING", "RUNNING", "COMPLETING"), "over", within=30)

    assert at_fault == "as it was\n"
    assert target.read_text() == "as it was\n"
    assert sorted(os.listdir(cluster.hooks)) == before


@pytest.mark.parametrize("text", ["\udcff\udcfe", "x" * 1_000, "1|2|3|migmem:8000", "JobId=1 \\n", "$(id)`id`;'\""])
def test_what_a_user_calls_a_job_disturbs_nothing(cluster: Cluster, text: str) -> None:
    job = cluster.sbatch(
        "--gres=migmem:8000", f"--job-name={text}", f"--comment={text}", script="echo $GRES_MIG_PROFILE; echo over"
    )
    cluster.until(lambda: cluster.output(job).endswith("over\n"), "its script over")

    assert cluster.output(job).splitlines()[1:] == ["1g.24gb", "over"]


def logged(cluster: Cluster, text: str) -> int:
    """How often the slurmds of n1 have logged that."""
    return len(re.findall(text, (cluster.folder / "log" / "slurmd.n1.log").read_text(errors="replace")))

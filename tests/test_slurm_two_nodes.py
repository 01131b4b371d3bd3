"""A job that one node after the other had no place for: each of them wakes it, and none when its user says when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from slurm_cluster import Cluster, brought_up, require_slurm

from gres_mig import config
from gres_mig.simulator.program import command, environment
from gres_mig_slurm import controller, delayed
from gres_mig_slurm.controller import Seen

require_slurm()


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A GPU on each of two nodes, both taken by somebody else's instances."""
    boards = {"n1": [("rtx-pro-6000", 1)], "n2": [("rtx-pro-6000", 1)]}
    with brought_up(request, boards, priced=True) as cluster:
        for node in cluster.nodes:
            cluster.hands(node).make(0, "4g.96gb")
        yield cluster


@pytest.fixture(autouse=True)
def configured(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM_CONF is the cluster's."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))


class Twice(NamedTuple):
    """Two jobs that first n1 and then n2 has delayed, the next try far off."""

    ours: int
    theirs: int
    """Whose user has said when it may begin."""


@pytest.fixture(scope="module")
def twice(cluster: Cluster) -> Twice:
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("SLURM_CONF", str(cluster.conf))
        jobs = [cluster.sbatch("-wn1", "--gres=migmem:8000", script="echo begun") for _ in range(2)]
        wait_delayed(cluster, "n1", jobs)
        for job in jobs:
            cluster.scontrol("update", f"JobId={job}", "ReqNodeList=n2")
        wait_delayed(cluster, "n2", jobs)
        for job in jobs:
            cluster.scontrol("update", f"JobId={job}", "ReqNodeList=n1")
            controller.start_at(str(job), time.time() + 600, seen(job).admin_comment)
        cluster.run("scontrol", "update", f"JobId={jobs[1]}", "StartTime=now+500")
    return Twice(*jobs)


def wait_delayed(cluster: Cluster, node: str, jobs: list[int]) -> None:
    """Until that node has delayed them."""

    def delayed_there() -> bool:
        return waiting(cluster, node) == jobs and {cluster.state(job) for job in jobs} == {"PENDING"}

    cluster.until(delayed_there, f"delayed on {node}", within=60)


def waiting(cluster: Cluster, node: str) -> list[int]:
    """The jobs that a node delayed."""
    return sorted(each.job_id for each in delayed.read(config.load(cluster.gpus(node) / "config.toml")))


def serve(cluster: Cluster, node: str) -> None:
    """One pass of the service on a node."""
    words = command("--config", str(cluster.gpus(node) / "config.toml"), "serve", "--once")
    cluster.run(*words, user="root", env=environment(SLURM_CONF=str(cluster.conf), SLURMD_NODENAME=node))


def seen(job: int) -> Seen:
    """The job as the controller has it."""
    found = controller.seen(job)
    assert found is not None
    return found


def test_what_was_asked_for_outlives_every_delay(twice: Twice) -> None:
    job = seen(twice.ours)

    assert job.admin_comment == f"gres-mig:1:8000 gres-mig:begin:{job.eligible}"


def test_a_begin_time_that_its_user_set_is_left_alone_by_both(cluster: Cluster, twice: Twice) -> None:
    before = seen(twice.theirs)
    for node in cluster.nodes:
        serve(cluster, node)

    assert seen(twice.theirs) == before
    assert [waiting(cluster, node) for node in cluster.nodes] == [[twice.ours]] * 2


def test_the_node_that_delayed_it_first_wakes_it_too(cluster: Cluster, twice: Twice) -> None:
    before = seen(twice.ours)
    (foreign,) = cluster.instances("n1")
    cluster.hands("n1").destroy(0, foreign.id)
    serve(cluster, "n1")
    woken = seen(twice.ours)
    cluster.wait(twice.ours, "COMPLETED", within=30)

    assert woken.eligible < before.eligible
    assert cluster.output(twice.ours).splitlines()[1:] == ["begun"]
    cluster.assert_healthy()


def test_a_comment_that_was_cut_off_where_it_is_read_is_not_written_back(cluster: Cluster) -> None:
    job = cluster.sbatch("--begin=now+600", "--gres=migmem:8000")
    note = "of the admin's " * 100
    cluster.scontrol("update", f"JobId={job}", f"AdminComment={note}")
    controller.start_at(str(job), seen(job).eligible + 60, seen(job).admin_comment)

    assert note.strip() in cluster.scontrol("show", "job", str(job))
    assert seen(job).given_begin == 0


def test_the_pause_before_the_next_run_counts_from_the_end_of_a_slow_epilog(cluster: Cluster) -> None:
    slow = cluster.folder / "slow-epilog"
    slow.write_text("#!/bin/sh\nexec sleep 3\n")
    slow.chmod(0o755)
    with cluster.hook_settings(f"EPILOG_CHAIN={slow}"):
        job = cluster.sbatch("-wn2", "--gres=migmem:8000")
        cluster.until(
            lambda: cluster.job(job)["JobState"] == "PENDING" and cluster.job(job)["Restarts"] == "1",
            f"{job} put back",
            within=40,
        )
    ended = seen(job)
    cluster.scancel(job)

    # Its submit time is when this run was over (22.05, 24.11).
    assert ended.eligible - ended.submitted >= controller.pause_s()

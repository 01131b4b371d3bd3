"""Arrays that begin all at once, on a real cluster: no task is lost, none held, no node drained, nothing left."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster, brought_up, require_slurm

require_slurm()

TASKS, PLACES = 64, 56


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Eight GPUs with room for seven tasks each: fewer than an array has, and as many as Slurm lets in."""
    boards = {"n1": [("h100-80", 4)], "n2": [("h100-80", 4)]}
    with brought_up(request, boards, priced=True) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def clean(cluster: Cluster) -> Iterator[None]:
    """After each test no instance, record or hand-over is left, no node is drained and no job held."""
    yield
    cluster.cancel_all()
    cluster.assert_healthy()
    assert [cluster.state_of(node)["records"] for node in cluster.nodes] == [[], []]
    assert list(cluster.handover.iterdir()) == []


def submit(cluster: Cluster, count: int, script: str) -> list[str]:
    """The tasks of an array that wants a seventh of a GPU for each of them."""
    options = ("--gres=migmem:8000", f"--array=1-{count}", f"--output={cluster.home}/%A_%a.out")
    array = cluster.sbatch(*options, script=script)
    return [f"{array}_{task}" for task in range(1, count + 1)]


def test_of_64_tasks_at_once_each_runs_once_on_an_instance_of_its_own(cluster: Cluster) -> None:
    """On a busy machine some wait too long for a GPU on which others are made, and begin anew; none runs twice."""
    gate = cluster.home / "gate"
    os.mkfifo(gate, 0o666)
    tasks = submit(cluster, TASKS, "echo mine=$CUDA_VISIBLE_DEVICES; cat gate")
    array = tasks[0].partition("_")[0]
    cluster.until(lambda: len(devices(cluster, tasks)) == PLACES, "all places taken", within=90)
    there = {uuid for instance in cluster.instances() for uuid in instance.mig_uuids}
    at_once = devices(cluster, tasks)
    open_for_all(gate)
    cluster.until(lambda: cluster.states(array) == {"COMPLETED": TASKS}, "all completed", within=90)

    assert set(at_once) == there
    assert len(there) == PLACES
    assert len(devices(cluster, tasks)) == TASKS


def test_an_array_that_is_cancelled_while_it_begins_leaves_nothing(cluster: Cluster) -> None:
    for node in cluster.nodes:
        cluster.hands(node).configure(create_s=0.2)
    tasks = submit(cluster, 16, "sleep 300")
    array = tasks[0].partition("_")[0]
    cluster.until(cluster.instances, "some on their way")
    cluster.scancel(array)
    cluster.until(lambda: cluster.states(array) == {"CANCELLED": 16}, "all cancelled", within=30)
    for node in cluster.nodes:
        cluster.hands(node).configure(create_s=0.0)
    cluster.wait_free()


def devices(cluster: Cluster, tasks: list[str]) -> list[str]:
    """The devices of those that have begun, once for each time that one did."""
    return [device for task in tasks for device in re.findall(r"^mine=(\S+)$", cluster.output(task), re.MULTILINE)]


def open_for_all(gate: Path) -> None:
    """Let those go on that wait for a line of that pipe, and those that come later."""
    writer = os.open(gate, os.O_WRONLY)
    opened = gate.with_name("opened")
    opened.touch()
    opened.replace(gate)
    os.close(writer)

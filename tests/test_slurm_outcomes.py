"""What a job and its node are after every outcome of prolog and epilog, on a real cluster."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from slurm_cluster import Cluster, brought_up, require_slurm

require_slurm()

FULL = "no room for 8,000 MiB on this node: 4 of 4 places for 1g.24gb are taken; run: gres-mig why 8000"
TOO_BIG = "no instance on this node holds 500,000 MiB: the largest is 4g.96gb (97,280 MiB)"
FREE = {"idle", "planned"}
"""States of a node in service without a job; backfill may have it in mind for one that waited when it last looked."""


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two nodes with one GPU each, whose migmem counts for more than they have; short limits."""
    boards = {"n1": [("rtx-pro-6000", 1)], "n2": [("rtx-pro-6000", 1)]}
    config = "hardware_timeout = 1\nlock_wait = 0.5\nin_use_wait = 0.2"
    with brought_up(request, boards, counts={"n1": 10**6, "n2": 10**6}, config=config) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def clean(cluster: Cluster) -> Iterator[None]:
    """After each test nothing is left of it, and no node is out of service."""
    before = cluster.instances()
    yield
    cluster.cancel_all(leaving=before)
    cluster.assert_healthy()


@pytest.fixture
def full(cluster: Cluster) -> Iterator[list[int]]:
    """The GPU instances of somebody else that leave no place on n1."""
    hands = cluster.hands("n1")
    made = [hands.make(0, "1g.24gb").id for _ in range(4)]
    yield made
    for instance in hands.instances():
        if instance.id in made:
            hands.destroy(0, instance.id)


def put_back(cluster: Cluster, job: int | str, times: int = 1) -> dict[str, str]:
    """The fields of a job that was put back into the queue for want of a place, once it waits there again."""

    def waits() -> dict[str, str]:
        fields = cluster.job(job)
        return fields if fields["JobState"] == "PENDING" and int(fields["Restarts"]) >= times else {}

    return cluster.until(waits, f"job {job} put back, but {cluster.job(job)}")


# No place now.


@pytest.mark.usefixtures("full")
def test_a_job_without_a_place_is_put_back_and_neither_held_nor_its_node_drained(cluster: Cluster) -> None:
    job = cluster.sbatch("--gres=migmem:8000", "-wn1", script="echo started")
    fields = put_back(cluster, job)

    assert fields["Priority"] != "0"
    assert fields["Reason"] in ("BeginTime", "None", "Resources", "Priority")
    assert set(cluster.node_states().values()) <= FREE
    assert cluster.node("n1")["Reason"] == ""
    assert cluster.output(job) == ""


def test_a_job_that_was_put_back_starts_soon_after_there_is_a_place(cluster: Cluster, full: list[int]) -> None:
    job = cluster.sbatch("--gres=migmem:8000", "-wn1", script="echo started")
    put_back(cluster, job)
    cluster.hands("n1").destroy(0, full[0])
    cluster.wait(job, "COMPLETED", within=25)

    assert cluster.output(job).count("started") == 1


@pytest.mark.usefixtures("full")
def test_a_job_that_must_not_be_requeued_is_put_back_and_keeps_what_its_user_said(cluster: Cluster) -> None:
    job = cluster.sbatch("--no-requeue", "--gres=migmem:8000", "-wn1", script="echo started")
    put_back(cluster, job)
    cluster.until(lambda: cluster.job(job)["Requeue"] == "0", "--no-requeue again")

    assert cluster.output(job) == ""


def test_only_the_task_without_a_place_is_put_back_and_not_its_array(cluster: Cluster, full: list[int]) -> None:
    cluster.hands("n1").destroy(0, full[0])
    # The id of the last task is the id of the array.
    array = cluster.sbatch("--gres=migmem:8000", "-wn1", "--array=1-2", script="sleep 100")
    tasks = (f"{array}_1", f"{array}_2")
    cluster.until(lambda: {cluster.job(task)["Restarts"] != "0" for task in tasks} == {True, False}, "one put back")
    (running,) = (task for task in tasks if cluster.job(task)["Restarts"] == "0")

    assert cluster.state(running) == "RUNNING"
    assert len(allocations(cluster, "n1")) == 1


@pytest.mark.usefixtures("full")
def test_an_srun_without_a_place_is_told_why_and_ends(cluster: Cluster) -> None:
    ran = cluster.srun("--gres=migmem:8000", "-wn1", "hostname", check=False)

    assert ran.returncode != 0
    assert f"srun: gres-mig: {FULL}" in ran.stderr
    assert ran.stdout == ""
    cluster.assert_healthy()


@pytest.mark.usefixtures("full")
def test_an_salloc_without_a_place_is_told_why_and_ends(cluster: Cluster) -> None:
    ran = cluster.run("salloc", "--gres=migmem:8000", "-wn1", "hostname", check=False)

    assert ran.returncode != 0
    assert f"salloc: gres-mig: {FULL}" in ran.stderr
    assert ran.stdout == ""
    cluster.assert_healthy()


@pytest.mark.usefixtures("full")
def test_a_job_without_a_place_on_one_of_its_nodes_is_put_back_as_a_whole(cluster: Cluster) -> None:
    job = cluster.sbatch("--gres=migmem:8000", "-N2", script="echo started")
    put_back(cluster, job)

    assert cluster.instances("n2") == []
    assert cluster.output(job) == ""


def test_waiting_too_long_for_a_busy_gpu_is_no_place_and_no_fault(cluster: Cluster) -> None:
    (gpu,) = cluster.hands("n1").uuids
    with locked(cluster, "n1", gpu):
        job = cluster.sbatch("--gres=migmem:8000", "-wn1", script="echo started")
        put_back(cluster, job)

    assert cluster.output(job) == ""


@pytest.mark.usefixtures("full")
def test_a_job_that_is_cancelled_while_it_is_put_back_stays_cancelled(cluster: Cluster) -> None:
    # Between the question and the requeue, which then comes too late.
    with cluster.stand_before(
        "scontrol", f"touch {cluster.home}/asked; while [ ! -e {cluster.home}/go ]; do sleep 0.05; done"
    ):
        job = cluster.sbatch("--gres=migmem:8000", "-wn1", script="echo started")
        cluster.until((cluster.home / "asked").exists, "the requeue")
        cluster.scancel(job)
        cluster.touch("go")
        fields = cluster.wait(job, "CANCELLED")

    assert fields["Restarts"] == "0"
    assert cluster.output(job) == ""


# The user's mistake.


def test_a_mistake_fails_the_job_with_a_text_and_never_drains_a_node(cluster: Cluster) -> None:
    array = cluster.sbatch(
        "--gres=migmem:500000", "--array=1-8", f"--output={cluster.home}/%A_%a.out", script="echo on"
    )
    for task in range(1, 9):
        fields = cluster.wait(f"{array}_{task}", "FAILED", within=25)
        assert fields["ExitCode"] == "1:0"
        assert fields["Restarts"] == "0"
        assert cluster.output(f"{array}_{task}").splitlines()[0] == f"gres-mig: {TOO_BIG}"
    assert set(cluster.node_states().values()) <= FREE


def test_a_mistake_of_an_srun_is_in_its_output(cluster: Cluster) -> None:
    ran = cluster.srun("--gres=migmem:500000", "-n2", "hostname", check=False)

    assert ran.returncode != 0
    assert ran.stdout == f"gres-mig: {TOO_BIG}\n"


def test_a_heterogeneous_job_fails_with_a_text(cluster: Cluster) -> None:
    job = cluster.sbatch("--gres=migmem:8000", "-wn1", ":", "--gres=migmem:8000", "-wn2", script="echo started")
    cluster.wait(job, "FAILED")

    assert cluster.output(job).startswith("gres-mig: a heterogeneous job cannot have migmem; submit its components")
    assert "started" not in cluster.output(job)


# The node's fault.


def test_a_fault_of_the_node_drains_it_with_what_to_do_and_the_job_runs_elsewhere(cluster: Cluster) -> None:
    hands = cluster.hands("n1")
    hands.plant("nvmlDeviceCreateGpuInstanceWithPlacement", "returns", code=999, times=0)
    cluster.scontrol("update", "NodeName=n2", "State=DRAIN", "Reason=test")
    job = cluster.sbatch("--gres=migmem:8000", script="echo on $SLURMD_NODENAME")
    reason = cluster.wait_drained("n1")
    cluster.resume("n2")
    fields = put_back(cluster, job)
    cluster.wait(job, "COMPLETED", within=25)
    hands.mend()
    cluster.resume("n1")

    (gpu,) = hands.uuids
    assert reason.startswith("gres-mig: NVML: creating a GPU instance")
    assert gpu in reason
    assert reason.endswith("then: scontrol update nodename=n1 state=resume")
    assert "held" not in fields["Reason"]
    assert cluster.output(job).splitlines()[-1] == "on n2"
    assert gpu in (cluster.gpus("n1") / "run" / "last-fault").read_text()


def test_a_fault_of_the_node_is_told_to_an_srun(cluster: Cluster) -> None:
    hands = cluster.hands("n1")
    hands.plant("nvmlDeviceCreateGpuInstanceWithPlacement", "returns", code=999, times=0)
    ran = cluster.srun("--gres=migmem:8000", "-wn1", "hostname", check=False)
    cluster.wait_drained("n1")
    hands.mend()
    cluster.resume("n1")

    assert ran.returncode != 0
    assert "srun: gres-mig: n1 cannot make GPU instances: creating a GPU instance" in ran.stderr


@pytest.mark.parametrize("command", ["sbatch", "srun"])
def test_a_job_that_is_cancelled_before_a_fault_stays_so_and_the_node_can_be_resumed(
    cluster: Cluster, command: str
) -> None:
    hands = cluster.hands("n1")
    hang = hands.plant("nvmlDeviceCreateGpuInstanceWithPlacement", "hangs", times=0)
    if command == "sbatch":
        job = cluster.sbatch("--gres=migmem:8000", "-wn1", script="echo started")
    else:
        cluster.popen("srun", "--gres=migmem:8000", "-wn1", "hostname")
        running = cluster.until(lambda: cluster.run("squeue", "-h", "-tR", "-o%A").stdout, "the job of the srun")
        job = int(running)
    cluster.until(lambda: hands.fired(hang), "the hang")
    cluster.scancel(job)
    cluster.wait_drained("n1")
    fields = cluster.wait(job, "CANCELLED")
    hands.mend()
    (gpu,) = hands.uuids
    cluster.until(lambda: not cluster.instances("n1"), "what was being made is undone")
    gres_mig(cluster, "n1", "unfence", gpu)
    cluster.resume("n1")
    log = (cluster.folder / "log" / "slurmd.n1.log").read_text()

    assert fields["Restarts"] == "0"
    assert f"Retrying prolog complete RPC for JobId={job}" not in log


def test_a_driver_that_hangs_is_a_fault_and_the_reason_says_how_to_go_on(cluster: Cluster) -> None:
    hands = cluster.hands("n1")
    hang = hands.plant("nvmlDeviceCreateGpuInstanceWithPlacement", "hangs")
    job = cluster.sbatch("--gres=migmem:8000", "-wn1", script="echo on $SLURMD_NODENAME")
    reason = cluster.wait_drained("n1")
    (gpu,) = hands.uuids
    hands.release(hang)
    hands.mend()
    cluster.until(lambda: not cluster.instances("n1"), "what was being made is undone")
    gres_mig(cluster, "n1", "unfence", gpu)
    cluster.resume("n1")
    again = cluster.srun("--gres=migmem:8000", "-wn1", "/bin/sh", "-c", "echo on $SLURMD_NODENAME")

    assert f"run: gres-mig unfence {gpu}" in reason
    assert cluster.state(job) == "PENDING"
    assert again.stdout.splitlines()[-1] == "on n1"


def test_hooks_without_python_are_a_fault_for_jobs_with_migmem_only(cluster: Cluster) -> None:
    with cluster.hook_settings("PYTHON=/nowhere/python"):
        plain = cluster.sbatch("-wn1", script="echo started")
        cluster.wait(plain, "COMPLETED")
        states = cluster.node_states()
        job = cluster.sbatch("--gres=migmem:8000", "-wn1", script="echo started")
        reason = cluster.wait_drained("n1")
    cluster.scancel(job)
    cluster.resume("n1")

    assert states["n1"] in FREE
    # Of the prolog, or of the epilog that follows it.
    assert "run: /nowhere/python -I -c 'import gres_mig_slurm." in reason
    assert cluster.output(plain) == "started\n"


# No answer.


def test_without_an_answer_only_tasks_that_asked_for_migmem_fail(cluster: Cluster) -> None:
    # The prolog, which is root's, gets none; the user is answered.
    with cluster.stand_before("squeue", '[ "$(id -u)" != 0 ] || exit 1'):
        plain = cluster.sbatch("-wn1", script="echo started")
        job = cluster.sbatch("--gres=migmem:8000", "-wn1", script="echo started")
        cluster.wait(plain, "COMPLETED")
        cluster.wait(job, "FAILED")

    assert cluster.output(plain) == "started\n"
    assert cluster.output(job).startswith("gres-mig: this node could not learn in time what the job asked for")
    assert "started" not in cluster.output(job)
    assert cluster.instances("n1") == []


def test_a_job_whose_prolog_was_left_out_is_put_back_and_runs_later(cluster: Cluster) -> None:
    # As if it had not been there: a prolog after ours takes away what ours handed over, once.
    after = cluster.folder / "after"
    after.write_text(
        f"#!/bin/sh\n[ -e {cluster.home}/once ] && exit\n/bin/rm {cluster.handover}/*\n: >{cluster.home}/once\n"
    )
    after.chmod(0o755)
    with cluster.hook_settings(f"PROLOG_CHAIN={after}"):
        job = cluster.sbatch("--gres=migmem:8000", "-wn1", script="echo started")
        put_back(cluster, job)
        cluster.wait(job, "COMPLETED", within=25)

    assert cluster.output(job).count("started") == 1
    assert cluster.output(job).count("gres-mig: 1g.24gb") == 1


def test_a_task_of_which_nobody_knows_what_it_asked_for_sees_no_gpu(cluster: Cluster) -> None:
    with cluster.stand_before("squeue", "exit 1"):
        job = cluster.sbatch("-wn1", "--export=ALL,CUDA_VISIBLE_DEVICES=0", script='echo "[$CUDA_VISIBLE_DEVICES]"')
        cluster.wait(job, "COMPLETED")

    assert cluster.output(job) == "[]\n"


# The epilog.


def test_an_instance_that_is_still_in_use_is_recorded_and_given_back_later(cluster: Cluster) -> None:
    job = cluster.sbatch("--gres=migmem:8000", "-wn1", script="sleep 100")
    cluster.until(lambda: allocations(cluster, "n1"), "an instance")
    (instance,) = cluster.instances("n1")
    with subprocess.Popen(["sleep", "100"]) as holder:
        cluster.hands("n1").hold(instance.gpu, instance.id, 0, pid=holder.pid)
        cluster.scancel(job)
        cluster.wait(job, "CANCELLED")
        (record,) = cluster.state_of("n1")["records"]
        state = cluster.node("n1")["State"]
        holder.kill()
    gres_mig(cluster, "n1", "reclaim", "--orphans")

    assert state == "IDLE"
    assert str(holder.pid) in record["stuck"]["holders"][0]
    assert cluster.instances("n1") == []


def test_a_driver_that_hangs_in_an_epilog_is_recorded_and_drains_nothing(cluster: Cluster) -> None:
    hands = cluster.hands("n1")
    job = cluster.sbatch("--gres=migmem:8000", "-wn1", script="sleep 100")
    cluster.until(lambda: allocations(cluster, "n1"), "an instance")
    hands.plant("nvmlGpuInstanceDestroy", "hangs")
    cluster.scancel(job)
    cluster.wait(job, "CANCELLED")
    state = cluster.node("n1")["State"]
    recorded = cluster.state_of("n1")
    hands.mend()
    (gpu,) = hands.uuids
    cluster.until(lambda: not cluster.instances("n1"), "the instance gone")
    gres_mig(cluster, "n1", "unfence", gpu)

    assert state == "IDLE"
    assert list(recorded["fences"]) == [gpu]
    assert [record["kind"] for record in recorded["records"]] == ["release"]


def test_an_end_that_cannot_be_recorded_drains_the_node_with_what_to_do(cluster: Cluster) -> None:
    job = cluster.sbatch("--gres=migmem:8000", "-wn1", script="sleep 100")
    cluster.until(lambda: allocations(cluster, "n1"), "an instance")
    # Not even root writes a file where there is a folder.
    blocked = cluster.gpus("n1") / "state" / "state.json.new"
    blocked.mkdir()
    cluster.scancel(job)
    reason = cluster.wait_drained("n1")
    blocked.rmdir()
    gres_mig(cluster, "n1", "reclaim", f"slurm:lab:{job}")
    cluster.resume("n1")

    assert reason.startswith("gres-mig: STATE: writing ")
    assert "state.json" in reason
    assert cluster.instances("n1") == []


def allocations(cluster: Cluster, node: str) -> list[dict[str, Any]]:
    """The instances that a node has given to jobs."""
    return [record for record in cluster.state_of(node)["records"] if record["kind"] == "allocation"]


@contextmanager
def locked(cluster: Cluster, node: str, gpu: str) -> Iterator[None]:
    """A GPU on which something else is being made all the while."""
    folder = cluster.gpus(node) / "run"
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder / f"gpu-{gpu}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def gres_mig(cluster: Cluster, node: str, *words: str) -> str:
    """What an admin runs on a node."""
    config = str(cluster.gpus(node) / "config.toml")
    command = [sys.executable, "-m", "gres_mig", "--config", config, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout

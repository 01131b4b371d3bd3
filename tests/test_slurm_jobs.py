"""What users do, on a real cluster: every kind of job gets the instance it asked for, and gives it back."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import Cluster, brought_up, require_slurm

require_slurm()

MINE = "echo mine=$CUDA_VISIBLE_DEVICES"
TOLD = re.compile(r"^gres-mig: (\S+) \(([\d,]+) MiB\) for (\S+) MiB on (GPU-\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two nodes: two RTX PRO 6000 on n1, one on n2; a partition whose jobs requeue others'."""
    urgent = "PartitionName=urgent Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP"
    extra = f"PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\nOverTimeLimit=0\n{urgent}"
    with brought_up(request, partitions=extra) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def overdue(cluster: Cluster) -> int:
    """A job whose time is over soon and that does not listen to SIGTERM; Slurm looks every half minute."""
    job = cluster.sbatch("--gres=migmem:8000", "-wn2", "--time=1", script="trap '' TERM; while :; do sleep 0.1; done")
    cluster.wait(job, "RUNNING")
    cluster.scontrol("update", f"JobId={job}", "EndTime=now+1")
    return job


@pytest.fixture(autouse=True)
def clean(cluster: Cluster, overdue: int) -> Iterator[None]:
    """After each test nothing is left of it, no node is drained and no job held."""
    yield
    cluster.cancel_all(but=(overdue,))
    cluster.assert_healthy()


def mine(text: str) -> list[str]:
    """The devices that a job's processes said were theirs, in order."""
    return re.findall(r"^mine=(\S*)$", text, re.MULTILINE)


def uuids(cluster: Cluster, node: str | None = None) -> set[str]:
    """The MIG devices on the hardware."""
    return {uuid for instance in cluster.instances(node) for uuid in instance.mig_uuids}


def test_a_batch_job_runs_on_an_instance_that_was_made_for_it_and_is_gone_afterwards(cluster: Cluster) -> None:
    job = cluster.sbatch("--gres=migmem:8000", "-wn1", script=f"{MINE}\nenv | grep GRES_MIG_\n{wait_for('go')}")
    cluster.until(lambda: "GRES_MIG_ISO" in cluster.output(job), "the job's output")
    (instance,) = cluster.instances("n1")
    cluster.touch("go")
    cluster.wait(job, "COMPLETED")

    assert instance.profile == "1g.24gb"
    assert mine(cluster.output(job)) == list(instance.mig_uuids)
    assert TOLD.findall(cluster.output(job)) == [("1g.24gb", "24,192", "8,000", instance.gpu_uuid)]
    assert "GRES_MIG_MEMORY_MIB=24192" in cluster.output(job)
    assert cluster.instances("n1") == []
    assert list(cluster.handover.glob(f"{job}.*")) == []


def test_sizes_are_counted_as_slurm_counts_them(cluster: Cluster) -> None:
    asked = {"8000": "1g.24gb", "8K": "1g.24gb", "24K": "2g.48gb", "50000": "4g.96gb"}
    jobs = {text: cluster.sbatch(f"--gres=migmem:{text}", "-wn1", script="echo $GRES_MIG_PROFILE") for text in asked}
    for job in jobs.values():
        cluster.wait(job, "COMPLETED")

    assert {text: cluster.output(job).split()[-1] for text, job in jobs.items()} == asked


def test_a_job_without_migmem_keeps_what_it_has(cluster: Cluster) -> None:
    script = f"{MINE}\nenv | grep -c GRES_MIG_"
    plain = cluster.sbatch("--export=ALL,CUDA_VISIBLE_DEVICES=own", script=script)
    zero = cluster.sbatch("--gres=migmem:0", "--export=ALL,CUDA_VISIBLE_DEVICES=own", script=script)
    for job in (plain, zero):
        cluster.wait(job, "FAILED")

    assert cluster.output(plain) == cluster.output(zero) == "mine=own\n0\n"


@pytest.mark.parametrize("export", ["ALL,CUDA_VISIBLE_DEVICES=3,NVIDIA_VISIBLE_DEVICES=all", "NONE"])
def test_what_a_user_sets_does_not_win(cluster: Cluster, export: str) -> None:
    ran = cluster.srun(
        f"--export={export}", "--gres=migmem:8000", "/bin/sh", "-c", f"{MINE}; {MINE.replace('CUDA', 'NVIDIA')}"
    )

    device, same = mine(ran.stdout)
    assert device == same
    assert device.startswith("MIG-")


def test_all_tasks_and_steps_of_a_job_share_its_instance_and_are_told_once(cluster: Cluster) -> None:
    step = f"srun --overlap -n2 /bin/sh -c {shlex.quote(MINE)}"
    job = cluster.sbatch("--gres=migmem:8000", "-n2", script=f"{MINE}\n{step}\nsrun --gres=none /bin/sh -c '{MINE}'")
    cluster.wait(job, "COMPLETED")

    said = cluster.output(job)
    assert len(mine(said)) == 5
    assert len(set(mine(said))) == 1
    assert len(TOLD.findall(said)) == 1


def test_the_tasks_of_an_srun_share_its_instance_and_are_told_once(cluster: Cluster) -> None:
    ran = cluster.srun("--gres=migmem:8000", "-n3", "/bin/sh", "-c", MINE)

    assert len(mine(ran.stdout)) == 3
    assert len(set(mine(ran.stdout))) == 1
    assert len(TOLD.findall(ran.stdout)) == 1


def test_an_salloc_holds_its_instance_from_step_to_step(cluster: Cluster) -> None:
    step = f"srun /bin/sh -c {shlex.quote(MINE)}"
    ran = cluster.run("salloc", "--gres=migmem:8000", "/bin/sh", "-c", f"{step}; {step}")

    first, second = mine(ran.stdout)
    assert first == second
    assert first.startswith("MIG-")
    assert len(TOLD.findall(ran.stdout)) == 1


def test_each_task_of_an_array_has_an_instance_of_its_own(cluster: Cluster) -> None:
    # So many that Slurm's count and the places are the same number.
    options = ("--gres=migmem:24000", "--array=1-6", f"--output={cluster.home}/%A_%a.out")
    array = cluster.sbatch(*options, script=f"{MINE}\n{wait_for('go6')}")
    tasks = [f"{array}_{task}" for task in range(1, 7)]
    cluster.until(lambda: all(mine(cluster.output(task)) for task in tasks), "all tasks at once", within=30)
    there = uuids(cluster)
    cluster.touch("go6")
    for task in tasks:
        cluster.wait(task, "COMPLETED")

    said = [mine(cluster.output(task)) for task in tasks]
    assert len({device for (device,) in said}) == 6
    assert {device for (device,) in said} <= there


def test_a_job_of_two_nodes_has_an_instance_on_each(cluster: Cluster) -> None:
    step = f"srun --overlap /bin/sh -c {shlex.quote('echo $SLURMD_NODENAME; ' + MINE)}"
    job = cluster.sbatch("--gres=migmem:8000", "-N2", script=f"{step}\n{wait_for('go2')}")
    cluster.until(lambda: len(mine(cluster.output(job))) == 2, "both tasks")
    there = uuids(cluster)
    cluster.touch("go2")
    cluster.wait(job, "COMPLETED")

    said = cluster.output(job)
    assert len(set(mine(said))) == 2
    assert set(mine(said)) <= there
    assert {"n1", "n2"} <= set(said.split())
    assert len(TOLD.findall(said)) == 2
    assert cluster.instances("n1") == []


def test_the_request_counts_and_not_what_exclusive_allocates(cluster: Cluster) -> None:
    asked = cluster.sbatch("--exclusive", "--gres=migmem:8000", "-wn1", script="echo $GRES_MIG_PROFILE")
    silent = cluster.sbatch("--exclusive", "-wn1", script=MINE)
    for job in (asked, silent):
        cluster.wait(job, "COMPLETED")

    assert cluster.output(asked).split()[-1] == "1g.24gb"
    assert cluster.output(silent) == "mine=\n"


def test_a_requeued_job_gets_an_instance_of_its_own(cluster: Cluster) -> None:
    job = cluster.sbatch("--gres=migmem:8000", "--open-mode=append", "-wn1", script=f"{MINE}\n{wait_for('go3')}")
    cluster.until(lambda: mine(cluster.output(job)), "the first run")
    (first,) = cluster.instances("n1")
    cluster.scontrol("requeue", str(job))
    # After cred_expire, so that slurmd does not take the new run for the old one (22.05).
    cluster.until(lambda: len(mine(cluster.output(job))) == 2, "the second run", within=30)
    (second,) = cluster.instances("n1")
    cluster.touch("go3")
    cluster.wait(job, "COMPLETED")

    assert mine(cluster.output(job)) == [*first.mig_uuids, *second.mig_uuids]
    assert first.epoch != second.epoch


def test_a_pending_job_that_its_user_changes_gets_what_it_says_in_the_end(cluster: Cluster) -> None:
    job = cluster.sbatch("--hold", "--gres=migmem:8000", script="echo $GRES_MIG_PROFILE $GRES_MIG_REQUESTED")
    cluster.scontrol("update", f"JobId={job}", "Gres=migmem:40000", user="games")
    cluster.scontrol("release", str(job))
    cluster.wait(job, "COMPLETED")

    assert cluster.output(job).split()[-2:] == ["2g.48gb", "40000"]


def test_a_job_that_is_cancelled_while_it_waits_never_had_an_instance(cluster: Cluster) -> None:
    job = cluster.sbatch("--hold", "--gres=migmem:8000", script=MINE)
    cluster.scancel(job)

    assert cluster.wait(job, "CANCELLED")["Restarts"] == "0"
    assert cluster.output(job) == ""


def test_a_job_that_is_cancelled_while_its_instance_is_made_leaves_nothing(cluster: Cluster) -> None:
    hands = cluster.hands("n1")
    hands.configure(create_s=1.0, log="mutating")
    job = cluster.sbatch("--gres=migmem:8000", "-wn1", script=MINE)
    cluster.until(lambda: records(cluster, "n1"), "the intent")
    cluster.scancel(job)
    cluster.wait(job, "CANCELLED")
    hands.configure(create_s=0.0)

    assert cluster.instances("n1") == []
    assert records(cluster, "n1") == []
    assert cluster.output(job) == ""


def test_a_job_that_is_cancelled_while_its_instance_is_given_back_leaves_nothing(cluster: Cluster) -> None:
    hands = cluster.hands("n1")
    hands.configure(destroy_s=0.5)
    job = cluster.sbatch("--gres=migmem:8000", "-wn1", script=MINE)
    cluster.until(lambda: cluster.state(job) == "COMPLETING", "its epilog")
    cluster.run("scancel", str(job), check=False)
    cluster.wait(job, "COMPLETED", "CANCELLED")
    hands.configure(destroy_s=0.0)

    assert cluster.instances("n1") == []


def test_the_end_of_one_job_leaves_the_same_users_other_job_alone(cluster: Cluster) -> None:
    first, second = (cluster.sbatch("--gres=migmem:8000", "-wn1", script=f"{MINE}\nsleep 60") for _ in range(2))
    cluster.until(lambda: all(mine(cluster.output(job)) for job in (first, second)), "both running")
    cluster.scancel(first)
    cluster.wait(first, "CANCELLED")

    assert uuids(cluster, "n1") == set(mine(cluster.output(second)))
    assert cluster.state(second) == "RUNNING"


def test_a_suspended_job_keeps_its_instance(cluster: Cluster) -> None:
    job = cluster.sbatch("--gres=migmem:8000", "-wn1", script=f"{MINE}\n{wait_for('go4')}\n{MINE}")
    cluster.until(lambda: mine(cluster.output(job)), "running")
    cluster.scontrol("suspend", str(job))
    cluster.wait(job, "SUSPENDED")
    kept = uuids(cluster, "n1")
    cluster.touch("go4")
    cluster.scontrol("resume", str(job))
    cluster.wait(job, "COMPLETED")

    first, second = mine(cluster.output(job))
    assert kept == {first} == {second}


def test_a_job_that_is_preempted_has_given_its_instance_back_before_the_other_starts(cluster: Cluster) -> None:
    victim = cluster.sbatch("--gres=migmem:60000", "--open-mode=append", "-wn1", script=f"{MINE}\nsleep 60")
    filler = cluster.sbatch("--gres=migmem:60000", "-wn1", script=f"{MINE}\nsleep 60")
    cluster.until(lambda: all(mine(cluster.output(job)) for job in (victim, filler)), "both running")
    urgent = cluster.sbatch("--gres=migmem:80000", "-purgent", "-wn1", script=MINE)
    cluster.wait(urgent, "COMPLETED")

    assert mine(cluster.output(urgent))[0].startswith("MIG-")
    assert [cluster.job(job)["Restarts"] for job in (victim, filler, urgent)].count("0") == 2


def test_a_job_that_outlives_its_time_gives_its_instance_back(cluster: Cluster, overdue: int) -> None:
    cluster.wait(overdue, "TIMEOUT", within=60)

    assert cluster.instances("n2") == []


# The run that HAMi published on RTX PRO 6000, through Slurm.


def test_four_jobs_of_8000_share_a_gpu_and_the_fifth_opens_the_next(cluster: Cluster) -> None:
    jobs = [cluster.sbatch("--gres=migmem:8000", "-wn1", script=f"{MINE}\nsleep 60") for _ in range(5)]
    cluster.until(lambda: all(mine(cluster.output(job)) for job in jobs), "five running")
    instances = cluster.instances("n1")

    assert sorted(instance.gpu for instance in instances) == [0, 0, 0, 0, 1]
    assert {instance.profile for instance in instances} == {"1g.24gb"}
    assert uuids(cluster, "n1") == {device for job in jobs for device in mine(cluster.output(job))}


def test_mixed_sizes_share_a_gpu(cluster: Cluster) -> None:
    jobs = [
        cluster.sbatch(f"--gres=migmem:{size}", "-wn1", script=f"{MINE}\nsleep 60") for size in (8000, 40000, 20000)
    ]
    cluster.until(lambda: all(mine(cluster.output(job)) for job in jobs), "three running")
    instances = cluster.instances("n1")

    assert sorted((instance.gpu, instance.profile) for instance in instances) == [
        (0, "1g.24gb"),
        (0, "1g.24gb"),
        (0, "2g.48gb"),
    ]


def test_a_neighbours_program_goes_on_while_a_job_is_cancelled(cluster: Cluster) -> None:
    neighbour, other = working(cluster, "n1"), working(cluster, "n1")
    before = counted(cluster, neighbour)
    cluster.scancel(other, user="root")
    cluster.wait(other, "CANCELLED")
    (left,) = cluster.instances("n1")
    cluster.until(lambda: counted(cluster, neighbour) > before + 3, "the neighbour counting on")

    assert list(left.mig_uuids) == opened(cluster, neighbour)
    assert cluster.state(neighbour) == "RUNNING"


def test_a_job_goes_on_with_its_instance_while_slurmd_is_killed_and_started_again(cluster: Cluster) -> None:
    job = working(cluster, "n1")
    before = cluster.instances("n1")
    cluster.kill("n1")
    count = counted(cluster, job)
    cluster.until(lambda: counted(cluster, job) > count + 3, "counting without slurmd")
    cluster.start("n1")
    cluster.wait_up()
    count = counted(cluster, job)
    cluster.until(lambda: counted(cluster, job) > count + 3, "counting with the new slurmd")

    assert [(i.epoch, i.mig_uuids) for i in cluster.instances("n1")] == [(i.epoch, i.mig_uuids) for i in before]
    assert cluster.state(job) == "RUNNING"


def test_a_job_that_ends_while_slurmd_is_away_gives_its_instance_back_later(cluster: Cluster) -> None:
    job = cluster.sbatch("--gres=migmem:8000", "-wn1", script=f"{MINE}\n{wait_for('go5')}\necho over")
    cluster.until(lambda: mine(cluster.output(job)), "running")
    cluster.kill("n1")
    cluster.touch("go5")
    cluster.until(lambda: "over" in cluster.output(job), "its end")
    cluster.start("n1")
    cluster.wait(job, "COMPLETED", within=30)

    assert cluster.instances("n1") == []


def wait_for(name: str) -> str:
    """What a script says to wait until a test touches that file in its working directory."""
    return f"while [ ! -e {name} ]; do sleep 0.05; done"


def records(cluster: Cluster, node: str) -> list[dict[str, Any]]:
    """The records of a node."""
    return cluster.state_of(node)["records"]


def working(cluster: Cluster, node: str) -> int:
    """A job, root's for it writes to the simulated hardware, with a program that counts on its MIG device."""
    program = f"exec {sys.executable} -m gres_mig simulate work {cluster.gpus(node)}"
    script = f"export PYTHONPATH={Path(__file__).parent.parent}\n{program}"
    job = cluster.sbatch("--gres=migmem:8000", f"-w{node}", script=script, user="root")
    cluster.until(lambda: counted(cluster, job), f"counting: {cluster.output(job)}")
    return job


def opened(cluster: Cluster, job: int) -> list[str]:
    """The device that a job's program opened."""
    return re.findall(r"^opened ([^\s,]+)", cluster.output(job), re.MULTILINE)


def counted(cluster: Cluster, job: int) -> int:
    """How far a job's program has come."""
    found = re.findall(r"^([0-9]+) [0-9.]+$", cluster.output(job), re.MULTILINE)
    return int(found[-1]) if found else 0

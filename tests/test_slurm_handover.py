"""Hand-overs of jobs whose epilog never came, on a real cluster: swept once the job is over, and no others."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster, brought_up, require_slurm

from gres_mig import config
from gres_mig.simulator.program import command, environment
from gres_mig.values import replace
from gres_mig_slurm import handover
from gres_mig_slurm.liveness import Liveness

require_slurm()


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two nodes whose epilog is another one."""
    with brought_up(request, extra="Epilog=/bin/true") as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def clean(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SLURM_CONF is the cluster's; after a test nobody runs and there is no hand-over."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    yield
    cluster.cancel_all(leaving=cluster.instances())
    cluster.until(lambda: sweep(cluster) == set(), "all hand-overs swept")
    cluster.assert_healthy()


def sweep(cluster: Cluster, node: str = "n1", *, young_s: float = 0.0) -> set[str]:
    """The hand-overs that the service's pass leaves there."""
    settings = replace(config.load(cluster.gpus(node) / "config.toml"), young_s=young_s)
    handover.sweep(replace(settings, run_dir=str(cluster.handover.parent)), Liveness(node=node))
    return set(os.listdir(cluster.handover)) if cluster.handover.exists() else set()


def ended(cluster: Cluster, *options: str) -> int:
    """A job that is over, and whose hand-over is there."""
    job = cluster.sbatch("-wn1", *options)
    cluster.wait(job, "COMPLETED")
    assert (cluster.handover / f"{job}.n1").exists()
    return job


def test_what_jobs_left_that_are_over_is_swept_and_what_a_living_one_needs_is_not(cluster: Cluster) -> None:
    running = cluster.sbatch("-wn1", "--gres=migmem:8000", script="echo begun; sleep 300")
    plain = cluster.sbatch("-wn2", script="echo begun; sleep 300")
    cluster.until(lambda: "begun" in cluster.output(running) and "begun" in cluster.output(plain), "both running")
    ended(cluster, "--gres=migmem:8000")
    ended(cluster)
    (cluster.handover / f".{ended(cluster)}.n1.4711").touch()

    left = sweep(cluster)

    assert left == {f"{running}.n1", f"{plain}.n2"}
    again = cluster.srun("--overlap", f"--jobid={running}", "printenv", "CUDA_VISIBLE_DEVICES")
    assert again.stdout.startswith("MIG-")


def test_a_job_whose_node_died_keeps_its_own_until_it_is_over(cluster: Cluster) -> None:
    job = cluster.sbatch("-wn1", "--no-requeue", "--gres=migmem:8000", script="echo begun; exec sleep 300")
    cluster.until(lambda: "begun" in cluster.output(job), "running")
    cluster.kill("n1")
    cluster.kill_steps(job)
    while_running = sweep(cluster)
    cluster.scontrol("update", "NodeName=n1", "State=DOWN", "Reason=test")
    cluster.wait(job, "NODE_FAIL", "CANCELLED", "FAILED")

    afterwards = sweep(cluster)

    cluster.start("n1")
    cluster.resume("n1")
    assert while_running == {f"{job}.n1"}
    assert afterwards == set()


def test_one_of_a_job_that_is_just_beginning_is_never_swept(cluster: Cluster) -> None:
    asked, go = cluster.folder / "asked-now", cluster.folder / "go"
    with cluster.stand_before("squeue", f"touch {asked}; while [ ! -e {go} ]; do sleep 0.05; done"):
        job = cluster.sbatch("-wn1", "--gres=migmem:8000", script="echo begun")
        cluster.until(asked.exists, "its prolog at the controller")
        while_beginning = sweep(cluster)
        go.touch()
        cluster.wait(job, "COMPLETED")

    assert while_beginning == {f"{job}.n1"}
    assert "begun" in cluster.output(job)


def test_one_of_a_job_that_waits_to_run_again_stays(cluster: Cluster) -> None:
    job = cluster.sbatch("-wn1", "--gres=migmem:8000", script="echo begun; sleep 300")
    cluster.until(lambda: "begun" in cluster.output(job), "running")
    cluster.scontrol("requeuehold", str(job))
    cluster.until(lambda: cluster.state(job) == "PENDING", "put back")

    left = sweep(cluster)

    cluster.scancel(job)
    assert left == {f"{job}.n1"}


def test_while_nobody_knows_who_is_over_nothing_is_swept(cluster: Cluster) -> None:
    job = ended(cluster)
    cluster.stop("slurmctld")
    while_away = sweep(cluster)
    cluster.start("slurmctld")
    cluster.wait_up()

    assert while_away == {f"{job}.n1"}


def test_a_young_one_stays_whatever_the_controller_says(cluster: Cluster) -> None:
    job = ended(cluster)

    assert sweep(cluster, young_s=3600) == {f"{job}.n1"}
    assert sweep(cluster) == set()


def test_what_is_written_anew_while_the_controller_is_asked_stays(cluster: Cluster) -> None:
    """As by the prolog of a job that its admin requeues after its end."""
    file = cluster.handover / f"{ended(cluster)}.n1"

    class Slow(Liveness):
        def is_over(self, job_id: int) -> bool:
            over = super().is_over(job_id)
            file.write_text("STATE=asking\n")
            return over

    handover.sweep(replace(config.load(cluster.gpus("n1") / "config.toml"), young_s=0.0,
                           run_dir=str(cluster.handover.parent)), Slow(node="n1"))  # fmt: skip

    assert file.exists()


def test_a_node_that_never_had_a_hand_over_has_none_to_sweep(cluster: Cluster) -> None:
    settings = config.load(cluster.gpus("n2") / "config.toml")

    handover.sweep(settings, Liveness(node="n2"))

    assert not os.path.exists(handover.folder_of(settings))


def one_pass(cluster: Cluster) -> subprocess.CompletedProcess[str]:
    """One pass of the service on n1."""
    words = command("--config", str(cluster.gpus("n1") / "config.toml"), "serve", "--once")
    return cluster.run(*words, user="root", env=environment(SLURM_CONF=str(cluster.conf), SLURMD_NODENAME="n1"))


def test_the_services_pass_sweeps_and_never_fails_for_it(cluster: Cluster) -> None:
    folder = Path(handover.folder_of(config.load(cluster.gpus("n1") / "config.toml")))
    old = folder / f"{ended(cluster)}.n1"
    folder.mkdir(parents=True)
    old.touch()
    os.utime(old, (0, 0))

    one_pass(cluster)
    swept = not old.exists()
    folder.rmdir()
    folder.touch()
    said = one_pass(cluster).stderr
    folder.unlink()

    assert swept
    assert f"hand-overs of jobs that are over stay: looking through {folder}: Not a directory" in said


def test_only_what_is_said_is_cut_short(tmp_path: Path) -> None:
    preload = f"LD_PRELOAD=/{'l' * 500}"

    handover.write(str(tmp_path), 7, "n1", (*handover.failed("t" * 500), preload))

    said, variable = (tmp_path / "7.n1").read_text().splitlines()[1:]
    assert len(said) == handover.MAX_TEXT
    assert variable == preload

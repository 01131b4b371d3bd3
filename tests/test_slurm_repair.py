"""What is left when daemons, nodes or hooks die, on a real cluster: what ended is given back, what lives never."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster, brought_up, require_slurm

from gres_mig import config
from gres_mig.deadline import operate
from gres_mig.models import Allocation, Owner, Placement, Record, Request
from gres_mig.settle import Outcome
from gres_mig.simulator.program import command, environment
from gres_mig.values import replace
from gres_mig_slurm import controller
from gres_mig_slurm.controller import Unreachable
from gres_mig_slurm.liveness import Liveness

require_slurm()


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two GPUs on n1, one on n2; the controller forgets a job soon."""
    with brought_up(request, extra="MinJobAge=2") as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def clean(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SLURM_CONF is the cluster's; after a test all daemons run and nothing is left."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    yield
    cluster.cancel_all()
    cluster.assert_healthy()


def start(cluster: Cluster, *options: str, node: str = "n1") -> int:
    """A job that runs on an instance of its own and counts on."""
    job = cluster.sbatch(f"-w{node}", "--gres=migmem:8000", *options, script="echo begun; sleep 300")
    cluster.until(lambda: "begun" in cluster.output(job), f"{job} running on its instance")
    return job


def reconcile(cluster: Cluster, node: str = "n1", *, young_s: float = 0.0) -> dict[str, str]:
    """What one pass of the service gives back, by owner; records count as old at once."""
    settings = replace(config.load(cluster.gpus(node) / "config.toml"), young_s=young_s, in_use_wait_s=0.0)
    alive = Liveness(node=node).alive
    outcomes: tuple[Outcome, ...] = operate(settings, lambda allocator: allocator.reconcile(now=True), alive=alive)
    return {str(outcome.record.owner): outcome.verdict for outcome in outcomes}


def record_for(cluster: Cluster, job_id: int, *, node: str = "n1") -> None:
    """An instance for a job of that id, as if its hooks had made it and its epilog never came."""
    settings = config.load(cluster.gpus(node) / "config.toml")
    operate(settings, lambda allocator: allocator.allocate(Owner(f"slurm:lab:{job_id}"), Request(8000)))


def owners(cluster: Cluster, node: str = "n1") -> list[str]:
    """Whose records a node has."""
    return sorted(record["owner"]["name"] for record in cluster.state_of(node)["records"])


# Who lives


def test_a_job_lives_while_its_step_daemons_answer_though_both_daemons_are_down(cluster: Cluster) -> None:
    job = start(cluster)
    before = cluster.instances("n1")
    cluster.kill("n1")
    # Not killed: one that dies within 5 s of a job's start has not saved it, starts it again and drains the node.
    cluster.stop("slurmctld")

    given_back = reconcile(cluster)

    assert given_back == {}
    assert cluster.instances("n1") == before
    cluster.start("slurmctld")
    cluster.start("n1")
    cluster.wait_up()
    assert cluster.state(job) == "RUNNING"
    cluster.scancel(job)
    cluster.until(lambda: not cluster.instances("n1"), "given back by the late epilog")


def test_while_the_controller_is_away_nobody_is_known_to_have_ended(cluster: Cluster) -> None:
    record_for(cluster, 77)
    record_for(cluster, 78)
    cluster.stop("slurmctld")
    began = time.monotonic()
    while_away = reconcile(cluster)
    took = time.monotonic() - began
    cluster.start("slurmctld")
    cluster.wait_up()

    assert while_away == {}
    assert took < 2 * controller.LIMIT_S, "for two records the controller is waited for once"
    assert reconcile(cluster) == {"slurm:lab:77": "released", "slurm:lab:78": "released"}


def test_a_young_record_is_kept_whatever_the_controller_says(cluster: Cluster) -> None:
    record_for(cluster, 77)

    assert reconcile(cluster, young_s=10.0) == {}
    assert reconcile(cluster) == {"slurm:lab:77": "released"}


def test_a_job_that_runs_on_another_node_is_not_alive_here(cluster: Cluster) -> None:
    job = start(cluster, node="n2")
    record_for(cluster, job)

    given_back = reconcile(cluster)

    assert given_back == {f"slurm:lab:{job}": "released"}
    assert len(cluster.instances("n2")) == 1
    assert reconcile(cluster, "n2") == {}


def test_a_job_that_waits_to_run_again_is_not_alive(cluster: Cluster) -> None:
    job = cluster.sbatch("--begin=now+600", "--gres=migmem:8000")
    record_for(cluster, job)

    assert reconcile(cluster) == {f"slurm:lab:{job}": "released"}


def test_another_run_of_a_job_is_another_owner(cluster: Cluster) -> None:
    """Without a step daemon to ask, the submit time tells them apart: a requeue sets it anew."""
    settings = config.load(cluster.gpus("n1") / "config.toml")
    job = cluster.sbatch("-wn1", script="sleep 300")
    cluster.wait(job, "RUNNING")
    seen = controller.seen(job)
    assert seen is not None
    earlier = Owner(f"slurm:lab:{job}", submitted=seen.submitted - 1000)
    (spool := cluster.folder / "no-steps").mkdir()
    liveness = Liveness(node="n1", spool=str(spool))
    record = allocation(earlier)

    assert liveness.alive(record) is False
    assert liveness.alive(replace(record, owner=replace(earlier, submitted=seen.submitted))) is True
    assert liveness.alive(replace(record, owner=replace(earlier, submitted=0))) is False
    assert settings.managed == ("*",)


def test_a_folder_of_step_daemons_that_is_not_there_ends_nobody(cluster: Cluster) -> None:
    assert Liveness(node="n1", spool=str(cluster.folder / "nowhere")).alive(allocation(Owner("slurm:lab:77"))) is None


def test_this_nodes_name_is_found_by_its_host_name(cluster: Cluster) -> None:
    job = start(cluster)
    (spool := cluster.folder / "nothing").mkdir(exist_ok=True)
    seen = controller.seen(job)
    assert seen is not None
    owner = Owner(f"slurm:lab:{job}", submitted=seen.submitted)

    assert Liveness(spool=str(spool)).alive(allocation(owner)) is True
    assert Liveness(node="n2", spool=str(spool)).alive(allocation(owner)) is False


def test_a_step_daemon_that_was_killed_leaves_a_socket_that_does_not_answer(cluster: Cluster) -> None:
    job = start(cluster)
    spool = cluster.folder / "spool.n1"
    stale = sorted(path.name for path in spool.glob(f"n1_{job}.*"))
    cluster.stop("n1")
    cluster.kill_steps(job)
    # A process that is being killed closes its files a moment after its name is gone.
    cluster.until(lambda: Liveness(node="n1")._has_stepd(job) is False, "nobody answers")
    left = sorted(path.name for path in spool.glob(f"n1_{job}.*"))
    cluster.start("n1")
    cluster.wait_up()

    assert left == stale != []


def test_a_name_that_looks_like_another_jobs_record_fools_nobody(cluster: Cluster) -> None:
    job = cluster.sbatch("--begin=now+600", "--job-name=x\nJobId=77 JobState=RUNNING NodeList=n1")
    record_for(cluster, 77)

    assert controller.seen(77) is None
    assert controller.all_seen([77, job]).keys() == {job}
    assert reconcile(cluster) == {"slurm:lab:77": "released"}


# pyslurm

ENDS_ITS_PROCESS = "import os; os._exit(1)"
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
IS_WRONG = "class Job:\n    @staticmethod\n    def load(job): raise IndexError('8K')"
IS_ANOTHER_JOB = """class Job:
    id, state, submit_time, start_time, eligible_time, allocated_nodes = 1, "COMPLETED", 0, None, 0, None
    load = staticmethod(lambda job: Job)"""
KNOWS = """class Job:
    state, submit_time, start_time, eligible_time, allocated_nodes = "RUNNING", 5, 6, 7, "n[1-2]"
    @classmethod
    def load(cls, job):
        cls.id = job
        return cls"""


@pytest.fixture
def python_with(tmp_path: Path) -> Callable[[str], str]:
    """An interpreter whose pyslurm is that text."""

    def make(text: str) -> str:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
        (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
        (site / "pyslurm.py").write_text(text)
        return str(tmp_path / "venv" / "bin" / "python")

    return make


@pytest.mark.parametrize("text", [ENDS_ITS_PROCESS, DIES, IS_WRONG, IS_ANOTHER_JOB, "import nothing"])
def test_a_pyslurm_that_fails_changes_no_answer(cluster: Cluster, python_with: Callable[[str], str], text: str) -> None:
    python, job = python_with(text), cluster.sbatch("--begin=now+600")

    assert controller.seen(job, pyslurm=python) == controller.seen(job)
    assert controller.seen(77, pyslurm=python) is None


def test_a_pyslurm_that_answers_is_believed(cluster: Cluster, python_with: Callable[[str], str]) -> None:
    seen = controller.seen(77, pyslurm=python_with(KNOWS))

    assert seen == controller.Seen(77, "RUNNING", 5, 6, 7, "n[1-2]")
    assert controller.hosts(seen.nodes) == {"n1", "n2"}


def test_no_pyslurm_is_no_fault(cluster: Cluster) -> None:
    assert controller.seen(77, pyslurm="/nowhere/python") is None
    assert "pyslurm" not in sys.modules


# Daemons that die


def test_a_job_goes_on_undisturbed_while_slurmd_is_killed_and_comes_back(cluster: Cluster) -> None:
    job = start(cluster)
    before = cluster.instances("n1")
    cluster.kill("n1")
    while_down = reconcile(cluster)
    cluster.start("n1")
    cluster.wait_up()

    assert while_down == {}
    assert cluster.state(job) == "RUNNING"
    assert cluster.instances("n1") == before


def test_a_job_that_ends_while_slurmd_is_down_is_given_back_by_the_late_epilog(cluster: Cluster) -> None:
    job = start(cluster)
    cluster.kill("n1")
    cluster.kill_steps(job)
    while_down = reconcile(cluster)
    cluster.start("n1")
    cluster.scancel(job)
    cluster.until(lambda: not cluster.instances("n1"), "given back")

    assert while_down == {}, "its epilog is still to come"
    assert owners(cluster) == []


def test_a_prolog_whose_slurmd_was_killed_leaves_nothing_behind(cluster: Cluster) -> None:
    hands = cluster.hands("n1")
    hang = hands.plant("nvmlGpuInstanceCreateComputeInstance", "hangs", count="node")
    job = cluster.sbatch("-wn1", "--gres=migmem:8000")
    cluster.until(lambda: hands.fired(hang), "the prolog in the driver")
    cluster.kill("n1")
    hands.mend()
    cluster.until(lambda: owners(cluster) and cluster.instances("n1")[0].mig_uuids, "the prolog done")
    while_down = reconcile(cluster)
    cluster.scancel(job)
    cluster.start("n1")
    cluster.until(lambda: not cluster.instances("n1"), "given back")

    assert while_down == {}, "the controller says that it runs"


def test_what_a_killed_prolog_began_is_given_back(cluster: Cluster) -> None:
    hands = cluster.hands("n1")
    killed = hands.plant("nvmlGpuInstanceCreateComputeInstance", "kills", after=True, count="node")
    job = cluster.sbatch("-wn1", "--gres=migmem:8000")
    reason = cluster.wait_drained("n1")
    cluster.scancel(job)
    cluster.until(lambda: not cluster.instances("n1"), "given back by the epilog")
    cluster.resume("n1")

    assert len(hands.fired(killed)) == 1
    assert "ended by itself (signal 9)" in reason


def test_a_job_that_ends_while_the_controller_is_away_is_given_back_when_it_is_there_again(cluster: Cluster) -> None:
    job = cluster.sbatch("-wn1", "--gres=migmem:8000", script="echo begun; until [ -e over ]; do sleep 0.05; done")
    cluster.until(lambda: "begun" in cluster.output(job), "running")
    cluster.stop("slurmctld")
    cluster.touch("over")
    cluster.until(lambda: not (cluster.folder / "spool.n1" / f"job{job:05d}" / "slurm_script").exists()
                  or not cluster.steps(job), "its script over")  # fmt: skip
    with pytest.raises(Unreachable):
        controller.seen(job)
    while_away = reconcile(cluster)
    cluster.start("slurmctld")
    cluster.wait_up()
    cluster.until(lambda: not cluster.instances("n1"), "given back", within=30)

    assert while_away == {}


def test_after_a_reboot_nothing_is_destroyed_for_what_the_last_boot_recorded(cluster: Cluster) -> None:
    job = start(cluster)
    cluster.stop("n1")
    cluster.kill_steps(job)
    hands = cluster.hands("n1")
    hands.reboot()
    for gpu in hands.uuids:
        hands.set_mig(gpu, True)
    stranger = hands.make(0, "1g.24gb")
    given_back = reconcile(cluster)
    cluster.scancel(job)
    cluster.start("n1")
    cluster.until(lambda: cluster.node_states() == {"n1": "idle", "n2": "idle"}, "its epilog over", within=20)

    assert given_back == {}
    assert cluster.instances("n1") == [stranger]
    hands.destroy(0, stranger.id)


def test_a_stuck_instance_is_given_back_by_the_service_once_nobody_holds_it(cluster: Cluster) -> None:
    job = start(cluster)
    neighbour = start(cluster)
    hands = cluster.hands("n1")
    (record,) = (r for r in cluster.state_of("n1")["records"] if r["owner"]["name"] == f"slurm:lab:{job}")
    mine = next(i for i in cluster.instances("n1") if record["mig_uuid"] in i.mig_uuids)
    hands.hold(mine.gpu, mine.id, pid=os.getpid())
    cluster.scancel(job)
    cluster.wait(job, "CANCELLED")
    stuck = [record for record in cluster.state_of("n1")["records"] if record.get("stuck")]
    service = subprocess.Popen(
        command("--config", str(cluster.gpus("n1") / "config.toml"), "serve", "--every", "0.3"),
        env=environment(SLURM_CONF=str(cluster.conf), SLURMD_NODENAME="n1"),
    )
    try:
        hands.let_go(mine.gpu, mine.id, pid=os.getpid())
        cluster.until(lambda: owners(cluster) == [f"slurm:lab:{neighbour}"], "the stuck one given back")
    finally:
        service.send_signal(signal.SIGTERM)
        service.wait(10)

    assert [record["owner"]["name"] for record in stuck] == [f"slurm:lab:{job}"]
    assert len(cluster.instances("n1")) == 1
    assert cluster.state(neighbour) == "RUNNING"


def test_a_job_that_the_controller_has_forgotten_has_ended(cluster: Cluster) -> None:
    job = cluster.sbatch("-wn1")
    cluster.wait(job, "COMPLETED")
    record_for(cluster, job)
    ended = reconcile(cluster)
    cluster.until(lambda: controller.seen(job) is None, "forgotten", within=40)
    record_for(cluster, job)

    assert ended == {f"slurm:lab:{job}": "released"}
    assert reconcile(cluster) == {f"slurm:lab:{job}": "released"}


def allocation(owner: Owner) -> Record:
    """A record of that owner that began just now."""
    return Allocation(
        nonce="0",
        owner=owner,
        request=Request(8000),
        begin=1,
        boot_id="",
        gpu_uuid="GPU-0",
        profile_id=0,
        profile_name="1g",
        memory_mib=8000,
        placement=Placement(0, 1),
        since=0.0,
    )

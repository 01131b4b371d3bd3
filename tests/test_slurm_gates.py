"""Gates on a real cluster: a job begins only on a node that says it has a place, and waits at the controller else."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from gated_cluster import Gated
from slurm_cluster import Cluster, require_slurm

from gres_mig.simulator.program import command, environment
from gres_mig.values import replace
from gres_mig_slurm import delayed, gate_lines, sizes_file, told

require_slurm()

QUARTER, HALF, WHOLE = 24_100, 40_000, 90_000
Q, H, W = "migmem-24192", "migmem-48512", "migmem-97280"
SITE = {"n1": "site,a", "n2": "site,b"}
NONE = "UnavailableNodes:migmem-full-n1-[1-4],migmem-full-n2-[1-4]"


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Gated]:
    """An RTX PRO 6000 on each of n1 and n2, behind gates; an A30 on n3, by count."""
    boards = {"n1": [("rtx-pro-6000", 1)], "n2": [("rtx-pro-6000", 1)], "n3": [("a30", 1)]}
    before = request.session.testsfailed
    with Gated(boards, site=SITE, by_count=("n3",), times=10) as cluster:
        yield cluster
        cluster.kept = cluster.kept or request.session.testsfailed > before


@pytest.fixture(autouse=True)
def all_open(cluster: Gated) -> Iterator[None]:
    """Each test begins with an empty cluster, whose gates are all open and known to be so."""
    for node in ("n1", "n2"):
        serve(cluster, node, after_a_minute=True)
        cluster.wait_active(node, *SITE[node].split(","), Q, H, W)
        with delayed.changing(cluster.settings(node)) as waiting:
            waiting.jobs = ()
    yield
    cluster.cancel_all()
    cluster.assert_healthy()


def serve(cluster: Gated, node: str, *, after_a_minute: bool = False) -> None:
    """One pass of the service on a node; it asks the controller once a minute what that knows."""
    settings = cluster.settings(node)
    if after_a_minute and told.is_any(settings):
        told.write(settings, replace(told.read(settings), asked=0.0))
    words = command("--config", str(cluster.gpus(node) / "config.toml"), "serve", "--once")
    cluster.run(*words, user="root", env=environment(SLURM_CONF=str(cluster.conf), SLURMD_NODENAME=node))


def submit(cluster: Cluster, *options: str) -> int:
    """A job that says when it has begun, and goes on until it is cancelled."""
    return cluster.sbatch(*options, script="echo begun; sleep 300")


def wait_begun(cluster: Cluster, job: int) -> dict[str, str]:
    """The job's fields once its script runs."""
    cluster.until(lambda: "begun" in cluster.output(job), f"{job} begun, but it is {cluster.job(job)}")
    return cluster.job(job)


def fill(cluster: Cluster, node: str, *sizes: int) -> list[int]:
    """Running jobs of these sizes; naming its node, a job has no gate."""
    jobs = [submit(cluster, f"-w{node}", f"--gres=migmem:{size}") for size in sizes]
    for job in jobs:
        wait_begun(cluster, job)
    return jobs


def wait_pending(cluster: Cluster, job: int) -> str:
    """The reason of a job that the scheduler has looked at and left."""
    return cluster.until(
        lambda: (cluster.state(job) == "PENDING" and "migmem-full" in reason(cluster, job)) and reason(cluster, job),
        f"{job} waiting for a gate, but {cluster.job(job)}",
    )


def reason(cluster: Cluster, job: int) -> str:
    """Why it waits, as squeue says it."""
    return cluster.run("squeue", "-h", "-j", str(job), "-o", "%r%R", user="root").stdout


def test_a_job_waits_behind_closed_gates_while_others_run_past_it_and_begins_when_one_opens(cluster: Gated) -> None:
    (first,) = fill(cluster, "n1", QUARTER)
    fill(cluster, "n2", QUARTER)
    cluster.wait_active("n1", "site", "a", Q, H)
    cluster.wait_active("n2", "site", "b", Q, H)
    large = submit(cluster, f"--gres=migmem:{WHOLE}")
    why = wait_pending(cluster, large)
    small = submit(cluster, f"--gres=migmem:{QUARTER}")
    wait_begun(cluster, small)
    still = cluster.state(large)
    cluster.scancel(small)
    cluster.scancel(first)
    begun = wait_begun(cluster, large)

    assert NONE in why
    assert still == "PENDING"
    assert (begun["Restarts"], begun["Features"]) == ("0", f"{W}|{W}-try")


def test_what_a_restarted_controller_forgot_is_told_by_the_service(cluster: Gated) -> None:
    fill(cluster, "n1", HALF)
    cluster.wait_active("n1", "site", "a", Q, H)
    # Not killed: one that dies soon after a job began has not saved it.
    cluster.stop("slurmctld")
    cluster.start("slurmctld")
    cluster.wait_up()
    forgotten = cluster.active("n1")
    serve(cluster, "n1")
    at_once = cluster.active("n1")
    serve(cluster, "n1", after_a_minute=True)

    assert forgotten == at_once == {"site", "a", Q, H, W, f"{Q}-try", f"{H}-try", f"{W}-try"}
    assert cluster.active("n1") == {"site", "a", Q, H}


def test_what_a_reconfigured_controller_forgot_is_told_by_the_first_job_that_finds_no_place(cluster: Gated) -> None:
    fill(cluster, "n1", HALF)
    cluster.wait_active("n1", "site", "a", Q, H)
    cluster.scontrol("reconfigure")
    forgotten = cluster.active("n1")
    late = submit(cluster, "-xn2", f"--gres=migmem:{WHOLE}")
    cluster.wait_active("n1", "site", "a", Q, H)
    wait_pending(cluster, late)

    assert W in forgotten
    assert cluster.job(late)["Restarts"] == "1"


def test_a_job_of_two_nodes_waits_for_two_places(cluster: Gated) -> None:
    (first,) = fill(cluster, "n1", QUARTER)
    cluster.wait_active("n1", "site", "a", Q, H)
    both = submit(cluster, "-N2", f"--gres=migmem:{WHOLE}")
    wait_pending(cluster, both)
    cluster.scancel(first)
    begun = wait_begun(cluster, both)

    assert (begun["NodeList"], begun["Restarts"]) == ("n[1-2]", "0"), begun


def test_a_job_of_more_nodes_than_placeholders_is_not_refused_and_has_no_gate(cluster: Gated) -> None:
    sizes = cluster.conf.parent / sizes_file.FILE_NAME
    text = sizes.read_text()
    sizes.write_text(text.replace(f"placeholders {gate_lines.USUAL}", "placeholders 1"))
    many = submit(cluster, "-N2", f"--gres=migmem:{WHOLE}")
    sizes.write_text(text)
    some = submit(cluster, "-N2-9", f"--gres=migmem:{WHOLE}")

    assert [cluster.job(job)["Features"] for job in (many, some)] == ["(null)", f"{W}|{W}-try"]


@pytest.mark.parametrize("words", [("-N4",), ("-N3", f"--gres=migmem:{WHOLE}"), ("-n100",)])
def test_a_job_of_more_nodes_than_there_are_does_not_wait_for_placeholders(
    cluster: Gated, words: tuple[str, ...]
) -> None:
    """Slurm would let no other job of the partition begin but by backfill."""
    refused = cluster.run("sbatch", *words, "--wrap", "true", check=False)

    assert refused.returncode == 1
    assert "Requested node configuration is not available" in refused.stderr


def test_jobs_of_several_nodes_without_a_gate_are_kept_off_the_placeholders_and_no_others(cluster: Gated) -> None:
    plain, several = submit(cluster, "-N1"), submit(cluster, "-n2", "-xn2")
    excluded = [cluster.job(job)["ExcNodeList"] for job in (plain, several)]

    assert excluded == ["(null)", "migmem-full-n1-[1-4],migmem-full-n2-[1-4],n2"]
    assert cluster.wait(several, "RUNNING")["NodeList"] == "n1"


def test_of_two_jobs_that_meet_one_hole_the_second_is_put_back_and_begins_later(cluster: Gated) -> None:
    fill(cluster, "n1", HALF)
    cluster.wait_active("n1", "site", "a", Q, H)
    array = submit(cluster, "-xn2", "--array=0-1", f"--gres=migmem:{HALF}")
    tasks = [f"{array}_0", f"{array}_1"]
    cluster.until(lambda: sorted(cluster.state(task) for task in tasks) == ["PENDING", "RUNNING"]
                  and {cluster.job(task)["Restarts"] for task in tasks} == {"0", "1"}, "one put back")  # fmt: skip
    cluster.wait_active("n1", "site", "a")
    winner, loser = sorted(tasks, key=lambda task: cluster.job(task)["Restarts"])
    cluster.scancel(winner)
    begun = cluster.wait(loser, "RUNNING")
    # By the id of the array: of a task that was put back 22.05 says that its own is no job's.
    cluster.scancel(array)

    assert begun["Restarts"] == "1"


def test_a_large_job_that_small_ones_overtake_is_sounded_and_then_kept_a_place(cluster: Gated) -> None:
    file = cluster.gpus("n1") / "config.toml"
    text = file.read_text()
    early = fill(cluster, "n1", QUARTER)
    cluster.wait_active("n1", "site", "a", Q, H)
    large = submit(cluster, "-xn2", f"--gres=migmem:{WHOLE}")
    wait_pending(cluster, large)
    file.write_text(f"{text}aged = 0\n")
    try:
        early += fill(cluster, "n1", QUARTER)
        cluster.until(lambda: cluster.job(large)["Restarts"] == "1", "the large one tried")
        cluster.until(lambda: delayed.read(cluster.settings("n1")), "and known")
        serve(cluster, "n1")
        cluster.wait_active("n1", "site", "a")
        late = submit(cluster, "-xn2", f"--gres=migmem:{QUARTER}")
        wait_pending(cluster, late)
        for job in early:
            cluster.scancel(job)
        # On this Slurm it may not begin again at once; then a pass of the service lets it in.
        cluster.until(lambda: serve(cluster, "n1") or "begun" in cluster.output(large), "the large one begun")
        begun = cluster.job(large)
    finally:
        file.write_text(text)

    assert begun["Restarts"] == "1"
    assert "begun" not in cluster.output(late)


def test_who_waits_at_a_terminal_is_not_sounded(cluster: Gated) -> None:
    fill(cluster, "n1", QUARTER)
    fill(cluster, "n2", QUARTER)
    cluster.wait_active("n1", "site", "a", Q, H)
    cluster.wait_active("n2", "site", "b", Q, H)
    client = cluster.popen("srun", f"--gres=migmem:{WHOLE}", "true")
    (job,) = cluster.until(lambda: re.findall(r"job (\d+) queued", read_line(client)), "srun's job")

    assert cluster.job(job)["Features"] == W
    cluster.scancel(job)


def read_line(client: object) -> str:
    """What a client says next."""
    return str(client.stdout.readline())  # type: ignore[attr-defined]


def test_a_size_that_nodes_without_gates_have_too_has_no_gate(cluster: Gated) -> None:
    job = cluster.job(submit(cluster, "-H", "--gres=migmem:5000"))

    assert (job["Features"], job["AdminComment"]) == ("(null)", "gres-mig:1:5000")


def test_what_a_slice_may_serve_has_no_gate_and_who_insists_on_mig_has(cluster: Gated) -> None:
    file = cluster.conf.parent / sizes_file.FILE_NAME
    before = file.read_text()
    file.write_text(before.replace("type n2\n", "type n2\nboard 1 44686 NVIDIA L40\nslices 512\n"))
    try:
        small, large, insists = (
            cluster.job(submit(cluster, "-H", f"--gres=migmem:{asked}")) for asked in (QUARTER, WHOLE, f"mig:{HALF}")
        )
    finally:
        file.write_text(before)

    assert (small["Features"], small["AdminComment"]) == ("(null)", f"gres-mig:1:{QUARTER}")
    assert large["Features"] == f"{W}|{W}-try"
    assert (insists["Features"], insists["AdminComment"]) == (f"{H}|{H}-try", f"gres-mig:1:mig:{HALF}")


def test_a_gate_comes_after_the_users_own_constraint(cluster: Gated) -> None:
    wanted = {
        "-Ca": f"a&({H}|{H}-try)",
        "-Ca|b": f"(a|b)&({H}|{H}-try)",
        "-Ca&site": f"a&site&({H}|{H}-try)",
        "-C(a|b)&site": f"(a|b)&site&({H}|{H}-try)",
        "-C[a|b]": f"[a|b]&({H}|{H}-try)",
        # Slurm would heed nothing that is joined to a count; one that is closed refuses who names its node.
        "-C[a*1&b*1]": "[a*1&b*1]",
        "-wn1": "(null)",
    }
    jobs = {own: cluster.job(submit(cluster, "-H", "-N1-2", own, f"--gres=migmem:{HALF}")) for own in wanted}

    assert {own: job["Features"] for own, job in jobs.items()} == wanted


def test_both_the_users_constraint_and_the_gate_hold(cluster: Gated) -> None:
    """Each of them would begin on n1, whose gate is closed, were one of the two not heeded."""
    fill(cluster, "n1", QUARTER)
    cluster.wait_active("n1", "site", "a", Q, H)
    job = submit(cluster, "-Ca", f"--gres=migmem:{WHOLE}")
    nodes = set()
    for own in ("a|b", "[a|b]"):
        other = submit(cluster, f"-C{own}", f"--gres=migmem:{WHOLE}")
        nodes.add(wait_begun(cluster, other)["NodeList"])
        cluster.scancel(other)

    assert nodes == {"n2"}
    assert wait_pending(cluster, job)


def test_why_says_what_a_job_waits_for_that_no_node_has_seen(cluster: Gated) -> None:
    fill(cluster, "n1", QUARTER)
    fill(cluster, "n2", QUARTER)
    cluster.wait_active("n1", "site", "a", Q, H)
    cluster.wait_active("n2", "site", "b", Q, H)
    job = submit(cluster, f"--gres=migmem:{WHOLE}")
    wait_pending(cluster, job)
    words = command("--config", str(cluster.gpus("n1") / "config.toml"), "why", str(job))
    told = cluster.run(*words, user="root", env=environment(SLURM_CONF=str(cluster.conf)), check=False)

    assert told.returncode == 3
    assert told.stdout.startswith(f"job {job} waits at the controller for 90,000 MiB, since ")
    assert "1 of 1 places for 4g.96gb are taken" in told.stdout


def test_another_size_has_another_gate(cluster: Gated) -> None:
    fill(cluster, "n1", QUARTER)
    cluster.wait_active("n1", "site", "a", Q, H)
    job = submit(cluster, "-Ca", f"--gres=migmem:{WHOLE}")
    wait_pending(cluster, job)
    cluster.scontrol("update", f"JobId={job}", f"Gres=migmem:{HALF}")
    begun = wait_begun(cluster, job)

    assert begun["Features"] == f"a&({H}|{H}-try)"


def test_a_user_may_change_the_constraint_of_a_waiting_job_and_its_gate_stays(cluster: Gated) -> None:
    job = submit(cluster, "-H", f"--gres=migmem:{WHOLE}")
    cluster.run("scontrol", "update", f"JobId={job}", "Features=b")
    changed = cluster.job(job)["Features"]
    cluster.run("scontrol", "update", f"JobId={job}", "Features=")
    cleared = cluster.job(job)["Features"]
    cluster.run("scontrol", "update", f"JobId={job}", "Gres=", "Features=")

    assert (changed, cleared) == (f"b&({W}|{W}-try)", f"{W}|{W}-try")
    assert cluster.job(job)["Features"] == "(null)"


def test_a_controller_that_does_not_hear_of_gates_costs_no_job(cluster: Gated) -> None:
    with cluster.stand_before("scontrol", "exit 1"):
        job = cluster.sbatch("-xn2", f"--gres=migmem:{HALF}", script="true")
        cluster.wait(job, "COMPLETED")
        cluster.wait_free("n1")

    assert cluster.output(job).startswith("gres-mig: 2g.48gb")


def test_with_admission_by_count_again_all_gates_are_opened(cluster: Gated) -> None:
    file = cluster.gpus("n1") / "config.toml"
    text = file.read_text()
    fill(cluster, "n1", HALF)
    cluster.wait_active("n1", "site", "a", Q, H)
    file.write_text(text.replace('admission = "gates"\n', ""))
    serve(cluster, "n1")
    opened = cluster.active("n1")
    file.write_text(text)

    assert opened == {"site", "a", Q, H, W, f"{Q}-try", f"{H}-try", f"{W}-try"}

"""Gates and what else users ask of Slurm: no job is refused, held or tried over and over for its gate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gated_cluster import Gated
from slurm_cluster import require_slurm
from test_slurm_gates_setup import A30, planned

from gres_mig_slurm import gate_lines, sizes_file

require_slurm()

LATER = "--begin=now+1000"
WHOLE = "--gres=migmem:90000"
GATE = "migmem-97280|migmem-97280-try"


@pytest.fixture(scope="module")
def closed(request: pytest.FixtureRequest) -> Iterator[Gated]:
    """An RTX PRO 6000 on each of n1 and n2; neither has a place for a whole GPU, and both have said so."""
    boards = {"n1": [("rtx-pro-6000", 1)], "n2": [("rtx-pro-6000", 1)]}
    before = request.session.testsfailed
    with Gated(boards, site={"n1": "a", "n2": "b"}, times=10, partitions="PartitionName=other Nodes=n2") as cluster:
        for node in boards:
            cluster.sbatch(f"-w{node}", "--gres=migmem:24100", script="sleep 300")
            cluster.until(lambda at=node: "migmem-97280" not in cluster.active(at), f"{node} closed")  # type: ignore[misc]
        yield cluster
        cluster.assert_healthy()
        cluster.kept = cluster.kept or request.session.testsfailed > before


def wait_at_gate(cluster: Gated, job: int) -> dict[str, str]:
    """The fields of a job that the scheduler has looked at and left."""
    return cluster.until(
        lambda: fields if "migmem-full" in (fields := cluster.job(job))["Reason"] else {},
        f"{job} waiting at a gate, but {cluster.job(job)}",
    )


def update(cluster: Gated, job: int, *words: str) -> str:
    """What a user who changes a waiting job is told."""
    return cluster.run("scontrol", "update", f"JobId={job}", *words, check=False).stderr.strip()


def test_what_a_job_prefers_does_not_take_it_past_its_gate(closed: Gated) -> None:
    """Slurm looks at the preferred features in place of the constraint, so it would begin on n1 over and over."""
    job = closed.sbatch("--prefer=a", WHOLE)
    waiting = wait_at_gate(closed, job)
    update(closed, job, "Prefer=b")
    changed = wait_at_gate(closed, job)
    closed.scancel(job)

    assert (waiting["Restarts"], waiting["Prefer"]) == ("0", f"a&({GATE})")
    assert (changed["Restarts"], changed["Prefer"]) == ("0", f"b&({GATE})")


def test_a_waiting_job_goes_to_another_partition_also_where_the_site_has_no_script(closed: Gated) -> None:
    job, without = closed.sbatch(LATER, WHOLE), closed.sbatch(LATER)
    for each in (job, without):
        # Now and then 24.11.5 answers "Interrupted system call" or the like, without any submit script, too.
        closed.until(lambda at=each: update(closed, at, "Partition=other") == "", "its partition changed")  # type: ignore[misc]

    assert [closed.job(each)["Partition"] for each in (job, without)] == ["other", "other"]


@pytest.mark.parametrize("words", ["ReqNodeList=n1", "NumNodes=9", "ReservationName=ours"])
def test_a_waiting_job_is_not_held_for_nodes_among_which_no_placeholder_is(closed: Gated, words: str) -> None:
    reservation = ("users=games", "nodes=n1", "starttime=now", "duration=9", "flags=ignore_jobs")
    closed.scontrol("create", "reservation=ours", *reservation)
    job, own = closed.sbatch(WHOLE), closed.sbatch(LATER, "-Ca", WHOLE)
    wait_at_gate(closed, job)
    refused = update(closed, job, words)
    waiting = wait_at_gate(closed, job)
    said = [update(closed, job, words, "Features="), update(closed, own, words)]
    features = [closed.job(each)["Features"] for each in (job, own)]
    for each in (job, own):
        closed.scancel(each)
    closed.until(lambda: closed.state(job) == "CANCELLED", f"{job} over")
    closed.scontrol("delete", "reservation=ours")

    # From 23.02 on our own words are above it.
    assert refused.splitlines()[-1] == f"Invalid feature specification for job {job}"
    assert waiting["Features"] == GATE
    assert (said, features) == (["", ""], ["(null)", "a"])


def test_a_job_that_gave_its_gate_up_is_no_longer_tried_as_one_that_has_one(closed: Gated) -> None:
    """Else it would begin every few seconds, with nothing to keep it from that."""
    job = closed.sbatch(WHOLE)
    wait_at_gate(closed, job)
    update(closed, job, "ReqNodeList=n1", "Features=")
    closed.until(lambda: closed.job(job)["Reason"] == "BeginTime", f"{job} put back")
    comment = closed.run("squeue", "-h", "-j", str(job), "-O", "admin_comment:99").stdout
    closed.scancel(job)

    assert comment.startswith("gres-mig:1:90000 gres-mig:begin:")


def test_a_profile_that_shares_its_size_with_another_has_no_gate(closed: Gated) -> None:
    """The feature is active while any place of that size is free."""
    wanted = {"1g.24gb+me": "(null)", "1g.24gb": "migmem-24192|migmem-24192-try"}

    jobs = {name: closed.job(closed.sbatch(LATER, f"--gres=migmem:{name}")) for name in wanted}

    assert {name: job["Features"] for name, job in jobs.items()} == wanted


def test_a_constraint_that_leaves_no_room_for_a_gate_is_taken_without_one(closed: Gated) -> None:
    own = "a" + "&a" * 500

    jobs = [closed.job(closed.sbatch(LATER, f"-C{each}", WHOLE)) for each in (own, own[:-40])]

    assert [job["Features"] for job in jobs] == [own, f"{own[:-40]}&({GATE})"]


def test_more_nodes_than_placeholders_have_no_gate_also_where_tasks_make_them_so_many(closed: Gated) -> None:
    sizes = closed.conf.parent / sizes_file.FILE_NAME
    text = sizes.read_text()
    sizes.write_text(text.replace(f"placeholders {gate_lines.USUAL}", "placeholders 1"))
    jobs = [closed.job(closed.sbatch(f"-n{tasks}", "--ntasks-per-node=2", LATER, WHOLE)) for tasks in (2, 3)]
    sizes.write_text(text)

    assert [job["Features"] for job in jobs] == [GATE, "(null)"]


def test_a_placeholder_has_all_that_any_node_of_its_type_has(tmp_path: Path) -> None:
    """Or a job that only n2 could serve would be refused while all gates are closed."""
    text = (
        "NodeName=n1 CPUs=8 RealMemory=64000 Feature=slow\n"
        "NodeName=n2 Sockets=2 CoresPerSocket=8 RealMemory=32000 Feature=fast,slow\n"
    )
    lines, added = planned(tmp_path, text, "n1", "n2")
    again, none = planned(tmp_path, f"{text.replace('fast', 'faster')}{added[0]}\n", "n1", "n2")

    assert " Sockets=2 CoresPerSocket=8 RealMemory=64000 Gres=migmem:24000 " in added[0]
    assert f" Feature=slow,fast,{A30} State=DOWN " in added[0]
    assert lines[:2] == [line.replace("slow", f"slow,{A30}") for line in text.splitlines()]
    assert f" Feature=slow,fast,faster,{A30} State=DOWN " in again[2]
    assert none == []

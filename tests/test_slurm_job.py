"""What is read of a job: its request, and nothing that its user could have made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from gres_mig.errors import BadRequest
from gres_mig.models import Allocation, Owner, Placement, Request
from gres_mig_slurm import handover
from gres_mig_slurm.job import FORMAT, Job, parse, request


def row(job_id: int = 7, **fields: object) -> str:
    """A row of squeue; fields that are not named are a plain batch job's."""
    values: dict[str, object] = {
        "job_id": job_id,
        "array_job_id": job_id,
        "array_task_id": "N/A",
        "het_job_id": "N/A",
        "uid": 1000,
        "submitted": 1795978860,
        "restarts": 0,
        "batch": 1,
        "requeueable": 1,
        "state": "R",
        "batch_host": "n1",
        "tres_per_node": "gres:migmem:8000",
        "tres_per_task": "N/A",
        "admin_comment": "(null)",
        **fields,
    }
    return "".join(f"{values[name]!s:<12}|" for name in Job.field_names())


def job(**fields: object) -> Job:
    """The job of such a row."""
    found = parse(row(**fields), 7)
    assert found is not None
    return found


def test_a_row_is_read_as_squeue_writes_it() -> None:
    assert job(restarts=2, array_job_id=5, array_task_id=3, admin_comment="gres-mig:1:8K") == Job(
        7, 5, "3", 0, 1000, 1795978860, 2, True, True, "R", "n1", "gres:migmem:8000", "", "gres-mig:1:8K"
    )


def test_as_many_fields_are_asked_for_as_are_read() -> None:
    assert FORMAT.count("|") == len(Job.field_names())


def test_only_the_row_of_that_very_id_counts() -> None:
    rows = "\n".join([row(70), row(6, array_job_id=7), "", "7 |", row(7, uid=1), row(17)])

    assert parse(rows, 7) == job(uid=1)
    assert parse(rows, 8) is None
    assert parse("", 7) is None


def test_a_task_of_an_array_is_named_by_its_number_and_any_other_job_by_its_id() -> None:
    assert job(array_job_id=7, array_task_id=3).reference == "7_3"
    assert job().reference == "7"


@pytest.mark.parametrize(
    ("tres", "mib"),
    [
        ("gres:migmem:8000", 8000),
        ("gres/migmem:8000", 8000),
        ("gres/migmem=8000", 8000),
        ("migmem:8000", 8000),
        ("gres:migmem:08000", 8000),
        ("gres:migmem:8K", 8192),
        ("gres:migmem:8k", 8192),
        ("gres:migmem", 1),
        ("gres:gpu:1,gres:migmem:8000", 8000),
        ("gres:migmem:8000,gres:shard:3", 8000),
        ("gres:migmem:8000,gres:migmem:4000", 4000),
    ],
)
def test_a_count_is_read_as_slurm_counts(tres: str, mib: int) -> None:
    assert request(job(tres_per_node=tres)) == Request(mib)


@pytest.mark.parametrize(
    "tres", ["N/A", "(null)", "", "gres:gpu:1", "gres:migmem:0", "gres:migmem2:8000", "gres:xmigmem:1"]
)
def test_what_is_no_migmem_is_no_request(tres: str) -> None:
    assert request(job(tres_per_node=tres)) is None


@pytest.mark.parametrize(
    ("comment", "wanted"),
    [
        ("gres-mig:1:8000", Request(8000)),
        ("gres-mig:1:8K", Request(8192)),
        ("gres-mig:1:mig:8K", Request(8192, isolation="mig")),
        ("gres-mig:1:2g.48gb", Request(0, "2g.48gb")),
        ("gres-mig:1:1g.5gb+me other words", Request(0, "1g.5gb+me")),
        ("of the site gres-mig:1:8000", Request(8000)),
        ("gres-mig:2:8000", Request(13985)),
        ("xgres-mig:1:8000", Request(13985)),
        ("(null)", Request(13985)),
    ],
)
def test_what_the_user_wrote_counts_and_not_its_price(comment: str, wanted: Request) -> None:
    assert request(job(tres_per_node="gres:migmem:13985", admin_comment=comment)) == wanted


def test_what_was_written_once_counts_no_more_when_migmem_was_taken_out_of_the_job() -> None:
    assert request(job(tres_per_node="N/A", admin_comment="gres-mig:1:8000")) is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"het_job_id": 7}, "heterogeneous"),
        ({"tres_per_node": "N/A", "tres_per_task": "gres/migmem:8000"}, "by task"),
        ({"tres_per_node": "gres:migmem:8G"}, "more than"),
        ({"tres_per_node": "gres:migmem:a100:8000"}, "is no size"),
        ({"tres_per_node": "gres:migmem:-1"}, "is no size"),
        ({"tres_per_node": f"gres:migmem:{'9' * 300}"}, "is no size"),
    ],
)
def test_a_request_that_cannot_be_served_is_its_users_mistake(fields: dict[str, object], text: str) -> None:
    with pytest.raises(BadRequest, match=text):
        request(job(**fields))


def test_a_heterogeneous_job_without_migmem_is_nobodys_mistake() -> None:
    assert request(job(het_job_id=7, tres_per_node="N/A")) is None


def test_a_hand_over_says_what_was_given_in_one_line() -> None:
    allocation = Allocation(
        nonce="n",
        owner=Owner("slurm:lab:7"),
        request=Request(8000),
        begin=0,
        boot_id="b",
        gpu_uuid="GPU-1",
        profile_id=14,
        profile_name="1g.24gb",
        memory_mib=24192,
        placement=Placement(0, 3),
        since=0.0,
        mig_uuid="MIG-1",
    )
    lines = handover.given(allocation, told_by="batch")

    assert lines[:3] == ("STATE=given", "TOLD_BY=batch", "TEXT=1g.24gb (24,192 MiB) for 8,000 MiB on GPU-1")
    assert {"CUDA_VISIBLE_DEVICES=MIG-1", "NVIDIA_VISIBLE_DEVICES=MIG-1", "GRES_MIG_MEMORY_MIB=24192"} <= set(lines)


def test_no_text_of_a_hand_over_makes_another_line(tmp_path: Path) -> None:
    handover.write(str(tmp_path), 7, "n1", handover.failed("a\nSTATE=given\r\n\x1b[31m" + "x" * 9999 + "\udcff"))
    first, second = (tmp_path / "7.n1").read_text().splitlines()

    assert first == "STATE=failed"
    assert second.startswith("TEXT=a STATE=given   [31mxxx")
    assert len(second) <= handover.MAX_TEXT

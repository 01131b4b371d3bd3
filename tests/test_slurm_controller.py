"""What is made of squeue's answers, which a stand-in gives here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gres_mig_slurm import controller
from gres_mig_slurm.controller import Unreachable


@pytest.fixture
def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let squeue say those rows, whatever it is asked."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def answer(*rows: str) -> None:
        (tmp_path / "rows").write_text("".join(f"{row}\n" for row in rows))
        (tmp_path / "squeue").write_text(f"#!/bin/sh\nexec cat {tmp_path}/rows\n")
        (tmp_path / "squeue").chmod(0o755)

    return answer


def row(job: int, *, array: int) -> str:
    """A job that runs, as squeue lists it."""
    return f"{job:<12}|RUNNING         |1           |2           |2           |n1      |{array:<12}|"


def test_the_last_task_of_an_array_is_found_among_the_others(answering: Callable[..., None]) -> None:
    answering(row(901, array=900), row(900, array=900))

    seen = controller.seen(900)

    assert seen is not None
    assert (seen.job_id, seen.state, seen.nodes) == (900, "RUNNING", "n1")


def test_a_task_that_is_forgotten_before_the_others_of_its_array_has_ended(answering: Callable[..., None]) -> None:
    answering(row(901, array=900), row(902, array=900))

    assert controller.seen(900) is None
    assert list(controller.all_seen([900, 901])) == [901]


@pytest.mark.parametrize("rows", [(), (row(901, array=901),), ("damaged",), ("900|",)])
def test_an_answer_to_something_else_says_nothing_of_a_job(answering: Callable[..., None], rows: tuple[str]) -> None:
    answering(*rows)

    with pytest.raises(Unreachable, match="squeue says nothing of job 900"):
        controller.seen(900)

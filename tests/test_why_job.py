"""Slurm jobs in `status` and `why`: what they hold on this node, and what those wait for that it put back."""

from __future__ import annotations

import time

import pytest

from gres_mig import config_text, simulator
from gres_mig.allocator import Allocator
from gres_mig.models import Owner, Placement, Request, Settings
from gres_mig_slurm import delayed
from gres_mig_slurm.delayed import Delayed
from tests.commands import nobody, run


@pytest.fixture
def settings(node: simulator.Node) -> Settings:
    """The node's settings, in its config.toml as well: all GPUs managed."""
    return config_text.write_node_config(node.store.folder)


@pytest.fixture
def job(allocator: Allocator) -> Owner:
    """Job 17, which asked for 8,000 MiB and has them."""
    owner = Owner("slurm:lab:17", uid=1000, submitted=1)
    allocator.allocate(owner, Request(8000))
    return owner


@pytest.fixture
def waiting(allocator: Allocator, job: Owner, settings: Settings) -> Delayed:
    """Job 21, task 3 of array 18, which wants the larger half of what job 17 and another are on."""
    allocator.allocate(Owner("slurm:lab:16"), Request(90000))
    put_back = Delayed(21, "18_3", "slurm:lab:21", 90000, "", first=time.time() - 200, begin=int(time.time()) + 50)
    delayed.put_back(settings, put_back)
    return put_back


def test_status_shows_what_a_job_asked_for_and_what_it_got(node: simulator.Node, job: Owner) -> None:
    shown = run(node, "status").out

    (line,) = [line for line in shown.splitlines() if "slurm:lab:17" in line]
    assert line.split() == ["0:3", "1g.24gb", "24,192", "MiB", "0s", "slurm:lab:17", "for", "8,000", "MiB"]


def test_status_shows_the_jobs_that_were_put_back(node: simulator.Node, waiting: Delayed) -> None:
    text, plain = run(node, "status").out, run(node, "status", "--json").plain["waiting"]

    assert "slurm:lab:21 waits for 90,000 MiB, since 3m" in text
    assert [(each["job"], each["requested"], each["starts"], each["kept"]) for each in plain] == [
        ("18_3", "90,000 MiB", 1, None)
    ]


def test_a_number_that_is_a_job_here_is_taken_for_it(node: simulator.Node, job: Owner) -> None:
    found = run(node, "why", "17")

    assert found.code == 0
    assert found.out.startswith("slurm:lab:17 has 1g.24gb (24,192 MiB) for 8,000 MiB: MIG-")


def test_a_number_that_is_no_job_here_is_a_size(node: simulator.Node, job: Owner) -> None:
    found = run(node, "why", "18")

    assert found.out.startswith("18 MiB fits: 1g.24gb")


@pytest.mark.parametrize("what", ["21", "18_3", "slurm:lab:21"])
def test_of_a_waiting_job_it_is_said_whose_end_would_help(node: simulator.Node, waiting: Delayed, what: str) -> None:
    found = run(node, "why", what, columns=200)

    first, second, *_ = found.out.splitlines()
    assert found.code == 3
    assert first.startswith("slurm:lab:21 waits for 90,000 MiB, since 3m; 1 start found no place; begins again in ")
    assert second.startswith("no room for 90,000 MiB on this node")
    assert "room when this ends: slurm:lab:17 (1g.24gb at 0:3)" in found.out


def test_the_place_that_is_kept_for_a_job_is_named(
    node: simulator.Node, waiting: Delayed, allocator: Allocator, settings: Settings
) -> None:
    gpu = allocator.look()[0].uuid
    with delayed.changing(settings) as current:
        current.put(waiting.holding(gpu, Placement(0, 12)))

    found = run(node, "why", "21", columns=200), run(node, "why", "21", "--json").plain["waits"]["kept"]

    assert f"; 0:12 of {gpu} is kept free for it" in found[0].out
    assert found[1] == {"gpu_uuid": gpu, "placement": {"start": 0, "size": 12}}


def test_jobs_are_shown_to_root_only(node: simulator.Node, waiting: Delayed, settings: Settings) -> None:
    with nobody(node, settings):
        shown, size = run(node, "status").out, run(node, "why", "21").out

    assert "slurm:" not in shown
    assert "21 MiB" in size.splitlines()[0]

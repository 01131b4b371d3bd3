"""The jobs that a node delayed: kept through everything but their own end, and never in anybody's way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gres_mig.models import Placement, Settings
from gres_mig.rooms import Held
from gres_mig.simulator.program import environment
from gres_mig.values import replace
from gres_mig_slurm import delayed
from gres_mig_slurm.delayed import Delayed


def job(job_id: int, *, owner: str = "", first: float = 100.0, begin: int = 200) -> Delayed:
    """A job that wants 8,000 MiB."""
    return Delayed(job_id, str(job_id), owner or f"slurm:lab:{job_id}", 8000, "", first, begin)


def file_of(settings: Settings) -> Path:
    return Path(settings.state_dir) / "delayed.json"


def test_a_job_that_is_delayed_again_has_waited_since_the_first_time(settings: Settings) -> None:
    delayed.put_back(settings, job(7))
    with delayed.changing(settings) as waiting:
        waiting.put(replace(job(7), woken=150.0, wakes=2))
    delayed.put_back(settings, job(7, first=180.0, begin=300))

    (mine,) = delayed.read(settings)
    assert (mine.first, mine.begin, mine.tries, mine.woken, mine.wakes) == (100.0, 300, 2, 0.0, 0)


def test_a_job_of_another_cluster_with_its_id_is_another_job(settings: Settings) -> None:
    delayed.put_back(settings, job(7))
    delayed.put_back(settings, job(7, owner="slurm:other:7", first=180.0))

    (mine,) = delayed.read(settings)
    assert (mine.owner, mine.first, mine.tries) == ("slurm:other:7", 180.0, 1)


def test_a_forgotten_job_takes_its_place_along(settings: Settings) -> None:
    delayed.put_back(settings, job(7))
    with delayed.changing(settings) as waiting:
        mine = waiting.get(7)
        assert mine is not None
        waiting.put(replace(mine, gpu_uuid="GPU-0", start=3, size=3))
    before = delayed.held(settings)
    delayed.forget(settings, 7)
    delayed.forget(settings, 7)

    assert before == (Held("GPU-0", Placement(3, 3), "slurm:lab:7"),)
    assert delayed.held(settings) == ()
    assert not delayed.is_any(settings)


def test_where_nobody_was_delayed_nothing_is_written(settings: Settings) -> None:
    delayed.forget(settings, 7)
    with delayed.changing(settings) as waiting:
        waiting.drop(7)

    assert not file_of(settings).exists()
    assert delayed.read(settings) == ()


@pytest.mark.parametrize("text", ["", "{", "{}", "[1]", '[{"job_id": 7}]', "null", '["x"]'])
def test_a_damaged_file_is_nobody_delayed_and_is_replaced(settings: Settings, text: str) -> None:
    os.makedirs(settings.state_dir)
    file_of(settings).write_text(text)

    before = delayed.read(settings)
    delayed.put_back(settings, job(7))

    assert before == ()
    assert [each.job_id for each in delayed.read(settings)] == [7]


def test_what_a_newer_version_wrote_is_read(settings: Settings) -> None:
    delayed.put_back(settings, job(7))
    (plain,) = json.loads(file_of(settings).read_text())
    file_of(settings).write_text(json.dumps([{**plain, "colour": "blue"}]))

    assert [each.job_id for each in delayed.read(settings)] == [7]


def test_only_root_reads_who_waits(settings: Settings) -> None:
    delayed.put_back(settings, job(7))

    assert file_of(settings).stat().st_mode & 0o777 == 0o600


def test_processes_that_delay_jobs_at_once_lose_none(settings: Settings) -> None:
    code = (
        "import sys\n"
        "from gres_mig.models import Settings\n"
        "from gres_mig_slurm import delayed\n"
        "settings = Settings(sys.argv[1], sys.argv[2])\n"
        "for n in range(20):\n"
        "    delayed.put_back(settings, delayed.Delayed(int(sys.argv[3]) + n, '1', 'slurm:lab:1', 1, '', 0.0, 0))\n"
    )
    words = [sys.executable, "-c", code, settings.state_dir, settings.run_dir]
    processes = [subprocess.Popen([*words, str(100 * n)], env=environment()) for n in range(1, 5)]
    codes = [process.wait(30) for process in processes]

    assert codes == [0] * 4
    assert len(delayed.read(settings)) == 80

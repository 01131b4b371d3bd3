"""dcgm-exporter's job mapping: who is told where and when, whatever crashes, fails or reads meanwhile."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from failing_files import Files
from forked import each

from gres_mig import config, exporter_reload, log, machine, simulator
from gres_mig.allocator import Allocator
from gres_mig.config_text import render
from gres_mig.models import Owner, Request, Settings
from gres_mig.simulator import Node
from gres_mig.state import Store
from gres_mig.values import replace
from tests.command_line import here

ALICE, JOB, OTHER_JOB = Owner("manual:alice"), Owner("slurm:c:4711"), Owner("slurm:c:4712")
KERNEL = Owner("jupyter:1000:0b5a0e36-7c4e-4f0a-8d2c-9d1f3a5b7c9e", uid=1000)
SMALL = Request(8000)


@pytest.fixture
def folder(memory: Path) -> Path:
    return memory / "mapping"


@pytest.fixture
def settings(settings: Settings, folder: Path) -> Settings:
    return replace(settings, dcgm_mapping=str(folder), in_use_wait_s=0.0, young_s=0.0)


def on(settings: Settings, **hooks: Any) -> Allocator:
    boot_id = machine.boot_id(settings.simulator)
    return Allocator(settings, Store(settings, boot_id), boot_id, **hooks)


def told(folder: Path) -> dict[str, str]:
    """The files that name somebody."""
    return {path.name: text for path in sorted(folder.iterdir()) if (text := path.read_text())}


# Whom it names, and when


def test_an_instance_is_told_by_the_id_of_its_slurm_job(allocator: Allocator, folder: Path) -> None:
    allocation = allocator.allocate(JOB, SMALL).allocation

    assert told(folder) == {f"0.{allocation.gi_id}": "4711\n"}


def test_other_owners_are_told_by_kind_and_name_and_not_by_uid(allocator: Allocator, folder: Path) -> None:
    allocator.allocate(ALICE, SMALL)
    allocator.allocate(KERNEL, SMALL)

    assert sorted(told(folder).values()) == ["jupyter:0b5a0e36-7c4e-4f0a-8d2c-9d1f3a5b7c9e\n", "manual:alice\n"]


def test_what_was_given_back_is_an_empty_file_of_nobodys(allocator: Allocator, folder: Path) -> None:
    gi_id = allocator.allocate(JOB, SMALL).allocation.gi_id
    allocator.reclaim(JOB)

    assert told(folder) == {}
    assert [path.name for path in folder.iterdir()] == [f"0.{gi_id}"]


def test_an_owner_is_told_no_more_while_its_instance_is_still_there(
    settings: Settings, node: Node, folder: Path
) -> None:
    on(settings).allocate(JOB, SMALL)
    node.plant("nvmlComputeInstanceDestroy", "kills")
    child = os.fork()
    if child == 0:
        try:
            on(settings).reclaim(JOB)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)

    assert os.WIFSIGNALED(status)
    assert len(node.instances()) == 1
    assert told(folder) == {}


def test_an_owner_is_told_only_once_the_instance_is_its(settings: Settings, folder: Path) -> None:
    seen = []
    allocator = on(settings, wanted=lambda: not seen.append(folder.exists() and told(folder)))

    allocator.allocate(JOB, SMALL)

    assert seen == [{}]


def test_a_whole_gpu_is_told_with_everybody_on_it_where_that_is_wanted(settings: Settings, folder: Path) -> None:
    allocator = on(replace(settings, dcgm_whole_gpu=True))
    owners = (JOB, ALICE, OTHER_JOB)
    ids = [allocator.allocate(owner, Request(8000, gpus=())).allocation.gi_id for owner in owners]
    full = told(folder)
    allocator.reclaim(ALICE)

    assert full["0"].splitlines() == [
        text for _, text in sorted(zip(ids, ("4711", "manual:alice", "4712"), strict=True))
    ]
    assert sorted(told(folder)["0"].splitlines()) == ["4711", "4712"]


def test_owners_of_slices_are_told_in_the_file_of_their_gpu(memory: Path, folder: Path) -> None:
    node = memory / "l40"
    assert here("simulate", "create", node, "--board", "l40", "--driver", "615.10.04").code == 0
    (node / "config.toml").write_text('slices = "*"\nexperimental_driver_limit = true\n')
    allocator = on(replace(config.load(node=node), dcgm_mapping=str(folder)))
    for owner in (JOB, ALICE):
        allocator.allocate(owner, SMALL)
    both = told(folder)
    allocator.reclaim(JOB)
    one = told(folder)
    allocator.reclaim(ALICE)
    simulator.uninstall()

    assert (both, one) == ({"0": "4711\nmanual:alice\n"}, {"0": "manual:alice\n"})
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("0", "")]


def test_an_adopted_instance_is_told_and_a_foreign_one_is_not(allocator: Allocator, node: Node, folder: Path) -> None:
    adopted, _ = node.make(1, "1g.24gb", 3), node.make(1, "1g.24gb", 6)
    allocator.adopt(ALICE, node.uuids[1], adopted.id)

    assert told(folder) == {f"1.{adopted.id}": "manual:alice\n"}


def test_files_of_unmanaged_gpus_and_of_other_names_are_left_alone(
    node: Node, settings: Settings, folder: Path
) -> None:
    folder.mkdir()
    others = {"1": "99\n", "1.7": "98\n", "00.3": "97\n", "0.x": "96\n", "note": "mine\n"}
    for name, text in others.items():
        (folder / name).write_text(text)
    allocator = on(replace(settings, managed=(node.uuids[0],)))

    gi_id = allocator.allocate(JOB, SMALL).allocation.gi_id
    allocator.reconcile()

    assert told(folder) == {**others, f"0.{gi_id}": "4711\n"}


def test_nothing_is_written_where_no_folder_is_named(settings: Settings, memory: Path) -> None:
    before = {path.name for path in memory.iterdir()}
    on(replace(settings, dcgm_mapping="")).allocate(JOB, SMALL)

    assert {path.name for path in memory.iterdir()} == before


def test_the_files_are_readable_to_all_whatever_the_umask(allocator: Allocator, folder: Path) -> None:
    before = os.umask(0o077)
    try:
        allocator.allocate(JOB, SMALL)
    finally:
        os.umask(before)

    (file,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o755, 0o644)


# What a crash leaves


def test_reconcile_tells_whom_a_crash_after_the_commit_left_untold(allocator: Allocator, folder: Path) -> None:
    gi_id = allocator.allocate(JOB, SMALL).allocation.gi_id
    (folder / f"0.{gi_id}").write_text("")

    allocator.reconcile()

    assert told(folder) == {f"0.{gi_id}": "4711\n"}


def test_reconcile_empties_what_no_record_stands_for(settings: Settings, folder: Path) -> None:
    folder.mkdir()
    (folder / "1.3").write_text("99\n")

    on(settings).reconcile()

    assert told(folder) == {}


def test_reconcile_lets_the_exporter_forget_who_lost_his_instance(
    allocator: Allocator, node: Node, folder: Path
) -> None:
    gi_id = allocator.allocate(JOB, SMALL).allocation.gi_id
    node.destroy(0, gi_id)

    allocator.reconcile()

    assert told(folder) == {}


def test_the_first_ask_after_a_reboot_empties_what_the_last_boot_left(
    settings: Settings, node: Node, folder: Path
) -> None:
    gi_id = on(settings).allocate(JOB, SMALL).allocation.gi_id
    node.reboot()
    node.set_mig(0, True)
    seen = []
    allocator = on(settings, guard=lambda gpu, instance: str(seen.append(told(folder))))

    again = allocator.allocate(OTHER_JOB, SMALL).allocation

    assert again.gi_id == gi_id
    assert seen == [{}]
    assert told(folder) == {f"0.{gi_id}": "4712\n"}


# What cannot be written


def _with_a_failing_file(case: tuple[Settings, int, int]) -> tuple[int, int, bool]:
    settings, nth, code = case
    log.send_to(lambda level, line: None)
    files = Files(settings.dcgm_mapping, nth=nth, code=code)
    allocator = on(settings)
    created = allocator.allocate(JOB, SMALL).created
    verdicts = [outcome.verdict for outcome in allocator.reclaim(JOB)]
    return files.count, nth, created and verdicts == ["released"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EACCES])
def test_no_file_that_fails_fails_an_operation(settings: Settings, folder: Path, code: int) -> None:
    folder.mkdir()
    ((steps, _, _),) = each(_with_a_failing_file, [(settings, 0, 0)])
    results = each(_with_a_failing_file, [(settings, nth, code) for nth in range(1, steps + 1)], at_once=1)

    assert steps > 5
    assert [nth for _, nth, well in results if not well] == []


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_that_others_can_write_is_not_written_and_the_log_says_so(
    allocator: Allocator, folder: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    folder.mkdir()
    folder.chmod(mode)

    created = allocator.allocate(JOB, SMALL).created

    assert created
    assert list(folder.iterdir()) == []
    assert "is not root's alone to write" in caplog.text


def test_a_link_in_the_place_of_a_file_is_not_followed(
    allocator: Allocator, memory: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim = memory / "victim"
    victim.write_text("precious")
    folder.mkdir()
    for gi_id in range(15):
        (folder / f"0.{gi_id}.new").symlink_to(victim)

    allocator.allocate(JOB, SMALL)

    assert victim.read_text() == "precious"
    assert "telling dcgm-exporter who is on" in caplog.text


# An exporter that reads all the time


class Held(NamedTuple):
    """An instance while it was its owner's, in nanoseconds of the monotonic clock."""

    file: str
    owner: str
    since: int
    until: int


def _churn(case: tuple[Settings, int, int]) -> list[Held]:
    """So many cycles on this node, of a few owners of one's own; up to three of them have an instance at once."""
    settings, worker, cycles = case
    log.send_to(lambda level, line: None)
    chance = random.Random(worker)
    node = Node(settings.simulator)
    # Few, for each that ended is kept in mind for minutes, and every save writes them all.
    owners = deque(f"{worker}{number:03}" for number in range(20))
    having: list[tuple[int, str, str]] = []
    ended = []
    for cycle in range(cycles):
        owner = owners.popleft()
        # Each hook is a process of its own and knows nothing of the one before.
        allocation = on(settings).allocate(Owner(f"slurm:c:{owner}"), Request(1)).allocation
        having.append((cycle, f"{node.uuids.index(allocation.gpu_uuid)}.{allocation.gi_id}", owner))
        while len(having) == 3 or (having and (cycle + 1 == cycles or chance.random() < 0.5)):
            ended.append(having.pop(chance.randrange(len(having))))
            on(settings).reclaim(Owner(f"slurm:c:{ended[-1][2]}"))
            owners.append(ended[-1][2])
    # This process makes and destroys one after the other, so its calls are in the order of its owners.
    mine = [call for call in node.calls() if call["pid"] == os.getpid() and call["code"] == 0]
    made = [call["at_ns"] for call in mine if call["function"] == "nvmlGpuInstanceCreateComputeInstance"]
    gone = [call["at_ns"] for call in mine if call["function"] == "nvmlComputeInstanceDestroy"]
    assert len(made) == len(gone) == len(ended) == cycles
    return [Held(file, owner, made[cycle], end) for (cycle, file, owner), end in zip(ended, gone, strict=True)]


@pytest.mark.parametrize("boards", [[("a30", 2)]])
def test_who_scrapes_without_pause_never_fails_and_never_sees_a_wrong_id(
    node: Node, settings: Settings, folder: Path
) -> None:
    folder.mkdir()
    node.configure(log="mutating")
    output = folder.parent / "scrapes"
    scraper = Path(__file__).with_name("scraper.py")
    with (
        open(output, "w", encoding="utf-8") as file,
        subprocess.Popen([sys.executable, scraper, folder], stdin=subprocess.PIPE, stdout=file) as reader,
    ):
        _wait_for(lambda: output.stat().st_size > 0)
        held = [one for part in each(_churn, [(settings, 1, 500), (settings, 2, 500)]) for one in part]
        reader.communicate(b"\n", timeout=60)

    *scrapes, last = [json.loads(line) for line in output.read_text().splitlines()]
    seen = [(name, owner, scrape) for scrape in scrapes for name, ids in scrape["found"].items() for owner in ids]
    wrong = [
        (name, owner)
        for name, owner, scrape in seen
        if not any(
            (one.file, one.owner) == (name, owner) and one.since <= scrape["ended"] and scrape["began"] <= one.until
            for one in held
        )
    ]
    assert (reader.returncode, wrong) == (0, [])
    assert len(held) == 1000
    # It did look while all that went on.
    assert last["scrapes"] > 1000
    assert len({(name, owner) for name, owner, _ in seen}) > 100
    assert told(folder) == {}


# SIGHUP


class Exporter:
    """A process whose program has that name; it says on its output when it got SIGHUP."""

    def __init__(self, folder: Path, name: str = exporter_reload.PROGRAM) -> None:
        program = folder / name
        shutil.copy("/bin/sh", program)
        script = "trap 'echo reloaded' HUP; echo ready; while :; do read line && exit; done"
        self._process = subprocess.Popen(
            [program, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout
        assert self._process.stdout.readline() == "ready\n"
        self.pid = self._process.pid

    def end(self) -> int:
        """How often it was told to reload."""
        return self._process.communicate("end\n")[0].count("reloaded")


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[Exporter]:
    one = Exporter(tmp_path)
    yield one
    if one._process.poll() is None:
        one.end()


@pytest.fixture
def pid_file(tmp_path: Path, exporter: Exporter) -> Path:
    file = tmp_path / "exporter.pid"
    file.write_text(f"{exporter.pid}\n")
    return file


def test_the_exporter_looks_again_when_an_instance_came(settings: Settings, exporter: Exporter, pid_file: Path) -> None:
    on(replace(settings, dcgm_sighup=str(pid_file))).allocate(JOB, SMALL)

    assert exporter.end() == 1


def test_of_many_changes_at_once_it_hears_once_and_later_of_the_rest(
    settings: Settings, exporter: Exporter, pid_file: Path
) -> None:
    allocator = on(replace(settings, dcgm_sighup=str(pid_file)))
    for _ in range(5):
        allocator.allocate(JOB, SMALL)
        allocator.reclaim(JOB)
    lock = Path(settings.run_dir, "dcgm.lock")
    # As it is two seconds later.
    for _ in range(2):
        os.utime(lock, (time.time() - 3, lock.stat().st_mtime - 3))
        allocator.reconcile()

    # The second reconcile finds that nothing came or went since.
    assert exporter.end() == 2


def test_a_clock_that_was_set_back_does_not_keep_the_exporter_waiting(
    settings: Settings, exporter: Exporter, pid_file: Path
) -> None:
    allocator = on(replace(settings, dcgm_sighup=str(pid_file)))
    allocator.allocate(JOB, SMALL)
    os.utime(Path(settings.run_dir, "dcgm.lock"), (time.time() + 3600,) * 2)
    allocator.reclaim(JOB)

    assert exporter.end() == 2


def test_no_other_program_gets_the_signal(settings: Settings, tmp_path: Path) -> None:
    other = Exporter(tmp_path, "something-else")
    file = tmp_path / "stale.pid"
    file.write_text(str(other.pid))

    on(replace(settings, dcgm_sighup=str(file))).allocate(JOB, SMALL)

    assert other.end() == 0


@pytest.mark.parametrize("slices", ["system.slice", "unified/system.slice", "systemd/system.slice"])
def test_a_unit_is_found_by_its_cgroup(settings: Settings, node: Node, exporter: Exporter, slices: str) -> None:
    group = Path(node.store.folder, "sys/fs/cgroup", slices, "dcgm-exporter.service")
    group.mkdir(parents=True)
    (group / "cgroup.procs").write_text(f"1\n{exporter.pid}\n")

    on(replace(settings, dcgm_sighup="dcgm-exporter.service")).allocate(JOB, SMALL)

    assert exporter.end() == 1


@pytest.mark.parametrize("content", [None, "", "no pid\n", "4194999\n"])
def test_an_exporter_that_is_not_there_is_missed_by_nobody(
    settings: Settings, tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "exporter.pid"
    if content is not None:
        file.write_text(content)

    assert on(replace(settings, dcgm_sighup=str(file))).allocate(JOB, SMALL).created


def test_the_configuration_that_setup_writes_keeps_what_is_said_of_the_exporter(settings: Settings) -> None:
    said = replace(settings, dcgm_whole_gpu=True, dcgm_sighup="nvidia-dcgm-exporter.service")

    assert {f'dcgm_mapping = "{said.dcgm_mapping}"', "dcgm_whole_gpu = true"} <= set(render(said).splitlines())


def _wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

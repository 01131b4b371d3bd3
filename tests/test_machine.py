"""What is said of processes, device files and the clock, from this machine's own /proc."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gres_mig import machine
from gres_mig.models import Process
from gres_mig.simulator.admin import Node


class Child:
    """A process that has some files open, and goes when its standard input ends."""

    def __init__(self, *files: Path, name: str = "") -> None:
        code = "import sys; opened = [open(name) for name in sys.argv[2:]]"
        code += "; sys.argv[1] and open('/proc/self/comm', 'w').write(sys.argv[1]); print(flush=True); sys.stdin.read()"
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code, name, *map(str, files)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout
        self.process.stdout.readline()
        self.pid = self.process.pid

    def become_a_zombie(self) -> None:
        """End, and not be waited for."""
        assert self.process.stdin
        self.process.stdin.close()
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def end(self) -> None:
        """End it and let it be gone."""
        self.process.communicate() if not self.process.stdin.closed else self.process.wait()  # type: ignore[union-attr]
        assert self.process.stdout
        self.process.stdout.close()


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A plain file in the place of a device file, as a simulated node has them."""
    path = tmp_path / "nvidia-cap12"
    path.touch()
    return path


@pytest.fixture
def holder(device: Path) -> Iterator[Child]:
    """A process that has the device open."""
    child = Child(device)
    yield child
    child.end()


def test_a_process_that_runs_is_alive_and_one_of_its_pid_before_it_is_not() -> None:
    this = machine.this_process()

    assert machine.alive(this)
    assert not machine.alive(Process(this.pid, this.start - 1))


def test_a_zombie_is_not_alive_and_holds_nothing(holder: Child, device: Path) -> None:
    seen = machine.process(holder.pid)
    assert seen is not None

    holder.become_a_zombie()

    assert not machine.alive(seen)
    assert machine.process(holder.pid) is None
    assert machine.holders([str(device)]) == ()


def test_a_process_that_is_gone_is_not_alive(holder: Child) -> None:
    seen = machine.process(holder.pid)
    assert seen is not None

    holder.end()

    assert not machine.alive(seen)
    assert machine.begun_ns(holder.pid) == 0


@pytest.mark.parametrize("name", ["a) Z 1 (b", "with space", ")"])
def test_a_process_may_call_itself_what_it_likes(device: Path, name: str) -> None:
    child = Child(device, name=name)

    found = machine.process(child.pid)
    described = machine.describe(child.pid)
    child.end()

    assert found is not None
    assert found.start >= machine.this_process().start
    assert described == f"pid {child.pid} {name} ({pwd.getpwuid(os.geteuid()).pw_name})"


def test_a_process_that_cannot_be_told_of_is_its_number() -> None:
    assert machine.describe(1 << 22) == f"pid {1 << 22}"


def test_begin_is_on_the_clock_that_records_use() -> None:
    before = machine.now_ns()
    child = Child()
    begun = machine.begun_ns(child.pid)
    after = machine.now_ns()
    child.end()

    # Rounded down to a tick of 10 ms.
    assert before - 10_000_000 <= begun <= after


def test_who_has_a_device_open_holds_it_by_whatever_name(holder: Child, device: Path, tmp_path: Path) -> None:
    other_name = tmp_path / "other"
    other_name.symlink_to(device)

    assert [p.pid for p in machine.holders([str(device)])] == [holder.pid]
    assert machine.holders([str(other_name)]) == machine.holders([str(device)])


def test_a_device_file_is_known_by_its_number(tmp_path: Path) -> None:
    child = Child(Path("/dev/full"))
    number = os.stat("/dev/full").st_rdev
    same = [str(entry) for entry in Path("/dev").iterdir() if entry.is_char_device() and entry.stat().st_rdev == number]

    held = machine.holders(same)
    child.end()

    assert child.pid in [p.pid for p in held]


def test_this_process_and_who_has_another_file_open_hold_nothing(holder: Child, device: Path, tmp_path: Path) -> None:
    other = tmp_path / "nvidia-cap1"
    other.touch()

    with other.open(), device.open():
        assert machine.holders([str(other)]) == ()
        assert [p.pid for p in machine.holders([str(other), str(device)])] == [holder.pid]


def test_a_device_that_is_not_there_is_held_by_nobody(tmp_path: Path) -> None:
    assert machine.holders([str(tmp_path / "nvidia-cap12")]) == ()


def test_the_device_files_of_an_instance_are_its_gpus_and_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "proc" / "driver" / "nvidia-caps"
    folder.mkdir(parents=True)
    ours = "gpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\n"
    (folder / "mig-minors").write_text(f"config 1\nmonitor 2\n{ours}gpu0/gi12/access 111\ngpu10/gi1/access 3\n")
    dev = tmp_path / "dev"

    assert machine.device_nodes(0, 1, [0], str(tmp_path)) == (
        f"{dev}/nvidia0",
        f"{dev}/nvidia-caps/nvidia-cap12",
        f"{dev}/nvidia-caps/nvidia-cap13",
    )
    assert machine.device_nodes(3, 1, [0], str(tmp_path)) == (f"{dev}/nvidia3",)


def test_without_the_drivers_table_there_is_the_gpus_own(tmp_path: Path) -> None:
    assert machine.device_nodes(7, 1, [0], str(tmp_path)) == (f"{tmp_path}/dev/nvidia7",)


def test_the_boot_is_this_machines_or_the_simulated_nodes(node: Node) -> None:
    assert machine.boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert machine.boot_id(node.store.folder) == node.boot_id != machine.boot_id()

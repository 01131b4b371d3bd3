"""The locks of a node, among processes."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gres_mig import machine
from gres_mig.models import Settings
from gres_mig.state import Store


class Another:
    """Another process, which begins to work when it is told to and tells by the function that it is given.

    It is there before its parent takes a lock: a child has what its parent had open, and a lock with it.
    """

    def __init__(self, work: Callable[[Callable[[], object]], None]) -> None:
        self._reading, writing = os.pipe()
        waiting, self._starting = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.read(waiting, 1)
                work(lambda: os.write(writing, b"1"))
            finally:
                os._exit(0)
        os.close(writing)
        os.close(waiting)

    def begin(self) -> None:
        """Let it work."""
        os.write(self._starting, b"1")

    def hear(self) -> bytes:
        """Wait until it tells; nothing when it ended instead."""
        return os.read(self._reading, 1)

    def __enter__(self) -> Another:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(self, *raised: object) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._reading)
        os.close(self._starting)


@pytest.fixture
def store(settings: Settings) -> Store:
    """The node's records and locks."""
    return Store(settings, machine.boot_id(settings.simulator))


def waiting(path: Path) -> bool:
    """Whether a process waits for the lock on that file, as the kernel says."""
    status = path.stat()
    inode = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())


def taken(store: Store, gpu: str) -> bool:
    """Whether somebody has that GPU's lock."""
    with store.gpu_lock(gpu, 0) as got:
        return not got


def test_a_gpus_lock_is_its_holders_until_that_dies(store: Store) -> None:
    def hold(tell: Callable[[], object]) -> None:
        with store.gpu_lock("GPU-1", 0):
            tell()
            signal.pause()

    with Another(hold) as holder:
        holder.begin()
        holder.hear()
        while_it_lives = taken(store, "GPU-1"), taken(store, "GPU-2")

    assert while_it_lives == (True, False)
    assert not taken(store, "GPU-1")


def test_who_waits_for_a_gpus_lock_gets_it_when_it_is_free(store: Store) -> None:
    def ask(tell: Callable[[], object]) -> None:
        tell()
        with store.gpu_lock("GPU-1", 60) as got:
            if got:
                tell()
                signal.pause()

    with Another(ask) as asking:
        with store.gpu_lock("GPU-1", 0):
            asking.begin()
            asking.hear()
        told = asking.hear()

        assert told
        assert taken(store, "GPU-1")


def test_lock_files_are_roots_and_stay(store: Store, settings: Settings) -> None:
    with store.gpu_lock("GPU-1", 0), store.transaction():
        pass

    locks = [path for path in Path(settings.run_dir).iterdir() if path.suffix == ".lock"]
    assert {(path.name, stat.S_IMODE(path.stat().st_mode)) for path in locks} == {
        ("gpu-GPU-1.lock", 0o600),
        ("node.lock", 0o600),
    }


def test_who_waited_for_a_lock_file_that_was_removed_takes_the_new_one(store: Store, settings: Settings) -> None:
    def hold(tell: Callable[[], object]) -> None:
        with store.transaction():
            tell()
            signal.pause()

    path = Path(settings.run_dir, "node.lock")
    with Another(hold) as holder:
        with store.transaction():
            holder.begin()
            while not waiting(path):
                os.sched_yield()
            path.unlink()
            path.touch()
        told = holder.hear()

        assert told
        with path.open() as new, pytest.raises(BlockingIOError):
            fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_what_is_started_while_a_lock_is_held_does_not_keep_it(store: Store) -> None:
    with store.gpu_lock("GPU-1", 0), store.transaction():
        started = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, check=True)

        assert "/dev/null" in started.stdout or "pipe:" in started.stdout
        assert ".lock" not in started.stdout

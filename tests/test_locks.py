"""The locks of a node, among processes."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from gres_mig import machine
from gres_mig.models import Settings
from gres_mig.state import Store


class Another:
    """Another process at work, which tells by the function that it is given; ended with `with`."""

    def __init__(self, work: Callable[[Callable[[], object]], None]) -> None:
        self._reading, writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                work(lambda: os.write(writing, b"1"))
            finally:
                os._exit(0)
        os.close(writing)

    def hear(self) -> bytes:
        """Wait until it tells; nothing when it ended instead."""
        return os.read(self._reading, 1)

    def __enter__(self) -> Another:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(self, *raised: object) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._reading)


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

    with store.gpu_lock("GPU-1", 0):
        asking = Another(ask)
        asking.hear()
    with asking:
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
    with store.transaction():
        holder = Another(hold)
        while not waiting(path):
            os.sched_yield()
        path.unlink()
        path.touch()
    with holder:
        told = holder.hear()

        assert told
        with path.open() as new, pytest.raises(BlockingIOError):
            fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_what_is_started_while_a_lock_is_held_does_not_keep_it(store: Store) -> None:
    with store.gpu_lock("GPU-1", 0), store.transaction():
        open_ones = {int(name): os.readlink(f"/proc/self/fd/{name}") for name in _descriptors()}
        locks = {descriptor for descriptor, path in open_ones.items() if path.endswith(".lock")}

        assert len(locks) == 2
        assert not any(map(os.get_inheritable, locks))


def _descriptors() -> list[str]:
    with os.scandir("/proc/self/fd") as entries:
        return [entry.name for entry in entries if os.path.lexists(entry.path)][:-1]

"""The simulated hardware: one JSON file under a lock, replaced whole, that outlives the processes using it."""

from __future__ import annotations

import fcntl
import json
import os

from gres_mig.errors import ConfigError

from . import boards

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from .schema import Gpu, Hardware, Holder

FORMAT = 1


class Store:
    """A node's folder: reads its hardware, and changes it under the lock."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = os.path.abspath(folder)
        self.path = os.path.join(self.folder, "hardware.json")
        self._lock_path = os.path.join(self.folder, "hardware.lock")
        self._key: tuple[int, int, int] | None = None
        self._hardware: Hardware | None = None

    def read(self) -> Hardware:
        """The hardware as it is now, to be looked at only; parsed again only when the file was replaced."""
        try:
            stat = os.stat(self.path)
            key = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if key != self._key or self._hardware is None:
                self._hardware = self._load()
                self._key = key
        except FileNotFoundError as error:
            hint = f"run: gres-mig simulate create {self.folder} --board rtx-pro-6000"
            raise ConfigError(f"{self.folder} is no simulated node", hint=hint) from error
        return self._hardware

    def read_copy(self) -> Hardware:
        """The hardware as it is now, the caller's own to change."""
        return self._load()

    def board(self, gpu: Gpu) -> boards.Board:
        """The board a GPU is."""
        return boards.board(gpu["board"], self.folder)

    def lock_paths(self, gpus: int) -> list[str]:
        """The lock files of a node of so many GPUs."""
        return [self._lock_path, *(self._gpu_lock_path(index) for index in range(gpus))]

    def change(self) -> Change:
        """`with store.change() as hardware:` replaces the file at the end, unless an exception says otherwise."""
        return Change(self, Lock(self._lock_path))

    def gpu_lock(self, index: int) -> Lock:
        """What the driver holds while it makes or destroys an instance of that GPU; other GPUs go on."""
        return Lock(self._gpu_lock_path(index))

    def write(self, hardware: Hardware) -> None:
        """Replace the file. The lock is the caller's."""
        new = f"{self.path}.new"
        with open(new, "w", encoding="utf-8") as file:
            # Anybody may look at a GPU, whatever the umask of the hook that changes it.
            os.fchmod(file.fileno(), 0o644)
            file.write(json.dumps(hardware))
        # The generation as the time of change makes the cache's key exact: two replacements within one tick of the
        # clock may get the same inode, size and time. No fsync: what a power cut does to a simulation is no matter.
        os.utime(new, (hardware["generation"], hardware["generation"]))
        os.replace(new, self.path)

    def _gpu_lock_path(self, index: int) -> str:
        return os.path.join(self.folder, f"gpu{index}.lock")

    def _load(self) -> Hardware:
        with open(self.path, "rb") as file:
            hardware: Hardware = json.load(file)
        if hardware["format"] != FORMAT:
            raise ConfigError(f"{self.path} has format {hardware['format']}, this version reads {FORMAT}")
        return hardware


class Lock:
    """An exclusive flock on a file of its own, opened anew each time so that threads exclude one another too."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def __enter__(self) -> None:
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        except BaseException:
            os.close(self._fd)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._fd)


class Change:
    """One read-modify-write of the hardware file under its lock."""

    def __init__(self, store: Store, lock: Lock) -> None:
        self._store = store
        self._lock = lock
        self._hardware: Hardware | None = None

    def __enter__(self) -> Hardware:
        self._lock.__enter__()
        try:
            self._hardware = self._store.read_copy()
        except BaseException:
            self._lock.__exit__(None, None, None)
            raise
        return self._hardware

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None and self._hardware is not None:
                self._hardware["generation"] += 1
                self._store.write(self._hardware)
        finally:
            self._lock.__exit__(kind, error, at)


def boot_id(folder: Path | str) -> str:
    """What /proc/sys/kernel/random/boot_id is on a real node; a simulated reboot changes it."""
    return Store(folder).read()["boot_id"]


def module_instance(folder: Path | str) -> int:
    """How often the simulated driver was loaded; a reboot and a driver reload count it up."""
    return Store(folder).read()["load"]


def start_of(pid: int) -> int | None:
    """When a process began (clock ticks since boot), or None when it is gone or a zombie, which uses nothing."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X", b"x") else int(fields[19])


def alive(holders: list[Holder]) -> list[Holder]:
    """The holders whose process still runs."""
    return [holder for holder in holders if start_of(holder["pid"]) == holder["start"]]

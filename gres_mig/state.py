"""The node's records: one file, locked, replaced whole."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gres_mig import log
from gres_mig.errors import StateError
from gres_mig.files import make_folder
from gres_mig.models import Allocation, Gpu, Release, Settings, State, Tombstone
from gres_mig.records import FORMAT, decode, encode, kind_of, plain_of
from gres_mig.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SPARE_BYTES = 1 << 16
"""Kept at the least; more where the records are many."""
_FULL = re.compile(rb'("full_profiles": )\[[^\]]*\]')
_TOMBSTONE_LIFE_NS = 600 * 10**9
_MOST_TOMBSTONES = 512
"""Of one user's kernels, or one cluster's jobs: each save writes them all, and who ends many displaces nobody else's.

An ask that is still under way after so many ends of its own kind is not one.
"""


class Damaged(StateError):
    """The record file holds no records."""


class Transaction:
    """The records while the node lock is held; `save` replaces the file."""

    def __init__(self, state: State, write: Callable[[State, bool], State], publish: Callable[..., None]) -> None:
        self.state = state
        self._write, self._publish = write, publish

    def save(self, state: State, *, gpus: Sequence[Gpu] = (), giving_back: bool = False) -> State:
        """Replace the file whole, then the public view. `giving_back` may use the space kept for a full disk."""
        self.state = self._write(state, giving_back)
        self._publish(self.state, gpus)
        return self.state


class Store:
    """The records of one node and the locks around them; lock order is GPU, then node."""

    def __init__(self, settings: Settings, boot_id: str) -> None:
        self._path = os.path.join(settings.state_dir, "state.json")
        self._spare = os.path.join(settings.state_dir, "spare")
        self._state_dir, self._run_dir = settings.state_dir, settings.run_dir
        self._boot_id = boot_id

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """The node lock: held for milliseconds, with no driver call and no wait inside."""
        self._make_folders()
        with self._locked("node.lock", None):
            try:
                state = self._read()
            except Damaged as error:
                state = self._set_aside(error)
            yield Transaction(state, self._write, self._publish)

    @contextmanager
    def gpu_lock(self, gpu_uuid: str, wait_s: float) -> Iterator[bool]:
        """One GPU's lock; yields False when another process kept it longer than `wait_s`."""
        self._make_folders()
        with self._locked(f"gpu-{gpu_uuid}.lock", wait_s) as got:
            yield got

    def read(self) -> State:
        """The records as they are, for looking only: the file is replaced whole, so no lock is needed.

        A damaged one is set aside first, for nothing may stop there.
        """
        try:
            return self._read()
        except Damaged:
            with self.transaction() as node:
                return node.state

    def peek(self) -> State:
        """The records as they are, for who may wait for nothing: a damaged file is an error and stays where it is."""
        return self._read()

    def public(self) -> dict[str, Any]:
        """What anybody may read: GPUs, slices, profiles and ages, no owners."""
        try:
            with open(os.path.join(self._run_dir, "public.json"), encoding="utf-8") as file:
                found: dict[str, Any] = json.load(file)
        except FileNotFoundError as error:
            raise StateError(
                f"nothing was published on this node yet: {error.filename} is missing",
                hint="run as root: gres-mig status",
            ) from error
        except ValueError as error:
            raise StateError(f"{self._run_dir}/public.json is damaged: {error}") from error
        return found

    @contextmanager
    def _locked(self, name: str, wait_s: float | None) -> Iterator[bool]:
        path = os.path.join(self._run_dir, name)
        deadline = None if wait_s is None else time.monotonic() + wait_s
        pause = 0.001
        while True:
            with self._errors("locking", path):
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                _leave_to_its_folders_owner(descriptor, path)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX if deadline is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A folder that was emptied under us has another file of this name by now: that one counts.
                if _same_file(descriptor, path):
                    break
            except BlockingIOError:
                if deadline is not None and time.monotonic() >= deadline:
                    os.close(descriptor)
                    yield False
                    return
                time.sleep(pause)
                pause = min(pause * 2, 0.05)
            os.close(descriptor)
        try:
            yield True
        finally:
            os.close(descriptor)

    def _make_folders(self) -> None:
        for folder, mode in ((self._state_dir, 0o700), (self._run_dir, 0o755)):
            with self._errors("making", folder):
                make_folder(folder, mode)

    def _read(self) -> State:
        try:
            with self._errors("reading", self._path), open(self._path, "rb") as file:
                data = file.read()
        except StateError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return State(self._boot_id)
            raise
        try:
            state = decode(data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"{self._path} is damaged: {error!r}") from error
        return self._of_this_boot(state)

    def _set_aside(self, error: Damaged) -> State:
        aside = f"{self._path}.damaged-{time.time_ns()}-{os.getpid()}"
        with self._errors("setting aside", self._path):
            # A second name for it, not a new one: a crash from here to the next line leaves a damaged file, never
            # none, which would be taken for a node without records.
            os.link(self._path, aside)
        log.error("%s; it is kept as %s, and GPUs with instances take no new work", error.message, aside)
        return self._write(State(self._boot_id, distrusted=True), giving_back=True)

    def _of_this_boot(self, state: State) -> State:
        # No instance, fence or begin stamp outlives a boot, so nothing recorded under another may act on hardware.
        if state.boot_id == self._boot_id:
            return state
        records = tuple(r for r in state.records if r.boot_id == self._boot_id)
        return State(self._boot_id, records, generation=state.generation, extra=state.extra)

    def _write(self, state: State, giving_back: bool) -> State:
        newest = max((t.begin for t in state.tombstones), default=0)
        tombstones = tuple(t for t in state.tombstones if newest - t.begin < _TOMBSTONE_LIFE_NS)
        if len(tombstones) > _MOST_TOMBSTONES:
            tombstones = _newest(tombstones)
        state = replace(state, generation=state.generation + 1, tombstones=tombstones)
        data = encode(state)
        if not giving_back:
            # Before anything new is recorded, so that what is recorded can be given back.
            self._keep_spare(max(_SPARE_BYTES, 2 * len(data)))
        with self._errors("writing", self._path):
            try:
                _replace(self._path, data, 0o600)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not giving_back or not self._spare_bytes():
                    raise
                # What was kept for this moment: giving back must work on a full disk.
                os.unlink(self._spare)
                _replace(self._path, data, 0o600)
        return state

    def _keep_spare(self, needed: int) -> None:
        with self._errors("reserving space in", self._spare):
            # By its size: one whose maker was killed, or had no room for it, is there and too small.
            if self._spare_bytes() >= needed:
                return
            descriptor = os.open(self._spare, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                _leave_to_its_folders_owner(descriptor, self._spare)
                os.posix_fallocate(descriptor, 0, needed)
            finally:
                os.close(descriptor)

    def _spare_bytes(self) -> int:
        try:
            return os.stat(self._spare).st_size
        except FileNotFoundError:
            return 0

    def _publish(self, state: State, gpus: Sequence[Gpu]) -> None:
        path = os.path.join(self._run_dir, "public.json")
        # Two rows, for most of what is saved changes neither, and rendering eight GPUs again each time was a fifth of
        # an allocation: what is recorded, and what was last seen of the hardware.
        recorded = _recorded(state)
        if gpus:
            # Foreign instances only: one of ours is in the records, and may be gone before the next look.
            seen = _seen([plain_of(_without_ours(gpu, state)) for gpu in gpus], time.time())
        else:
            # A reader sees by `looked` how old it is.
            before, seen = _rows(path)
            if before == recorded:
                return
            # What the driver called full was so before this change.
            seen = _FULL.sub(rb"\1[]", seen)
        try:
            _replace(path, recorded + seen, 0o644, durable=False)
        except OSError as error:
            # What is recorded is recorded; who only looks sees what was published before.
            log.warning("writing %s: %s", path, error.strerror)

    @contextmanager
    def _errors(self, doing: str, path: str) -> Iterator[None]:
        try:
            yield
        except PermissionError as error:
            raise StateError(f"{doing} {path}: {error.strerror}", hint="run it as root", code="NOPERM") from error
        except OSError as error:
            raise StateError(f"{doing} {path}: {error.strerror}") from error


def _newest(tombstones: Sequence[Tombstone]) -> tuple[Tombstone, ...]:
    kept: dict[str, list[Tombstone]] = {}
    for each in sorted(tombstones, key=lambda t: t.begin):
        kept.setdefault(each.owner.rpartition(":")[0], []).append(each)
    return tuple(each for of_one in kept.values() for each in of_one[-_MOST_TOMBSTONES:])


def _leave_to_its_folders_owner(descriptor: int, path: str) -> None:
    """Where a node is one user's (`setup --delegate`), what root writes there is that one's too."""
    if os.geteuid() == 0 and (uid := os.lstat(os.path.dirname(path)).st_uid):
        status = os.fstat(descriptor)
        # No other name of a file that is somewhere else: he may have put it there.
        if status.st_uid != uid and stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            os.fchown(descriptor, uid, -1)


def _replace(path: str, data: bytes, mode: int, *, durable: bool = True) -> None:
    # One name, since the node lock is held: what a crash left there is overwritten, not left to gather.
    temporary = f"{path}.new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        os.fchmod(descriptor, mode)
        _leave_to_its_folders_owner(descriptor, path)
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        if durable:
            os.fsync(descriptor)
    except OSError:
        os.close(descriptor)
        os.unlink(temporary)
        raise
    os.close(descriptor)
    if not durable:
        os.replace(temporary, path)
        return
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.replace(temporary, path)
        try:
            os.fsync(folder)
        except OSError as error:
            # Every process sees the new file already, so it counts; after a power cut, the records are void anyway.
            log.warning("syncing the folder of %s: %s", path, error.strerror)
    finally:
        os.close(folder)


def _recorded(state: State) -> bytes:
    """The first row of what is published."""
    public = {
        "schema": FORMAT,
        "records": [
            {
                "kind": kind_of(record),
                "gpu_uuid": record.gpu_uuid,
                "profile_id": record.profile_id,
                "profile_name": record.profile_name,
                "memory_mib": record.memory_mib,
                "placement": plain_of(record.placement),
                "since": record.since,
                "stuck": isinstance(record, Release) and record.stuck is not None,
                "lost": isinstance(record, Allocation) and record.lost,
                "slice": record.slice,
                "overhead_mib": record.overhead_mib,
            }
            for record in state.records
        ],
        "fences": {uuid: fence.reason for uuid, fence in state.fences.items()},
        "distrusted": state.distrusted,
    }
    return json.dumps(public)[:-1].encode() + b",\n"


def _seen(gpus: Sequence[Any], looked: float) -> bytes:
    """The second row; the two together are one JSON object."""
    return json.dumps({"looked": looked, "gpus": gpus})[1:].encode() + b"\n"


def _rows(path: str) -> tuple[bytes, bytes]:
    """What is published; nothing seen where that cannot be read, or was written otherwise."""
    try:
        with open(path, "rb") as file:
            recorded, seen = file.readlines()
    except (OSError, ValueError):
        return b"", _seen([], 0.0)
    return recorded, seen


def _without_ours(gpu: Gpu, state: State) -> Gpu:
    ours = [record.placement for record in state.records if record.gpu_uuid == gpu.uuid]
    foreign = (i for i in gpu.instances if not any(i.placement.overlaps(placement) for placement in ours))
    return replace(gpu, instances=tuple(foreign))


def _same_file(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False

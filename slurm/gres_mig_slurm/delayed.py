"""The jobs that this node delayed because it had no place for them: one file in its state folder, under a lock."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from gres_mig import log
from gres_mig.errors import StateError
from gres_mig.files import make_folder
from gres_mig.models import Placement, Request, Settings
from gres_mig.rooms import Held
from gres_mig.values import Value, fields_of, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PATIENCE_S = 30.0
"""How long a place is kept for a job that was woken: the scheduler's next pass may be that far away."""

MOST_WAKES = 3
"""Who did not begin after so many waits for something else than a place: nothing is kept for it any more."""

_MOST = 4096
"""The oldest go first; the controller tries a forgotten one again by itself."""


class Delayed(Value):
    """A job that was put back, and what it waits for; times are wall clock seconds."""

    job_id: int
    reference: str
    """What names it to the controller, such as `12_3`."""
    owner: str
    memory_mib: int
    profile: str
    first: float
    """When it was first delayed; how long it has waited is counted from here."""
    begin: int
    """The begin time that this node gave it; another one is its user's."""
    tries: int = 1
    woken: float = 0.0
    """The begin time it was woken for; 0: not since it was last delayed."""
    wakes: int = 0
    """How often it was woken since it was last delayed."""
    gpu_uuid: str = ""
    start: int = 0
    size: int = 0
    """The place that is kept free for it; none without a GPU."""
    takes_mib: int = 0
    """The memory that is kept there for a slice."""
    isolation: str = ""
    gated: bool = False
    """It begins by itself once this node says that it has a place; woken only for one that is kept for it."""

    @property
    def request(self) -> Request:
        """What it asked for."""
        return Request(self.memory_mib, self.profile, isolation=self.isolation)

    @property
    def held(self) -> Held | None:
        """The place kept free for it."""
        if not self.gpu_uuid:
            return None
        return Held(self.gpu_uuid, Placement(self.start, self.size), self.owner, self.takes_mib)

    def holding(self, gpu_uuid: str, place: Placement, takes_mib: int = 0) -> Delayed:
        """The same job with that place kept free for it."""
        return replace(self, gpu_uuid=gpu_uuid, start=place.start, size=place.size, takes_mib=takes_mib)

    def holding_nothing(self) -> Delayed:
        """The same job without a place."""
        return replace(self, gpu_uuid="", start=0, size=0, takes_mib=0)


class Waiting:
    """The delayed jobs while the lock is held; `save` replaces the file."""

    def __init__(self, path: str, jobs: tuple[Delayed, ...]) -> None:
        self.jobs, self._path, self._saved = jobs, path, jobs

    def put(self, job: Delayed) -> None:
        """Add a job, or change the one of its id."""
        self.jobs = (*(j for j in self.jobs if j.job_id != job.job_id), job)

    def drop(self, job_id: int) -> None:
        """Forget a job; not there is fine."""
        self.jobs = tuple(j for j in self.jobs if j.job_id != job_id)

    def get(self, job_id: int) -> Delayed | None:
        """The job of that id."""
        return next((j for j in self.jobs if j.job_id == job_id), None)

    def save(self) -> None:
        """Replace the file, if anything changed."""
        if self.jobs == self._saved:
            return
        kept = sorted(self.jobs, key=lambda j: j.first)[-_MOST:]
        content = json.dumps([fields_of(job) for job in kept]).encode()
        temporary = f"{self._path}.new"
        # Not synced: what a power cut takes, the controller tries again at the begin time that it has.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as stream:
            stream.write(content)
        os.replace(temporary, self._path)
        self._saved = self.jobs


@contextmanager
def changing(settings: Settings) -> Iterator[Waiting]:
    """The delayed jobs, to be changed; held for milliseconds, the controller is not asked inside."""
    lock = os.path.join(settings.run_dir, "delayed.lock")
    try:
        make_folder(settings.run_dir)
        make_folder(settings.state_dir, 0o700)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StateError(f"locking {lock}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        waiting = Waiting(_path(settings), read(settings))
        yield waiting
        try:
            waiting.save()
        except OSError as error:
            raise StateError(f"writing {_path(settings)}: {error.strerror}") from error
    finally:
        os.close(descriptor)


def is_any(settings: Settings) -> bool:
    """Whether a job may be delayed here, for the price of a look at a file's size."""
    try:
        return os.stat(_path(settings)).st_size > len("[]")
    except OSError:
        return False


def read(settings: Settings) -> tuple[Delayed, ...]:
    """The delayed jobs, for looking only."""
    path = _path(settings)
    try:
        with open(path, encoding="utf-8") as file:
            return tuple(_delayed(plain) for plain in json.load(file))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise StateError(f"reading {path}: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError) as error:
        # Nothing is lost but a wake-up: each of them begins again by itself at the time it was given.
        log.warning("%s is damaged: %s", path, error)
        return ()


def put_back(settings: Settings, job: Delayed) -> None:
    """A job was delayed here; if not for the first time, it goes on waiting since the first."""
    with changing(settings) as waiting:
        old = waiting.get(job.job_id)
        if old is not None and old.owner == job.owner:
            job = replace(old, begin=job.begin, tries=old.tries + 1, woken=0.0, wakes=0)
        waiting.put(job)


def forget(settings: Settings, job_id: int) -> None:
    """A job needs no waking any more; cheap where none is delayed."""
    if is_any(settings) and any(job.job_id == job_id for job in read(settings)):
        with changing(settings) as waiting:
            waiting.drop(job_id)


def held(settings: Settings) -> tuple[Held, ...]:
    """The places that are kept free for delayed jobs."""
    return tuple(place for job in read(settings) if (place := job.held))


def _path(settings: Settings) -> str:
    return os.path.join(settings.state_dir, "delayed.json")


def _delayed(plain: dict[str, Any]) -> Delayed:
    return Delayed(**{name: value for name, value in plain.items() if name in Delayed.field_names()})

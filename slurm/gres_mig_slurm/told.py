"""What this node remembers of what it told the controller of its sizes, and whose turn it is to tell more."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from gres_mig import log
from gres_mig.errors import StateError
from gres_mig.files import make_folder
from gres_mig.models import Settings
from gres_mig.values import Value, fields_of
from gres_mig_slurm.openings import Spell

_NOTHING: Mapping[str, Spell] = {}


class Told(Value):
    """One file in the folder of the locks, which a reboot empties."""

    gates: frozenset[str] | None = None
    """The sizes that were said to be open; None: nobody knows what was said."""
    asked: float = 0.0
    """When the controller was last asked what it knows."""
    spells: Mapping[str, Spell] = _NOTHING


def is_any(settings: Settings) -> bool:
    """Whether anything was told."""
    return os.path.exists(_path(settings))


def read(settings: Settings) -> Told:
    """What is remembered; of a damaged file nothing, so that all is asked and told anew."""
    try:
        with open(_path(settings), encoding="utf-8") as file:
            plain = json.load(file)
        gates = None if plain["gates"] is None else frozenset(plain["gates"])
        spells = {name: Spell(**spell) for name, spell in plain["spells"].items()}
        return Told(gates, float(plain["asked"]), spells)
    except FileNotFoundError:
        return Told()
    except OSError as error:
        raise StateError(f"reading {_path(settings)}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("%s is damaged: %s", _path(settings), error)
        return Told()


def write(settings: Settings, told: Told) -> None:
    """Remember that; not synced, for what is lost is asked anew."""
    path = _path(settings)
    spells = {name: fields_of(spell) for name, spell in told.spells.items()}
    plain = {"gates": None if told.gates is None else sorted(told.gates), "asked": told.asked, "spells": spells}
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with open(os.open(f"{path}.new", flags, 0o600), "w", encoding="utf-8") as stream:
            json.dump(plain, stream)
        os.replace(f"{path}.new", path)
    except OSError as error:
        raise StateError(f"writing {path}: {error.strerror}") from error


def forget(settings: Settings) -> None:
    """Remember nothing."""
    os.unlink(_path(settings))


@contextmanager
def turn(settings: Settings) -> Iterator[bool]:
    """True for the one whose turn it is; False when somebody waits for it already, who has not looked yet.

    So of any number of hooks at once few ask the controller, and what it is told last is what is so.
    """
    waits, works = (_opened(settings, name) for name in ("gates.next.lock", "gates.lock"))
    try:
        try:
            fcntl.flock(waits, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        fcntl.flock(works, fcntl.LOCK_EX)
        fcntl.flock(waits, fcntl.LOCK_UN)
        yield True
    finally:
        os.close(waits)
        os.close(works)


def _opened(settings: Settings, name: str) -> int:
    path = os.path.join(settings.run_dir, name)
    try:
        make_folder(settings.run_dir)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StateError(f"locking {path}: {error.strerror}") from error


def _path(settings: Settings) -> str:
    return os.path.join(settings.run_dir, "gates.json")

"""What the running service says of itself, in `service.json` beside the locks, for whoever looks at the node."""

from __future__ import annotations

import hashlib
import json
import os

from gres_mig import machine
from gres_mig.errors import StateError
from gres_mig.files import replace_whole
from gres_mig.models import Process
from gres_mig.values import Value, fields_of

FILE = "service.json"
SOCKET = "service.sock"


class Presence(Value):
    """A running service and the configuration that is in force in it."""

    version: str
    pid: int
    start: int
    """Of the process, in clock ticks since boot: a pid alone proves nothing."""
    started: float
    """Wall clock seconds, as `loaded`."""
    socket: str
    """Path of its socket; empty where it has none."""
    config: str
    sha256: str
    """Of the text that is in force; empty: there was no file."""
    loaded: float
    tries: int = 0
    """How often it was told to read the file again."""
    error: str = ""
    """Why the last of these changed nothing."""


def tell(run_dir: str, presence: Presence) -> None:
    """Write it, readable to all."""
    path = os.path.join(run_dir, FILE)
    try:
        replace_whole(path, json.dumps(fields_of(presence)) + "\n")
    except OSError as error:
        raise StateError(f"writing {path}: {error.strerror}") from error


def running(run_dir: str) -> Presence | None:
    """The service of that node, if one is running; what an ended one left behind counts for nothing."""
    try:
        with open(os.path.join(run_dir, FILE), encoding="utf-8") as stream:
            plain = json.load(stream)
        presence = Presence(**{name: plain[name] for name in Presence.field_names()})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return presence if machine.alive(Process(presence.pid, presence.start)) else None


def is_outdated(presence: Presence) -> bool:
    """Whether its configuration is another one by now, as far as the caller may read that."""
    now = digest(presence.config)
    return now is not None and now != presence.sha256


def digest(path: str) -> str | None:
    """The SHA-256 of a file; empty where there is none, None where it cannot be read."""
    try:
        with open(path, "rb") as stream:
            return hashlib.sha256(stream.read()).hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError:
        return None

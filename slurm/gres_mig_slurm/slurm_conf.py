"""What this node's slurm.conf says, read here: the controller, which would know, may be down."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator

_PATHS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
"""Where it is, and where slurmd keeps what a controller sent to a node without one."""

_SPOOL = "/var/spool/slurmd"
_CRED_EXPIRE_S = 120
"""Slurm's defaults."""


def spool_dir(node: str = "") -> str:
    """SlurmdSpoolDir of a node, of this one by its host name."""
    host = socket.gethostname().partition(".")[0]
    return _value("slurmdspooldir", _SPOOL).replace("%n", node or host).replace("%h", host)


def requeue_delay_s() -> int:
    """How long a requeued job waits unless somebody says otherwise: one second more than a credential is good for."""
    found = re.search(r"\bcred_expire=(\d+)", _value("authinfo", ""))
    return (int(found[1]) if found else _CRED_EXPIRE_S) + 1


def _value(wanted: str, default: str) -> str:
    path = os.environ.get("SLURM_CONF") or next(filter(os.path.exists, _PATHS), _PATHS[0])
    return next((value for key, value in _lines(path) if key.lower() == wanted), default)


def _lines(path: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        text = line.partition("#")[0].strip()
        word, _, rest = text.partition(" ")
        key, equals, value = text.partition("=")
        if word.lower() == "include" and depth < 8:
            yield from _lines(os.path.join(os.path.dirname(path), rest.strip()), depth + 1)
        elif equals:
            yield key.strip(), value.strip().strip('"')

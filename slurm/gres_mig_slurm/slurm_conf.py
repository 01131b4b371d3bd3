"""What this node's slurm.conf says, read here: the controller, which would know, may be down."""

from __future__ import annotations

import re
import socket

from gres_mig_slurm import conf_lines

_SPOOL = "/var/spool/slurmd"
_CRED_EXPIRE_S = 120
"""Slurm's defaults."""


def spool_dir(node: str = "") -> str:
    """SlurmdSpoolDir of a node, of this one by its host name."""
    host = socket.gethostname().partition(".")[0]
    return _value("SlurmdSpoolDir", _SPOOL).replace("%n", node or host).replace("%h", host)


def requeue_delay_s() -> int:
    """How long a requeued job waits unless somebody says otherwise: one second more than a credential is good for."""
    found = re.search(r"\bcred_expire=(\d+)", _value("AuthInfo", ""))
    return (int(found[1]) if found else _CRED_EXPIRE_S) + 1


def _value(key: str, default: str) -> str:
    return conf_lines.read(conf_lines.find(), lenient=True).value(key) or default

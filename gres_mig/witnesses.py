"""Whether an owner that is a process still lives: judged alike by the service, the command line and whoever else.

A Jupyter owner has one witness until its kernel is reported, the server that asked, and two from then on: the server
and the kernel (which may be the server itself, where one instance serves all of its kernels).
"""

from __future__ import annotations

from gres_mig import machine
from gres_mig.models import Process, Record

UNREPORTED_S = 60.0
"""How long a server may hold an instance for a kernel that it has not reported."""


def witnesses_alive(record: Record) -> bool | None:
    """Whether the owner lives as far as its witnesses tell; None, unknown, where it has none."""
    if not record.witnesses:
        return None
    if is_unreported(record) and machine.now_ns() - record.begin > UNREPORTED_S * 1e9:
        return False
    return any(machine.alive(witness) for witness in record.witnesses)


def is_unreported(record: Record) -> bool:
    """Whether it is a Jupyter owner's that has not said yet which process its kernel is."""
    return record.owner.name.startswith("jupyter:") and len(record.witnesses) == 1


def kernel(record: Record) -> Process | None:
    """The process that was reported as the owner's kernel, dead or alive."""
    return record.witnesses[1] if len(record.witnesses) > 1 else None

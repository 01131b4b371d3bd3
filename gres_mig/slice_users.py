"""Which slice a process on a shared GPU belongs to, as /proc tells root: by cgroup, by parent, by environment."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Mapping, Sequence

from gres_mig import machine
from gres_mig.models import Process, Record
from gres_mig.slice_models import GpuUser

VARIABLE = "GRES_MIG_SLICE"
"""In the environment of every process of a slice; its value is the nonce of the slice's record."""

_JOB = re.compile(
    r"^\d+:[^:\n]*:/(?:system\.slice/(?:[^/\n]+_)?slurmstepd\.scope|slurm[^/\n]*/uid_\d+)/job_([0-9]+)(?:/|$)",
    re.MULTILINE,
)
"""Slurm's own cgroups, version 2 and 1, from the root on: below `user@UID.service` a user names his as he likes."""
_MOST_PARENTS = 64


def users(
    used_mib: Mapping[int, int], records: Iterable[Record], nonces: Container[str] = frozenset()
) -> tuple[GpuUser, ...]:
    """Those processes, each with the slice it belongs to; one that ended meanwhile is none.

    `nonces` are those of the slices that are there, recorded or not.
    """
    slices = [record for record in records if record.slice]
    found = []
    for pid, mib in sorted(used_mib.items()):
        process = machine.process(pid)
        if process is not None:
            found.append(GpuUser(pid, process.start, mib, belongs(process, slices, nonces)))
    return tuple(found)


def belongs(process: Process, slices: Sequence[Record], nonces: Container[str] = frozenset()) -> str:
    """The nonce of its slice's record, or an empty string.

    What a process cannot change about itself comes first; its environment is believed only to be its owner's.
    """
    job = job_of(_read(process.pid, "cgroup"))
    mine = next((r.nonce for r in slices if job and _job_id(r) == job), "")
    if mine:
        return mine
    for parent in _line(process):
        found = [r.nonce for r in slices if parent in r.witnesses]
        if len(found) == 1:
            return found[0]
    return _claimed(process.pid, slices, nonces)


def job_of(cgroups: str) -> str:
    """The Slurm job that a process is in by its /proc/PID/cgroup; empty: none."""
    found = _JOB.search(cgroups)
    return found[1] if found else ""


def _claimed(pid: int, slices: Sequence[Record], nonces: Container[str]) -> str:
    entries = _read(pid, "environ").split("\0")
    claimed = next((entry.partition("=")[2] for entry in entries if entry.startswith(f"{VARIABLE}=")), "")
    record = next((r for r in slices if r.nonce == claimed), None)
    if record is None:
        # Of a slice without a record nobody knows the owner.
        return claimed if claimed in nonces else ""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return ""
    # Root's own owners run programs as whom they like.
    return claimed if record.owner.uid in (0, uid) else ""


def _line(process: Process) -> Iterable[Process]:
    """The process, its parent and so on: a kernel's children are the kernel's."""
    current: Process | None = process
    for _ in range(_MOST_PARENTS):
        if current is None:
            return
        yield current
        fields = _read(current.pid, "stat").rpartition(")")[2].split()
        current = machine.process(int(fields[1])) if len(fields) > 1 else None


def _job_id(record: Record) -> str:
    kind, _, rest = record.owner.name.partition(":")
    return rest.rpartition(":")[2] if kind == "slurm" else ""


def _read(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        # It has ended, or is not ours to look into.
        return ""

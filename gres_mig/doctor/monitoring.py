"""Checks of what dcgm-exporter is told: that it can be written, that the exporter reads it, and that it hears us."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gres_mig.doctor.finding import Finding
from gres_mig.doctor.node import folder
from gres_mig.doctor.processes import Running, running
from gres_mig.exporter_reload import PROGRAM, is_exporter, pids
from gres_mig.models import Settings

_OPTIONS = ("--hpc-job-mapping-dir", "-hpc-job-mapping-dir")
_VARIABLE = "DCGM_HPC_JOB_MAPPING_DIR"


def mapping(settings: Settings, owner: int, own_proc: Path, proc: Path) -> Iterator[Finding]:
    """The folder of the job mapping is root's, and the one that a running exporter reads."""
    if not settings.dcgm_mapping:
        return
    yield from folder("job mapping", settings.dcgm_mapping, private=False, owner=owner, proc=own_proc)
    for process in running(proc, (PROGRAM,)):
        reads = _mapping_of(process)
        if not _is_same(process, reads, settings.dcgm_mapping):
            text = f"{PROGRAM} (pid {process.pid}) reads {reads or 'no job mapping'}, not {settings.dcgm_mapping}"
            todo = f"start it with: {PROGRAM} {_OPTIONS[0]}={settings.dcgm_mapping}"
            yield Finding("job mapping", "warning", text, f"{todo}; run: systemctl edit {PROGRAM}.service")


def reload(settings: Settings, root: Path) -> Iterator[Finding]:
    """What is to get SIGHUP is the exporter."""
    if not settings.dcgm_sighup:
        return
    try:
        found = pids(settings.dcgm_sighup, str(root))
    except OSError as error:
        found, why = (), f"{settings.dcgm_sighup}: {error.strerror}"
    else:
        why = f"{settings.dcgm_sighup} names no running {PROGRAM}"
    if any(is_exporter(pid) for pid in found):
        yield Finding("SIGHUP", "ok", f"{settings.dcgm_sighup} is {PROGRAM}")
    else:
        todo = f"put its unit or pid file into dcgm_sighup in {settings.config_path}; run: pgrep -a {PROGRAM}"
        yield Finding("SIGHUP", "warning", f"{why}: metrics of new instances come late", todo)


def _is_same(process: Running, reads: str, written: str) -> bool:
    # A container has the folder under a name of its own.
    theirs = process.folder / "root" / reads.lstrip("/")
    try:
        return bool(reads) and (reads == written or os.path.samefile(theirs, written))
    except OSError:
        return False


def _mapping_of(process: Running) -> str:
    arguments = process.arguments
    for number, word in enumerate(arguments):
        name, sign, value = word.partition("=")
        if name in _OPTIONS:
            return value if sign else next(iter(arguments[number + 1 :]), "")
    return process.environment().get(_VARIABLE, "")

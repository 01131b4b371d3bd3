"""Checks of what lies on this machine's disk: the hooks, the submit script, gres.conf."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
from collections.abc import Iterable, Iterator
from functools import partial

from gres_mig import __version__
from gres_mig.doctor import Finding
from gres_mig.models import Gpu
from gres_mig_slurm import conf_lines, setup, wanted
from gres_mig_slurm.conf_lines import Conf, Line
from gres_mig_slurm.running import Cluster

_SETUP = "run: gres-mig slurm setup --write"
_VERSION = "import gres_mig, gres_mig_slurm.prolog; print(gres_mig.__version__)"
_PYTHON_S = 10.0


def hooks(cluster: Cluster) -> Iterator[Finding]:
    """The hooks that slurm.conf names are ours, whole, of this version, and root's alone to change."""
    wrong = list(_unlike(cluster))
    yield from wrong
    if not wrong:
        yield Finding("hooks", "ok", os.path.dirname(cluster.value("Prolog")))


def _unlike(cluster: Cluster) -> Iterator[Finding]:
    folders = set()
    for key, name in wanted.HOOKS.items():
        path = cluster.value(key)
        if os.path.basename(path) != name:
            ours = os.path.join(cluster.etc, wanted.FOLDER, name)
            text = f"{key} is {path or 'not set'}: gres-mig's is not run; one of the site's own can be chained to it"
            yield Finding("hooks", "problem", text, cluster.todo(key, partial(_always, ours)))
            continue
        folders.add(os.path.dirname(path))
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                same = file.read() == setup.packaged(name)
        except OSError as error:
            yield Finding("hooks", "problem", f"{path}: {error.strerror}", _SETUP)
            continue
        yield from _root_alone(path, executable=True)
        if not same:
            yield Finding("hooks", "problem", f"{path} is not the one of gres-mig {__version__}", _SETUP)
    for folder in sorted(folders):
        yield from _root_alone(folder)
        yield from _interpreter(os.path.join(folder, wanted.ENV))


def _always(value: str, _: str) -> str:
    return value


def _interpreter(path: str) -> Iterator[Finding]:
    yield from _root_alone(path)
    given = setup.assigned(path)
    python = given.get("PYTHON", "")
    if not os.access(python, os.X_OK):
        yield Finding("hooks", "problem", f"{path} names no Python that runs ({python or 'none'})", _SETUP)
        return
    yield from _root_alone(os.path.realpath(python))
    command = [python, "-I", "-c", _VERSION]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PYTHON_S, check=False)
        said = done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]
    except subprocess.TimeoutExpired:
        said = f"no answer within {_PYTHON_S:g} s"
    if said != __version__:
        text = f"the hooks' Python has another gres-mig than {__version__}, or none: {said}"
        yield Finding("hooks", "problem", text, f"run: {shlex.join(command)}")
    for key in ("PROLOG_CHAIN", "EPILOG_CHAIN", "TASK_PROLOG_CHAIN"):
        program = given.get(key)
        if program and not os.access(program, os.X_OK):
            text = f"{key} in {path} is no program: {program}"
            yield Finding("hooks", "problem", text, f"correct it, or take the line out of {path}")


def _root_alone(path: str, *, executable: bool = False) -> Iterator[Finding]:
    try:
        status = os.stat(path)
    except OSError as error:
        yield Finding("hooks", "problem", f"{path}: {error.strerror}", _SETUP)
        return
    if status.st_uid != 0:
        text = f"{path} belongs to uid {status.st_uid}, who could have root run anything"
        yield Finding("hooks", "problem", text, f"run: chown root:root {shlex.quote(path)}")
    if status.st_mode & 0o022:
        text = f"{path} can be written by others than root (mode {stat.S_IMODE(status.st_mode):04o})"
        yield Finding("hooks", "problem", text, f"run: chmod go-w {shlex.quote(path)}")
    if executable and status.st_mode & 0o555 != 0o555:
        text = f"{path} is not executable for all (mode {stat.S_IMODE(status.st_mode):04o})"
        yield Finding("hooks", "problem", text, f"run: chmod 0755 {shlex.quote(path)}")


def submit_script(cluster: Cluster) -> Iterator[Finding]:
    """The script beside slurm.conf is ours; slurmctld alone reads it, so that elsewhere it need not be there."""
    path = os.path.join(cluster.etc, setup.LUA)
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            script = file.read()
    except OSError as error:
        if cluster.is_controller:
            yield Finding("job_submit.lua", "problem", f"{path}: {error.strerror}", _SETUP)
        return
    if not setup.is_ours(script):
        yield Finding("job_submit.lua", "problem", f"{path} is not gres-mig's; the site's own is kept", _SETUP)
    elif script != setup.packaged(setup.LUA):
        yield Finding("job_submit.lua", "problem", f"{path} is of another version of gres-mig", _SETUP)
    else:
        yield Finding("job_submit.lua", "ok", path)


def gres_conf(gres: Conf) -> Iterator[Finding]:
    """It counts migmem, and does not go looking for GPUs by itself."""
    found = False
    for line in gres.lines:
        value = line.get("AutoDetect")
        if value and value.lower() != "off":
            found = True
            text = f"{line.where} has AutoDetect={value}: MIG instances that come and go would be counted as gres/gpu"
            yield Finding("gres.conf", "problem", text, f"{line.where}: {line.with_value('AutoDetect', 'off').strip()}")
    ours = [line for line in gres.lines if (line.get("Name") or "").lower() == "migmem"]
    if not ours:
        found = True
        text = f"{gres.path} has no line for migmem"
        yield Finding("gres.conf", "problem", text, f"{gres.path}: {wanted.COUNT_ONLY}")
    for line in ours:
        if "countonly" not in (line.get("Flags") or "").lower() or line.get("File"):
            found = True
            text = f"{line.where} has to be nothing but a count"
            yield Finding("gres.conf", "problem", text, f"{line.where}: {wanted.COUNT_ONLY}")
    if not found:
        yield Finding("gres.conf", "ok", gres.path)


def gpus_counted_twice(gres: Conf, node: str, managed: Iterable[Gpu]) -> Iterator[Finding]:
    """No GPU whose memory is migmem is a gres/gpu as well: one job would have the whole of it, and others its parts."""
    minors = {gpu.minor: gpu for gpu in managed}
    for line in gres.lines:
        if (line.get("Name") or "").lower() not in ("gpu", "shard", "mps") or not _is_of(line, node):
            continue
        both = sorted(minor for minor in _minors(line.get("File") or "") if minor in minors)
        for minor in both:
            gpu = minors[minor]
            text = f"{line.where} gives out /dev/nvidia{minor}, which is GPU {gpu.index} ({gpu.uuid}) and managed"
            todo = f"take /dev/nvidia{minor} out of that line, or {gpu.uuid} out of gpus in gres-mig's configuration"
            yield Finding("gres.conf", "problem", text, todo)


def _is_of(line: Line, node: str) -> bool:
    named = line.get("NodeName")
    return named is None or node in conf_lines.hosts(named)


def _minors(files: str) -> Iterator[int]:
    for name in conf_lines.hosts(files):
        found = re.fullmatch(r".*/nvidia(\d+)", name)
        if found:
            yield int(found[1])

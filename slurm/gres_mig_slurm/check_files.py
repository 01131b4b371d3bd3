"""Checks of what lies on this machine's disk: the hooks, the submit script, gres.conf."""

from __future__ import annotations

import glob
import os
import shlex
import stat
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial

from gres_mig import __version__
from gres_mig.doctor import Finding
from gres_mig_slurm import check_chain, setup, trust, wanted
from gres_mig_slurm.conf_lines import Conf
from gres_mig_slurm.running import Cluster

_SETUP = "run: gres-mig slurm setup --write"
_INSTALLED = """\
import gres_mig, gres_mig_slurm.prolog
print(gres_mig.__version__, gres_mig.__file__, gres_mig_slurm.__file__, sep="\\n")
"""
_PYTHON_S = 10.0
_HANDOVER = "/run/gres-mig/slurm"
"""What the hooks use where their settings name no other."""


def hooks(cluster: Cluster) -> Iterator[Finding]:
    """The hooks that slurm.conf names are ours, whole, of this version, and root's alone to change."""
    wrong = list(_unlike(cluster))
    told = {each.todo for each in wrong if each.check == "hooks"}
    # Who can change our folder can change a site's program in it: that is one thing wrong.
    yield from (each for each in wrong if each.check == "hooks" or each.todo not in told)
    if not wrong:
        yield Finding("hooks", "ok", os.path.dirname(_hook(cluster, "Prolog")))


def _unlike(cluster: Cluster) -> Iterator[Finding]:
    folders = set()
    for key, name in wanted.HOOKS.items():
        path = _hook(cluster, key)
        if not _is_ours(path, name):
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
        env = os.path.join(folder, wanted.ENV)
        yield from _root_alone(folder)
        yield from _interpreter(env)
        yield from _closed(folder, setup.assigned(env).get("HANDOVER") or _HANDOVER)


def _hook(cluster: Cluster, key: str) -> str:
    """Ours, where the cluster has several of that kind; else what it has."""
    paths = (path for value in cluster.values(key) for path in (value, *sorted(glob.glob(value))))
    found = (os.path.realpath(path) for path in paths if _is_ours(os.path.realpath(path), wanted.HOOKS[key]))
    return next(found, cluster.value(key))


def _is_ours(path: str, name: str) -> bool:
    """Whether that is our hook of that name, of whatever version; a site's own may have the same name."""
    if os.path.basename(path) != name:
        return False
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return wanted.ENV in file.read()
    except OSError:
        return os.path.basename(os.path.dirname(path)) == wanted.FOLDER


def _always(value: str, _: str) -> str:
    return value


def _interpreter(path: str) -> Iterator[Finding]:
    yield from _root_alone(path)
    given = setup.assigned(path)
    yield from check_chain.programs(path)
    python = given.get("PYTHON", "")
    if not os.access(python, os.X_OK):
        yield Finding("hooks", "problem", f"{path} names no Python that runs ({python or 'none'})", _SETUP)
        return
    any_python = setup.ANY_PYTHON in given
    others = [] if any_python else list(trust.flaws(python))
    yield from _told(others)
    # One that others can change is not run by root here either.
    if not others:
        yield from _installed(python, any_python=any_python)


def _installed(python: str, *, any_python: bool) -> Iterator[Finding]:
    """The gres-mig that the hooks' Python imports: this one, and root's alone to change."""
    command = [python, "-I", "-c", _INSTALLED]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PYTHON_S, check=False)
        said = done.stdout.splitlines() or done.stderr.strip().splitlines()[-1:] or [""]
    except subprocess.TimeoutExpired:
        said = [f"no answer within {_PYTHON_S:g} s"]
    if said[0] != __version__:
        text = f"the hooks' Python has another gres-mig than {__version__}, or none: {said[0]}"
        yield Finding("hooks", "problem", text, f"run: {shlex.join(command)}")
    elif not any_python:
        yield from _told(trust.flaws(*said[1:]))


def _root_alone(path: str, *, executable: bool = False) -> Iterator[Finding]:
    yield from _told(trust.of(path))
    with suppress(OSError):
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if executable and mode & 0o555 != 0o555:
            text = f"{path} is not executable for all (mode {mode:04o})"
            yield Finding("hooks", "problem", text, f"run: chmod 0755 {shlex.quote(path)}")


def _told(flaws: Iterable[trust.Flaw]) -> Iterator[Finding]:
    return (Finding("hooks", "problem", flaw.text, flaw.todo) for flaw in flaws)


def _closed(*paths: str) -> Iterator[Finding]:
    """Folders on the way to what a task prolog needs, which its user cannot enter."""
    above: set[str] = set()
    for path in paths:
        folder = os.path.realpath(path)
        while folder not in above:
            above.add(folder)
            folder = os.path.dirname(folder)
    for folder in sorted(above):
        with suppress(OSError):
            mode = stat.S_IMODE(os.stat(folder).st_mode)
            if not mode & 0o001:
                text = f"{folder} cannot be entered by the jobs' users (mode {mode:04o}), whose task prolog has to"
                yield Finding("hooks", "problem", text, f"run: chmod a+x {shlex.quote(folder)}")


def submit_script(cluster: Cluster, name: str = setup.LUA) -> Iterator[Finding]:
    """The script beside slurm.conf is ours; slurmctld alone reads it, so that elsewhere it need not be there."""
    path = os.path.join(cluster.etc, name)
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            script = file.read()
    except OSError as error:
        if cluster.is_controller:
            yield Finding(name, "problem", f"{path}: {error.strerror}", _SETUP)
        return
    if not setup.is_ours(script):
        yield Finding(name, "problem", f"{path} is not gres-mig's; the site's own is kept", _SETUP)
    elif script != setup.packaged(name):
        yield Finding(name, "problem", f"{path} is of another version of gres-mig", _SETUP)
    else:
        yield Finding(name, "ok", path)


def gres_conf(gres: Conf) -> Iterator[Finding]:
    """It counts migmem, and nothing but counts it."""
    found = False
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

"""Checks of the node itself: configuration, folders, clock, permissions, processes that hold a lock."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from gres_mig import __version__, config, machine
from gres_mig.doctor.finding import Finding, Level
from gres_mig.errors import GresMigError
from gres_mig.locks import lock_holders
from gres_mig.models import Gpu, Settings
from gres_mig.mounts import NETWORK, file_system

_FIRST_YEAR = 1_704_067_200.0
"""2024 began then: a clock that shows less was never set."""

_LITTLE_SPACE = 1 << 20

_AGAIN = "run: gres-mig doctor"


def version() -> Iterator[Finding]:
    """What runs here."""
    number = ".".join(map(str, sys.version_info[:3]))
    yield Finding("version", "ok", f"gres-mig {__version__}, Python {number}")


def configuration(settings: Settings, error: GresMigError | None) -> Iterator[Finding]:
    """The configuration is there, can be read and is root's; `error` is what reading it raised."""
    file = settings.config_path
    if error is not None:
        todo = "; ".join(filter(None, (error.hint, "correct it, then run: gres-mig doctor")))
        yield Finding("configuration", "problem", error.message, todo)
        return
    try:
        status = os.stat(file)
    except FileNotFoundError:
        yield Finding("configuration", "warning", f"there is no {file}, so no GPU is managed", "run: gres-mig setup")
        return
    if status.st_uid != 0 and not settings.simulator:
        text = f"{file} belongs to uid {status.st_uid}: whoever that is can take any GPU"
        yield Finding("configuration", "problem", text, f"run: chown root:root {file}")
    else:
        yield Finding("configuration", "ok", file)


def validated(settings: Settings) -> Iterator[Finding]:
    """What is kept of the validated configuration is of the file as it is, so that hooks need not validate it."""
    # Where it is looked for before the file has said where the locks are.
    usual = config.defaults(settings.config_path)
    beside = settings.simulator and os.path.dirname(settings.config_path) == settings.simulator
    kept = os.path.join(settings.run_dir if beside else usual.run_dir, "config.json")
    try:
        with open(settings.config_path, encoding="utf-8") as file:
            text = file.read()
        with open(kept, encoding="utf-8") as file:
            current = text in json.load(file)["key"]
    except (OSError, ValueError, KeyError, TypeError):
        # There is none yet, or none that counts: the next command of root's keeps one.
        return
    if not current:
        text = f"{kept} is of an older {settings.config_path}: each command reads that anew, which takes longer"
        yield Finding("configuration", "warning", text, "run as root: gres-mig status")


def managed_gpus(gpus: Sequence[Gpu], settings: Settings) -> Iterator[Finding]:
    """What is managed is on this node, and what is allowed exists."""
    if not settings.manages_any:
        yield Finding("managed GPUs", "warning", "no GPU of this node is managed", "run: gres-mig setup")
        return
    known = {name for gpu in gpus for name in (gpu.uuid, gpu.pci_bus_id.lower())}
    gone = [entry for entry in settings.managed if entry != "*" and entry not in known]
    for entry in gone:
        text = f"{entry} is managed, but not on this node"
        yield Finding(
            "managed GPUs", "problem", text, f"see: dmesg; if it is gone for good, {without(settings, entry)}"
        )
    for entry in settings.slicing.gpus:
        if entry != "*" and entry not in known:
            gone.append(entry)
            todo = f"see: dmesg; if it is gone for good, take it out of slices in {settings.config_path}; {_AGAIN}"
            yield Finding("managed GPUs", "problem", f"{entry} is to be shared, but not on this node", todo)
    for model, names in settings.allowed.items():
        offered = {p.name.lower() for gpu in gpus if gpu.model == model for p in gpu.profiles}
        unknown = [name for name in names if offered and name.lower() not in offered]
        if unknown:
            text = f"{', '.join(unknown)} is allowed for {model}, which has no such profile"
            todo = f"run: gres-mig profiles; correct [profiles] in {settings.config_path}"
            yield Finding("managed GPUs", "warning", text, todo)
    number = sum(settings.manages(gpu) for gpu in gpus)
    if number:
        yield Finding("managed GPUs", "ok", f"{number} of {len(gpus)} GPUs of this node")
    elif not gone:
        yield Finding("managed GPUs", "warning", "there is no GPU to manage on this node")


def without(settings: Settings, entry: str) -> str:
    """What to type to have a GPU managed no more."""
    left = ",".join(each for each in settings.managed if each != entry)
    if left and "*" not in left:
        return f"run: gres-mig setup --write --gpus {left}"
    return f"take it out of gpus in {settings.config_path}; run: gres-mig setup"


def folder(name: str, path: str, *, private: bool, owner: int, proc: Path) -> Iterator[Finding]:
    """A folder of gres-mig's is its owner's alone (`private`: to read, too), on a disk of this machine with space."""
    kind = file_system(path, proc)
    wrong = []
    if kind in NETWORK:
        text = f"{path} is on a network file system ({kind}): a node's records belong on a disk of its own"
        wrong.append(
            (text, f"name a folder on a disk of this machine in its place; run: df -hT {os.path.dirname(path)}")
        )
    where = f"{path} on {kind}" if kind else path
    try:
        status = os.stat(path)
    except FileNotFoundError:
        where = f"{path} is made when it is needed first"
    except PermissionError:
        where = f"{path} is closed to this user, as it should be"
    else:
        wrong += _wrong(path, status, 0o077 if private else 0o022, owner)
        space = os.statvfs(path)
        if space.f_bavail * space.f_frsize < _LITTLE_SPACE:
            text = f"the disk that holds {path} is full"
            wrong.append((text, f"make room on it, giving back still works for a while; run: df -h {path}"))
    for text, todo in wrong:
        yield Finding(name, "problem", text, todo)
    if not wrong:
        yield Finding(name, "ok", where)


def clock(now: float, state_file: str) -> Iterator[Finding]:
    """The clock is set: ages and the pauses between tries are measured by it."""
    try:
        written = os.stat(state_file).st_mtime
    except OSError:
        written = 0.0
    todo = "run: timedatectl set-ntp true"
    if now < _FIRST_YEAR:
        yield Finding("clock", "problem", "the clock was never set: it shows a time before 2024", todo)
    elif now < written - 60:
        yield Finding("clock", "problem", f"the clock is {written - now:,.0f} s behind the last record", todo)
    else:
        yield Finding("clock", "ok", "set, and not behind the records")


def permissions(settings: Settings, uid: int, root: Path) -> Iterator[Finding]:
    """This user may make instances; nobody else needs to."""
    if settings.simulator:
        if os.access(settings.simulator, os.W_OK, effective_ids=True):
            yield Finding("permissions", "ok", "this simulated node is yours to change")
        else:
            yield Finding("permissions", "warning", f"{settings.simulator} is not yours: you can look, not allocate")
    elif uid == 0:
        yield Finding("permissions", "ok", "root")
    else:
        config_node = root / "dev/nvidia-caps/nvidia-cap1"
        but = f", though it may open {config_node}" if os.access(config_node, os.R_OK, effective_ids=True) else ""
        text = f"uid {uid} can look, not allocate{but}; some checks need root"
        yield Finding("permissions", "warning", text, "run as root: gres-mig doctor")


def locks(settings: Settings, fenced: Collection[str], proc: Path) -> Iterator[Finding]:
    """No process sits on a lock for longer than hardware work may take."""
    found = False
    for name, pid in sorted(lock_holders(settings.run_dir, proc).items()):
        begun_ns = machine.begun_ns(pid)
        held_s = (machine.now_ns() - begun_ns) / 1e9
        ended = not begun_ns
        if ended or (name not in fenced and held_s < settings.hardware_timeout_s + settings.in_use_wait_s):
            continue
        found = True
        what = "the node's lock" if name == "node" else f"the lock of {name}"
        text = f"{machine.describe(pid)} holds {what} and is {held_s:,.0f} s old: it may be in a driver call that hangs"
        level: Level = "problem" if name in fenced or _hangs(proc, pid) else "warning"
        yield Finding(
            "locks", level, text, f"run: cat /proc/{pid}/stack; if it stays there, reset the GPU or reboot the node"
        )
    if not found:
        yield Finding("locks", "ok", "nobody sits on one")


def _hangs(proc: Path, pid: int) -> bool:
    """Whether the process is inside a call of the kernel's that nothing interrupts, or is stopped."""
    try:
        state = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in ("D", "T", "t")


def _wrong(path: str, status: os.stat_result, others: int, owner: int) -> Iterator[tuple[str, str]]:
    if not stat.S_ISDIR(status.st_mode):
        yield f"{path} is not a folder", f"run: mv {path} {path}.old"
        return
    if status.st_uid not in (0, owner):
        yield f"{path} belongs to uid {status.st_uid}", f"run: chown root:root {path}"
    if status.st_mode & others:
        who = "readable or writable" if others & 0o044 else "writable"
        allowed = f"{0o777 & ~others:04o}"
        yield f"{path} is {who} for others (mode {stat.S_IMODE(status.st_mode):04o})", f"run: chmod {allowed} {path}"

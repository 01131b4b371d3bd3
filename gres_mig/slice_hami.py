"""Slices held to their memory by the admin's HAMi-core: the environment of their processes, and the proof of it.

The library counts what its own process allocates, as long as it is preloaded; docs/slices.md says what that is worth.
"""

from __future__ import annotations

import os
import stat
import sys

from gres_mig.errors import NodeFault
from gres_mig.files import on_the_way
from gres_mig.slice_models import Slicing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PROBE = """\
import ctypes, os
os.umask(0o027)
free, total = ctypes.c_size_t(), ctypes.c_size_t()
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
for name, arguments in (
    ("cuInit", (0,)),
    ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), 0)),
    ("cuCtxSetCurrent", (context,)),
    ("cuMemGetInfo_v2", (ctypes.byref(free), ctypes.byref(total))),
):
    code = getattr(cuda, name)(*arguments)
    if code:
        raise SystemExit(f"{name} answers {code}")
print(total.value >> 20, oct(os.umask(0o027))[2:])
"""
"""Says how much memory a CUDA program sees, and what became of its umask. With ctypes, for no CUDA package need be
there; device 0, for the environment shows one GPU."""


def flaw(slicing: Slicing, *, simulated: bool) -> str:
    """Why no slice can be had through it; empty when one can."""
    if not slicing.hami_core:
        return "hami_core names no library"
    for path in filter(None, (slicing.hami_core, slicing.keep_umask)):
        if not os.path.isfile(path):
            return f"{path} is no file"
        owners = {0, os.geteuid()} if simulated else {0}
        for part in on_the_way(path):
            try:
                status = os.stat(part)
            except OSError as error:
                return f"{part}: {error.strerror}"
            # Whoever could change it, or put another in its place, would run in every owner's processes.
            sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
            if status.st_uid not in owners or (status.st_mode & 0o022 and not sticky):
                mode = stat.S_IMODE(status.st_mode)
                return f"{path} is not root's alone: {part} belongs to uid {status.st_uid} and has mode {mode:04o}"
    return ""


def variables(slicing: Slicing, folder: str, memory_mib: int) -> tuple[str, ...]:
    """What makes a process and its children stay within so much memory; `cache` in `folder` is theirs.

    The bare limit and that of device 0 are both read; an index instead of a UUID in CUDA_VISIBLE_DEVICES, or a file
    that another slice wrote, would lift them (measured, HAMi-core 8f3a89c).
    """
    preload = ":".join(filter(None, (slicing.keep_umask, slicing.hami_core)))
    return (
        f"LD_PRELOAD={preload}",
        f"CUDA_REDIRECT={slicing.hami_core}",
        f"CUDA_DEVICE_MEMORY_LIMIT={memory_mib}m",
        f"CUDA_DEVICE_MEMORY_LIMIT_0={memory_mib}m",
        f"CUDA_DEVICE_MEMORY_SHARED_CACHE={os.path.join(folder, 'cache')}",
        # Its four lines a process break whatever reads the output of nvidia-smi (HAMi issue 1777).
        "LIBCUDA_LOG_LEVEL=0",
    )


def prove(environment: Mapping[str, str], memory_mib: int, uid: int, limit_s: float) -> None:
    """Start a process of the owner's with exactly that environment; `NodeFault` when it is not held to its memory."""
    import subprocess

    command: Sequence[str] = (sys.executable, "-I", "-S", "-c", _PROBE)
    doing = f"starting a process under {environment['CUDA_REDIRECT']}"
    who = {"user": uid, "group": _group(uid), "extra_groups": ()} if os.geteuid() == 0 and uid else {}
    try:
        done = subprocess.run(  # type: ignore[call-overload]
            command,
            env=environment,
            cwd="/",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
            **who,
        )
    except OSError as error:
        hint = "install gres-mig where its users can run it, such as /opt/gres-mig"
        raise _failed(f"{doing} as uid {uid}: {error.filename or command[0]}: {error.strerror}", hint) from error
    except subprocess.TimeoutExpired as error:
        raise _failed(f"{doing} as uid {uid}: it did not end within {limit_s:g} s") from error
    complaints = done.stderr.strip().splitlines()
    # The loader says so and goes on.
    ignored = next((line for line in complaints if "cannot be preloaded" in line), "")
    if done.returncode or ignored:
        said = ignored or (complaints or [f"it ended with {done.returncode}"])[-1]
        raise _failed(f"{doing} as uid {uid}: {said}")
    # The last line: what else is preloaded may say something first.
    last = done.stdout.strip().rpartition("\n")[2]
    try:
        sees_mib, umask = int(last.split()[0]), last.split()[1]
    except (ValueError, IndexError) as error:
        # Whose process it is can have it say anything.
        raise _failed(f"{doing} as uid {uid}: it says {last[:80]!r}") from error
    if not 0 < sees_mib <= memory_mib:
        raise _failed(f"the limit of {memory_mib:,} MiB is not in force: {doing}, it sees {sees_mib:,} MiB")
    if umask != "27":
        hint = "run: gres-mig slices build /usr/local/lib/gres-mig/keep_umask.so, and name it as keep_umask"
        raise _failed(f"{doing} changes its umask to {umask}: all that it writes could be written by others", hint)


def _failed(text: str, hint: str = "see docs/slices.md, or take the GPU out of slices") -> NodeFault:
    return NodeFault(text, hint=hint, code="SLICE")


def _group(uid: int) -> int:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        return uid

"""A stand-in for libvgpu.so, built from a few lines of C: it limits, counts, sets the umask, and fails when told to.

It answers as libcuda.so.1 too, by that name, for there is none where tests run.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gres_mig.slice_models import Slicing
from tests.command_line import here

SOURCE = r"""
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static size_t limit, used;

int cuInit(unsigned flags)
{
    const char *text = getenv("CUDA_DEVICE_MEMORY_LIMIT_0"), *cache = getenv("CUDA_DEVICE_MEMORY_SHARED_CACHE");
    int file;
#ifdef FAILS
    return 999;
#endif
#ifdef HANGS
    pause();
#endif
#ifdef KILLED
    if (getuid() != 65534)
        kill(getpid(), SIGKILL);
#endif
#ifdef TRACED
    if (getuid() != 65534) {
        if (write(1, "\377 nonsense\n", 11) != 11)
            exit(1);
        _exit(0);
    }
#endif
#ifndef NO_LIMIT
    limit = (size_t)atol(text ? text : "0") << 20;
#endif
#ifndef KEEPS_UMASK
    umask(0);
#endif
    file = open(cache ? cache : "/nowhere/cache", O_RDWR | O_CREAT, 0666);
    if (file < 0)
        exit(1);
#ifdef WRITES
    if (write(file, "x", 1) != 1)
        exit(1);
#endif
    close(file);
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    *context = &limit;
    return 0;
}

int cuCtxSetCurrent(void *context)
{
    return 0;
}

int cuMemGetInfo_v2(size_t *available, size_t *total)
{
    *total = limit ? limit : (size_t)46068 << 20;
    *available = *total - used;
    return 0;
}

int cuMemAlloc_v2(unsigned long long *address, size_t size)
{
    if (limit && used + size > limit)
        return 2;
    used += size;
    *address = 1;
    return 0;
}
"""

PROGRAM = """\
import ctypes, os, sys
cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
free, total, address = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_ulonglong()
cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
taken = 0
while cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(100 << 20)) == 0 and taken < 100000:
    taken += 100
"""
"""A program of a slice's owner: it takes memory until it gets no more."""


def require_compiler() -> None:
    """Skip the module where nothing can be compiled; CI makes that a failure."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here; install one, such as gcc", allow_module_level=True)


def built(folder: Path, *flags: str) -> str:
    """The library, with these of its ways: FAILS, HANGS, KILLED, TRACED, WRITES, NO_LIMIT, KEEPS_UMASK."""
    library = folder / f"lib{'-'.join(('vgpu', *flags))}.so"
    (folder / "vgpu.c").write_text(SOURCE)
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(folder / "vgpu.c")]
    subprocess.run([*command, *(f"-D{flag}" for flag in flags)], check=True)
    library.chmod(0o755)
    return str(library)


def slicing(folder: Path, *flags: str, **more: object) -> Slicing:
    """What shares all GPUs without MIG by it, with the umask kept."""
    keep_umask = folder / "keep_umask.so"
    if not keep_umask.exists():
        assert here("slices", "build", keep_umask).code == 0
    given = {"gpus": ("*",), "hami_core": built(folder, *flags), "keep_umask": str(keep_umask), **more}
    return Slicing(**given)

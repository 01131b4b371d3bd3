"""A program in a slice that does what it is told: takes GPU memory until it gets no more, feeds itself through workers.

    python bench/slice_worker.py torch|driver [SIMULATED NODE]

Each line of its standard input is answered by a line of JSON. `torch` allocates through PyTorch, `driver` through the
driver's own interface. On a simulated node it tells the board what it holds, for nobody else can.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from functools import partial
from multiprocessing.synchronize import Barrier
from typing import Any

STEPS_MIB = (256, 64, 16)
"""The last is how exactly the point is found at which memory ends."""
WORKERS, ITEMS, HELD_MIB = 2, 8, 64
"""A worker that uses the GPU holds so much."""
PATIENCE_S = 120.0
_WORKER: list[Program] = []


class Refused(Exception):
    """No more memory is given; the text is the reason."""


class Torch:
    """Memory through PyTorch's allocator, as most programs have it."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._held: list[Any] = []

    def start(self) -> None:
        """Use CUDA for the first time."""
        self._torch.cuda.init()
        self._torch.empty(1, device="cuda")

    def total_mib(self) -> int:
        """What it is told that the GPU has."""
        return int(self._torch.cuda.mem_get_info()[1]) >> 20

    def take(self, mib: int) -> None:
        """So much more."""
        try:
            self._held.append(self._torch.empty(mib << 20, dtype=self._torch.uint8, device="cuda"))
        except self._torch.cuda.OutOfMemoryError as error:
            raise Refused("out of memory") from error

    def batches(self, method: str, begin: Any) -> Iterator[Any]:
        """One epoch, through a DataLoader whose workers end with it."""
        from torch.utils.data import DataLoader

        # A range has a length and items, which is all that a dataset needs.
        items: Any = range(ITEMS)
        yield from DataLoader(items, num_workers=WORKERS, multiprocessing_context=method, worker_init_fn=begin)


class Driver:
    """Memory through libcuda.so.1 itself."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def start(self) -> None:
        """Use CUDA for the first time."""
        context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)

    def total_mib(self) -> int:
        """What it is told that the GPU has."""
        left, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(left), ctypes.byref(total))
        return total.value >> 20

    def take(self, mib: int) -> None:
        """So much more."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(mib << 20))

    def batches(self, method: str, begin: Any) -> Iterator[Any]:
        """One epoch, through a pool of processes that end with it."""
        with multiprocessing.get_context(method).Pool(WORKERS, initializer=begin) as pool:
            yield from pool.imap(abs, range(ITEMS))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise Refused("out of memory" if code == 2 else f"{name} answers {code}")


class Program:
    """What it holds, and what it can be told."""

    def __init__(self, kind: str, simulated: str) -> None:
        self._memory: Torch | Driver = Torch() if kind == "torch" else Driver()
        self._kind, self._simulated, self._held_mib = kind, simulated, 0

    def start(self) -> dict[str, Any]:
        """Use CUDA for the first time."""
        self._memory.start()
        return {"total_mib": self._memory.total_mib()}

    def write(self, path: str) -> dict[str, Any]:
        """Make a file as any program does; its mode is the umask's doing."""
        with open(path, "w", encoding="utf-8"):
            return {"mode": f"{os.stat(path).st_mode & 0o777:04o}"}

    def fill(self, most_mib: str) -> dict[str, Any]:
        """Take memory until it is refused, or has so much."""
        why = ""
        for step_mib in STEPS_MIB:
            try:
                while self._held_mib + step_mib <= int(most_mib):
                    self.take(step_mib)
            except Refused as refused:
                why = str(refused)
        return {"held_mib": self._held_mib, "refused": why}

    def take(self, mib: int) -> None:
        """So much more."""
        self._memory.take(mib)
        self._held_mib += mib
        if self._simulated:
            from gres_mig.simulator.admin import Node

            node = Node(self._simulated)
            gpu = node.uuids.index(os.environ["CUDA_VISIBLE_DEVICES"])
            node.let_go(gpu)
            node.hold(gpu, memory_mib=self._held_mib)

    def feed(self, method: str, epochs: str, most_mib: str) -> Iterator[dict[str, Any]]:
        """Train, as it were: in the last epoch, with the workers alive, take what there is, and wait to be let go on.

        Forked workers leave the GPU alone. Spawned ones use it, and before this process does: so its own place among
        the processes of the slice comes after theirs, who end first.
        """
        spawned, started = method == "spawn", method != "spawn"
        if started:
            self._memory.start()
        together = multiprocessing.get_context(method).Barrier(WORKERS)
        begin = partial(_begin, self._kind, self._simulated, together) if spawned else None
        for epoch in range(int(epochs)):
            for item, _ in enumerate(self._memory.batches(method, begin)):
                if not started:
                    self._memory.start()
                    started = True
                if epoch == int(epochs) - 1 and item == 0:
                    yield {**self.fill(most_mib), "workers_mib": WORKERS * HELD_MIB * spawned}
        yield {}


def _begin(kind: str, simulated: str, together: Barrier, _: int = 0) -> None:
    program = Program(kind, simulated)
    program.start()
    program.take(HELD_MIB)
    # It holds that until it ends.
    _WORKER.append(program)
    # So that none gives anything before all use the GPU.
    together.wait(PATIENCE_S)


def main() -> None:
    """Answer line by line, until there is none."""
    kind, simulated = sys.argv[1], "".join(sys.argv[2:])
    program = Program(kind, simulated)
    going: Iterator[dict[str, Any]] = iter(())
    while words := sys.stdin.readline().split():
        name, *arguments = words
        if name == "feed":
            going = program.feed(*arguments)
        answer = next(going) if name in ("feed", "go") else getattr(program, name)(*arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

"""The blocked-lost simulation and the clock: what one row of the table is made of."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from statistics import mean, median, quantiles, stdev

import numpy as np
from optimum import OneGpu, Optimum, solve
from policies import POLICIES, Best, ComputeFirst, Kind, Ours, Policy

from gres_mig.errors import NoCapacity
from gres_mig.models import Settings
from gres_mig.placement import Room, choose

LOAD = 0.9
"""Offered memory slices to all memory slices."""
WARM_UP = 0.05
"""Part of the arrivals, the first, that is simulated and not counted: the GPUs start empty."""
MIXES: Mapping[str, Mapping[int, tuple[float, ...]]] = {
    "nofull": {4: (0.40, 0.35, 0.25, 0), 3: (0.6, 0.4, 0)},
    "uniform": {4: (0.25, 0.25, 0.25, 0.25), 3: (1 / 3, 1 / 3, 1 / 3)},
    "small": {4: (0.60, 0.25, 0.10, 0.05), 3: (0.65, 0.25, 0.10)},
    "large": {4: (0.10, 0.20, 0.40, 0.30), 3: (0.15, 0.35, 0.50)},
    "bimodal": {4: (0.75, 0, 0, 0.25), 3: (0.75, 0, 0.25), 2: (0.75, 0.25)},
}
"""Shares of the classes of requests, smallest first, by the number of classes."""
OURS, HAMI, OPTIMUM, COMPUTE_FIRST = "gres-mig", "HAMi 2.10 binpack", "optimum", "compute first"


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    kind: Kind
    gpus: int
    mix: str
    seeds: tuple[int, ...]
    arrivals: int
    solved: bool


@dataclass(frozen=True)
class Row:
    """What came out of it: per policy and seed the accepted share of the offered slices."""

    model: str
    gpus: int
    mix: str
    shares: dict[str, list[float]]
    optimum: float | None
    """Exact; `shares[OPTIMUM]` is the same policy on the same arrivals as the others."""
    seconds: float

    def share(self, policy: str) -> float:
        """Per cent, all seeds."""
        return 100 * mean(self.shares[policy])

    @property
    def of_optimum(self) -> float | None:
        """Ours in per cent of the optimum on the same arrivals."""
        return 100 * self.share(OURS) / self.share(OPTIMUM) if self.optimum is not None else None

    @property
    def over_hami(self) -> tuple[float, float]:
        """Points over HAMi 2.10 binpack, and the standard error of that over the seeds."""
        gains = [100 * (a - b) for a, b in zip(self.shares[OURS], self.shares[HAMI], strict=True)]
        return mean(gains), stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0


@dataclass(frozen=True)
class Timing:
    """Microseconds of one `choose`, refusals included, on rooms it has not seen before.

    Of three times the best: what else the machine does is not the decision's.
    """

    gpus: int
    p50: float
    p99: float


def run(cell: Cell) -> Row:
    """All policies on the cell's arrivals."""
    began = time.perf_counter()
    sizes, mix = cell.kind.sizes, MIXES[cell.mix][len(cell.kind.sizes)]
    whole = max(sizes) * cell.gpus
    rate = LOAD * whole / sum(share * size for share, size in zip(mix, sizes, strict=True))
    policies: dict[str, Callable[[Kind, int, int], Policy]] = dict(POLICIES)
    if cell.kind.hami:
        policies[COMPUTE_FIRST] = ComputeFirst
    optimum: Optimum | None = None
    if cell.solved:
        one = OneGpu(cell.kind.starts, sizes)
        optimum = best = solve(one, cell.gpus, [rate * share for share in mix], sizes)
        policies[OPTIMUM] = lambda kind, gpus, seed: Best(best)
    shares: dict[str, list[float]] = {name: [] for name in policies}
    for seed in cell.seeds:
        random = np.random.default_rng([seed, cell.gpus])
        arrivals = np.cumsum(random.exponential(1 / rate, cell.arrivals))
        classes = random.choice(len(mix), cell.arrivals, p=mix)
        ends = arrivals + random.exponential(1.0, cell.arrivals)
        trace = list(zip(arrivals.tolist(), classes.tolist(), ends.tolist(), strict=True))
        for name, make in policies.items():
            shares[name].append(accepted(trace, sizes, make(cell.kind, cell.gpus, seed)))
    exact = None if optimum is None else optimum.share
    return Row(cell.kind.name, cell.gpus, cell.mix, shares, exact, time.perf_counter() - began)


def accepted(trace: Sequence[tuple[float, int, float]], sizes: Sequence[int], policy: Policy) -> float:
    """Accepted slices to offered slices."""
    running: list[tuple[float, int, tuple[int, int]]] = []
    offered = taken = 0
    counted_from = int(WARM_UP * len(trace))
    for i, (now, k, end) in enumerate(trace):
        while running and running[0][0] <= now:
            _, ended, where = heappop(running)
            policy.free(ended, where)
        place = policy.place(k)
        if place is not None:
            heappush(running, (end, k, place))
        if i >= counted_from:
            offered += sizes[k]
            taken += sizes[k] if place is not None else 0
    return taken / offered


def decision_time(kind: Kind, gpus: int, decisions: int) -> Timing:
    """Decisions of the uniform mix at the usual load; between them the node changes as in the simulation."""
    sizes = kind.sizes
    random = np.random.default_rng([0, gpus])
    rate = LOAD * max(sizes) * gpus / mean(sizes)
    arrivals = np.cumsum(random.exponential(1 / rate, decisions)).tolist()
    classes = random.choice(len(sizes), decisions).tolist()
    policy, settings = Ours(kind, gpus, 0), kind.settings
    running: list[tuple[float, int, tuple[int, int]]] = []
    spent = []
    for now, k, service in zip(arrivals, classes, random.exponential(1.0, decisions).tolist(), strict=True):
        while running and running[0][0] <= now:
            _, ended, where = heappop(running)
            policy.free(ended, where)
        spent.append(min(_spent(policy, k, settings) for _ in range(3)))
        place = policy.place(k)
        if place is not None:
            heappush(running, (now + service, k, place))
    counted = spent[int(WARM_UP * decisions) :]
    return Timing(gpus, median(counted), quantiles(counted, n=100)[98])


def _spent(policy: Ours, k: int, settings: Settings) -> float:
    rooms = [Room(room.gpu, room.busy, room.held_mib) for room in policy.rooms]
    began = time.perf_counter_ns()
    with suppress(NoCapacity):
        choose(rooms, policy.requests[k], settings)
    return (time.perf_counter_ns() - began) / 1000


FIRST = """
import sys, time
sys.path[:0] = {path!r}
from policies import KINDS
from gres_mig.models import Request
from gres_mig.placement import Room, choose
rooms, settings = [Room(KINDS[0].gpu(i)) for i in range(8)], KINDS[0].settings
began = time.perf_counter_ns()
choose(rooms, Request(4000), settings)
print((time.perf_counter_ns() - began) / 1000)
"""


def first_decision() -> float:
    """Microseconds of the only `choose` of a process, as in a Slurm hook, at 8 GPUs; median of 11 processes."""
    command = [sys.executable, "-c", FIRST.format(path=[p for p in sys.path if p])]
    return median(float(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(11))

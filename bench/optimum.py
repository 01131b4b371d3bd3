"""The best that any online policy can do: the exact average-reward optimum, by relative value iteration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import comb

import numpy as np
from numpy.typing import NDArray

Place = tuple[int, int]
"""A class of requests and one of its legal starts."""
Packing = frozenset[Place]
Numbers = NDArray[np.float64]
Indices = NDArray[np.int32]


class OneGpu:
    """Every packing of one GPU, and the classes of packings that no future can tell apart (bisimulation)."""

    def __init__(self, starts: Sequence[Sequence[int]], sizes: Sequence[int]) -> None:
        self._starts, self._sizes = starts, sizes
        self.packings: list[Packing] = [frozenset()]
        self.number: dict[Packing, int] = {self.packings[0]: 0}
        for packing in self.packings:
            for k in range(len(starts)):
                for after in self.after(packing, k).values():
                    if after not in self.number:
                        self.number[after] = len(self.packings)
                        self.packings.append(after)
        self.class_of = self._refine()
        self.classes = max(self.class_of) + 1
        self.moves: list[list[dict[int, tuple[int, int]]]] = []
        """By class of request and packing: what class the GPU can become, at which start, and the packing then."""
        for k in range(len(starts)):
            self.moves.append([{} for _ in self.packings])
            for i, packing in enumerate(self.packings):
                for (_, start), after in reversed(self.after(packing, k).items()):
                    self.moves[k][i][self.class_of[self.number[after]]] = start, self.number[after]
        self.left = [{place: self.number[packing - {place}] for place in packing} for packing in self.packings]
        """By packing: the packing that is left when an instance ends."""
        one_of = {c: i for i, c in enumerate(self.class_of)}
        self.options = [[sorted(moves[one_of[c]]) for c in range(self.classes)] for moves in self.moves]
        """By class of request and class of packing: the classes it can become."""
        self.leaves = [Counter(self.class_of[i] for i in self.left[one_of[c]].values()) for c in range(self.classes)]
        """By class of packing: the classes it becomes as instances end, and in how many ways."""

    def after(self, packing: Packing, k: int) -> dict[Place, Packing]:
        """What each legal place for a request of class `k` turns this packing into."""
        taken = 0
        for other, start in packing:
            taken |= self._mask(other, start)
        return {(k, s): packing | {(k, s)} for s in self._starts[k] if not taken & self._mask(k, s)}

    def _mask(self, k: int, start: int) -> int:
        return ((1 << self._sizes[k]) - 1) << start

    def _refine(self) -> list[int]:
        classes = [0] * len(self.packings)
        while True:
            signatures: dict[object, int] = {}
            finer = []
            for i, packing in enumerate(self.packings):
                options = tuple(
                    frozenset(classes[self.number[p]] for p in self.after(packing, k).values())
                    for k in range(len(self._starts))
                )
                leaves = tuple(sorted(classes[self.number[packing - {place}]] for place in packing))
                finer.append(signatures.setdefault((classes[i], options, leaves), len(signatures)))
            if len(signatures) == max(classes) + 1:
                return classes
            classes = finer


@dataclass(frozen=True)
class Optimum:
    """The optimal share of accepted slices, and the decision that reaches it in every state."""

    share: float
    one: OneGpu
    gpus: int
    decisions: tuple[NDArray[np.int16], ...]
    """By class of request and state: the GPU's position in the sorted state times the options, plus the option."""
    widths: tuple[int, ...]

    def decide(self, k: int, state: Sequence[int]) -> tuple[int, int]:
        """The class of the GPU to take and the class to turn it into; `state` is sorted, and a legal place exists."""
        position, option = divmod(int(self.decisions[k][rank(state)]), self.widths[k])
        return state[position], self.one.options[k][state[position]][option]


def rank(state: Sequence[int]) -> int:
    """The number of a sorted state among all (combinatorial number system)."""
    return sum(comb(c + i, i + 1) for i, c in enumerate(state))


def solve(one: OneGpu, gpus: int, rates: Sequence[float], rewards: Sequence[int], tolerance: float = 2e-6) -> Optimum:
    """Poisson arrivals at `rates`, service of mean 1; a request is taken if a legal place exists, and lost if not."""
    states = np.array(list(combinations_with_replacement(range(one.classes), gpus)), dtype=np.int16)
    numbers = _ranks(states)
    states = states[np.argsort(numbers)]
    arrivals = [_arrivals(one, states, k) for k in range(len(rates))]
    next_left, left_rates = _departures(one, states)
    busiest = left_rates.sum(axis=0).max()
    total = sum(rates) + float(busiest)
    value = _with_void(np.zeros(len(states)))
    while True:
        gained = np.zeros(len(states))
        for rate, reward, after in zip(rates, rewards, arrivals, strict=True):
            best = value[after[0]]
            for column in after[1:]:
                np.maximum(best, value[column], out=best)
            # Lost: the state stays. The column of a missing option points at the extra state of value minus infinity.
            gained += rate * np.where(np.isneginf(best), 0.0, reward + best - value[: len(states)])
        for column, leaving in zip(next_left, left_rates, strict=True):
            gained += leaving * (value[column] - value[: len(states)])
        low, high = gained.min(), gained.max()
        if high - low < tolerance * high:
            break
        value = _with_void(value[: len(states)] + gained / total - gained[0] / total)
    offered = sum(rate * reward for rate, reward in zip(rates, rewards, strict=True))
    decisions = tuple(np.argmax(np.stack([value[c] for c in after]), axis=0).astype(np.int16) for after in arrivals)
    widths = tuple(max(len(options) for options in by_class) for by_class in one.options)
    return Optimum(float(low + high) / 2 / offered, one, gpus, decisions, widths)


def _with_void(value: Numbers) -> Numbers:
    return np.append(value, -np.inf)


def _ranks(states: NDArray[np.int16]) -> Indices:
    highest = int(states.max()) + states.shape[1] + 1
    table = np.array([[comb(c + i, i + 1) for c in range(highest)] for i in range(states.shape[1])], dtype=np.int32)
    return table[np.arange(states.shape[1]), states].sum(axis=1, dtype=np.int32)


def _moved(states: NDArray[np.int16], position: int, target: NDArray[np.int16]) -> Indices:
    after = states.copy()
    after[:, position] = target
    after.sort(axis=1)
    return _ranks(after)


def _arrivals(one: OneGpu, states: NDArray[np.int16], k: int) -> list[Indices]:
    width = max(len(options) for options in one.options[k])
    table = np.full((one.classes, width), -1, dtype=np.int16)
    for c, options in enumerate(one.options[k]):
        table[c, : len(options)] = options
    columns = []
    for position in range(states.shape[1]):
        for option in range(width):
            target = table[states[:, position], option]
            after = _moved(states, position, np.where(target < 0, states[:, position], target))
            columns.append(np.where(target < 0, np.int32(len(states)), after))
    return columns


def _departures(one: OneGpu, states: NDArray[np.int16]) -> tuple[list[Indices], Numbers]:
    width = max(len(leaves) for leaves in one.leaves)
    targets = np.tile(np.arange(one.classes, dtype=np.int16)[:, None], (1, width))
    counts = np.zeros((one.classes, width))
    for c, leaves in enumerate(one.leaves):
        for i, (left, count) in enumerate(sorted(leaves.items())):
            targets[c, i], counts[c, i] = left, count
    columns, rates = [], []
    for position in range(states.shape[1]):
        for i in range(width):
            columns.append(_moved(states, position, targets[states[:, position], i]))
            rates.append(counts[states[:, position], i])
    return columns, np.array(rates)

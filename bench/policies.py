"""Who decides in the simulation: the product's own `choose`, the rules it is compared with, and the optimum.

Each policy keeps its own picture of the GPUs: `place` answers a request of class `k` with a GPU and a start, or None,
and takes the place; `free` gives it back. The rules are written from their descriptions, no code of theirs is here.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Protocol

from optimum import Optimum

from gres_mig.errors import NoCapacity
from gres_mig.models import GPU_VARIANTS, Gpu, Placement, Profile, Request, Settings
from gres_mig.placement import Room, allowed, choose, tiers
from gres_mig.simulator import boards

Where = tuple[int, int]
"""A GPU and a start."""


@dataclass(frozen=True)
class Kind:
    """A model of GPU and what may be asked of it."""

    name: str
    board: str
    gpus: tuple[int, ...]
    """How many of them a node has, row by row."""
    solved: tuple[int, ...]
    """For how many the optimum is computed too: at most 171,700 states."""
    names: tuple[str, ...] = ()
    """The allow-list; empty allows every plain profile."""
    hami: tuple[str, ...] = ()
    """What HAMi's built-in allow-list leaves of these; empty leaves all."""

    def gpu(self, index: int) -> Gpu:
        """One such GPU, with the figures of the simulated board."""
        board = boards.board(self.board, "")
        profiles = tuple(
            Profile(
                id=p.id,
                name=p.name,
                memory_mib=p.memory_mib,
                compute_slices=p.slices,
                multiprocessors=p.multiprocessors,
                instance_count=p.instance_count,
                placements=tuple(Placement(start, p.size) for start in p.starts),
                variant=p.enum in GPU_VARIANTS,
            )
            for p in board.profiles
        )
        memory_mib = board.memory_bytes >> 20
        return Gpu(
            f"GPU-{index}", index, index, f"0000:{index:02x}:00.0", board.model, memory_mib, True, True, profiles
        )

    @cached_property
    def settings(self) -> Settings:
        """The product's defaults, with the allow-list if there is one."""
        model = boards.board(self.board, "").model
        return Settings("", "", managed=("*",), allowed={model: self.names} if self.names else {})

    @cached_property
    def profiles(self) -> tuple[Profile, ...]:
        """What the classes of requests get, smallest first: of each memory the profile the product prefers."""
        gpu, settings = self.gpu(0), self.settings
        memories = sorted({p.memory_mib for p in allowed(gpu, settings)})
        return tuple(tiers(gpu, Request(memory_mib), settings)[0][0] for memory_mib in memories)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Memory slices by class of request."""
        return tuple(p.placements[0].size for p in self.profiles)

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """Legal starts by class of request, of whatever profile of that memory."""
        gpu, settings = self.gpu(0), self.settings
        same = [tiers(gpu, Request(p.memory_mib), settings)[0] for p in self.profiles]
        return tuple(tuple(sorted({q.start for p in tier for q in p.placements})) for tier in same)


class Policy(Protocol):
    """What the simulation needs of one who decides."""

    def place(self, k: int) -> Where | None:
        """Take a place for a request of class `k`, if there is one."""

    def free(self, k: int, where: Where) -> None:
        """It ended."""


class Ours:
    """gres-mig: `gres_mig.placement.choose` itself, on memory sizes, with the default settings."""

    def __init__(self, kind: Kind, gpus: int, seed: int) -> None:
        self._settings = kind.settings
        self.rooms = [Room(kind.gpu(i)) for i in range(gpus)]
        self._index = {room.gpu.uuid: i for i, room in enumerate(self.rooms)}
        self._memory = [p.memory_mib for p in kind.profiles]
        self.requests = [Request(p.memory_mib) for p in kind.profiles]

    def place(self, k: int) -> Where | None:
        try:
            choice = choose(self.rooms, self.requests[k], self._settings)
        except NoCapacity:
            return None
        i = self._index[choice.gpu_uuid]
        room = self.rooms[i]
        self.rooms[i] = Room(room.gpu, (*room.busy, choice.placement), room.held_mib + self._memory[k])
        return i, choice.placement.start

    def free(self, k: int, where: Where) -> None:
        room = self.rooms[where[0]]
        busy = tuple(p for p in room.busy if p.start != where[1])
        self.rooms[where[0]] = Room(room.gpu, busy, room.held_mib - self._memory[k])


class ComputeFirst(Ours):
    """The same `choose`, but asked by name: the profile with the most multiprocessors on all GPUs before the next."""

    def __init__(self, kind: Kind, gpus: int, seed: int) -> None:
        super().__init__(kind, gpus, seed)
        one = kind.gpu(0)
        same = [tiers(one, request, kind.settings)[0] for request in self.requests]
        self._named = [[Request(0, profile.name) for profile in tier] for tier in same]

    def place(self, k: int) -> Where | None:
        for request in self._named[k]:
            self.requests[k] = request
            where = super().place(k)
            if where is not None:
                return where
        return None


class _Rule:
    """Baselines: masks of taken slices, and the starts of each class in the rule's order."""

    def __init__(self, kind: Kind, gpus: int, seed: int) -> None:
        self.taken = [0] * gpus
        self.masks = [[((1 << size) - 1) << s for s in range(64)] for size in kind.sizes]
        everything = range(1 << max(s + size for ss, size in zip(kind.starts, kind.sizes, strict=True) for s in ss))
        self.legal: list[list[list[int]]] = []
        for k, masks in enumerate(self.masks):
            order = self.order(kind, k)
            self.legal.append([[s for s in order if not taken & masks[s]] for taken in everything])

    def order(self, kind: Kind, k: int) -> Sequence[int]:
        return kind.starts[k]

    def pick(self, k: int) -> Where | None:
        raise NotImplementedError

    def place(self, k: int) -> Where | None:
        where = self.pick(k)
        if where is not None:
            self.taken[where[0]] |= self.masks[k][where[1]]
            self.changed(k, where[0], 1)
        return where

    def free(self, k: int, where: Where) -> None:
        self.taken[where[0]] &= ~self.masks[k][where[1]]
        self.changed(k, where[0], -1)

    def changed(self, k: int, gpu: int, by: int) -> None:
        pass


class FirstFit(_Rule):
    """The first GPU that has a place, its lowest start."""

    def pick(self, k: int) -> Where | None:
        legal = self.legal[k]
        for i, taken in enumerate(self.taken):
            if legal[taken]:
                return i, legal[taken][0]
        return None


class AnyPlace(_Rule):
    """A legal place at random, each as likely."""

    def __init__(self, kind: Kind, gpus: int, seed: int) -> None:
        super().__init__(kind, gpus, seed)
        self._random = Random(seed)

    def pick(self, k: int) -> Where | None:
        legal = self.legal[k]
        options = [(i, s) for i, taken in enumerate(self.taken) for s in legal[taken]]
        return options[int(self._random.random() * len(options))] if options else None


class LowestStart(_Rule):
    """The fullest GPU that has a place (memory slices), its lowest start."""

    def __init__(self, kind: Kind, gpus: int, seed: int) -> None:
        super().__init__(kind, gpus, seed)
        self.fullness = [0.0] * gpus
        self.weight = self.weights(kind)

    def weights(self, kind: Kind) -> list[float]:
        return [float(size) for size in kind.sizes]

    def changed(self, k: int, gpu: int, by: int) -> None:
        self.fullness[gpu] += by * self.weight[k]

    def pick(self, k: int) -> Where | None:
        legal, best, most = self.legal[k], -1, -1e9
        for i, fullness in enumerate(self.fullness):
            if fullness > most and legal[self.taken[i]]:
                best, most = i, fullness
        return None if best < 0 else (best, legal[self.taken[best]][0])


class HamiBinpack(LowestStart):
    """HAMi 2.10 with binpack: fullest GPU by the sum of the shares of instances, compute and memory that are used;
    the first that has a place takes it, `1g` and `3g` at their highest start, others at their lowest.

    Its step to a bigger profile on the same GPU never happens here: where a bigger one fits, the exact one does too.
    """

    def weights(self, kind: Kind) -> list[float]:
        gpu, profiles = kind.gpu(0), [self.profile(kind, k) for k in range(len(kind.sizes))]
        instances = max(p.instance_count for p in profiles)
        compute = max(p.compute_slices for p in profiles)
        # Whole millionths, so that two GPUs with the same instances compare equal however they came to hold them.
        return [
            round(1e6 * (1 / instances + p.compute_slices / compute + p.memory_mib / gpu.memory_mib)) for p in profiles
        ]

    def order(self, kind: Kind, k: int) -> Sequence[int]:
        profile = self.profile(kind, k)
        return sorted((q.start for q in profile.placements), reverse=profile.name.startswith(("1g.", "3g.")))

    def profile(self, kind: Kind, k: int) -> Profile:
        """The least of that memory by compute slices that HAMi may make."""
        memory_mib = kind.profiles[k].memory_mib
        same = [p for p in allowed(kind.gpu(0), kind.settings) if p.memory_mib == memory_mib]
        return min((p for p in same if not kind.hami or p.name in kind.hami), key=lambda p: p.compute_slices)


class HamiSpread(HamiBinpack):
    """HAMi 2.10 as its chart installs it: the emptiest GPU, else as binpack."""

    def weights(self, kind: Kind) -> list[float]:
        return [-weight for weight in super().weights(kind)]


class Best:
    """The exact optimum's decisions, which know the rates and weigh every state of all GPUs together."""

    def __init__(self, optimum: Optimum) -> None:
        self._optimum, self._one = optimum, optimum.one
        self._packing = [0] * optimum.gpus
        self._class = [self._one.class_of[0]] * optimum.gpus
        self._state = sorted(self._class)

    def place(self, k: int) -> Where | None:
        options = self._one.options[k]
        if not any(options[c] for c in self._state):
            return None
        before, after = self._optimum.decide(k, self._state)
        i = self._class.index(before)
        start, packing = self._one.moves[k][self._packing[i]][after]
        self._become(i, packing)
        return i, start

    def free(self, k: int, where: Where) -> None:
        self._become(where[0], self._one.left[self._packing[where[0]]][k, where[1]])

    def _become(self, i: int, packing: int) -> None:
        self._state.remove(self._class[i])
        self._packing[i], self._class[i] = packing, self._one.class_of[packing]
        insort(self._state, self._class[i])


KINDS = (
    Kind("A100", "a100-40", (1, 2, 3, 8, 64), (1, 2, 3), ("1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb")),
    Kind("A30", "a30", (1, 2, 3, 8, 64), (1, 2, 8)),
    Kind("RTX PRO 6000", "rtx-pro-6000", (1, 2, 3, 8, 64), (1, 2, 8)),
    Kind("A100, 1g and 7g allowed", "a100-40", (2, 3, 8), (2, 3), ("1g.5gb", "7g.40gb")),
    # What a node has that was given no allow-list: two profiles for a quarter and two for half of the GPU.
    Kind("H200, no allow-list", "h200", (1, 2, 8), (1, 2), hami=("1g.18gb", "2g.35gb", "3g.71gb", "7g.141gb")),
)
POLICIES: dict[str, Callable[[Kind, int, int], Policy]] = {
    "gres-mig": Ours,
    "HAMi 2.10 binpack": HamiBinpack,
    "lowest-start binpack": LowestStart,
    "first-fit": FirstFit,
    "random": AnyPlace,
    "HAMi 2.10 spread (its default)": HamiSpread,
}
"""Their column in the table, and the policy; `ComputeFirst` differs only where a size has several profiles."""

"""What one GPU offers: its allowed profiles by memory, and what a placement would spoil for later requests."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import lru_cache

from gres_mig.models import Gpu, Placement, Profile, Request, Settings

Rank = tuple[bool, int, int]
"""Whether it is more than the exact size, its memory, its memory slices: the lower, the sooner tried."""


class Menu:
    """Kept for the life of the process: GPUs of one model share it, and its questions repeat."""

    def __init__(self, profiles: tuple[Profile, ...], names: tuple[str, ...] | None, compute: str) -> None:
        placeable = tuple(p for p in profiles if p.placements)
        listed = None if names is None else frozenset(name.lower() for name in names)
        self.nameable = tuple(p for p in placeable if listed is None or p.name.lower() in listed)
        self.allowed = tuple(p for p in self.nameable if listed is not None or not p.variant)
        self.slices = max((q.start + q.size for p in placeable for q in p.placements), default=0)
        self._compute = -1 if compute == "most" else 1
        self._named = {p.name.lower(): p for p in reversed(self.nameable)}
        self._ladder = tuple(self._by_memory())
        self._sizes_mib = [tier[0].memory_mib for tier in self._ladder]
        # A place counts once, whatever may be made there: an RTX PRO 6000 lists its quarter five times (plain, +me,
        # +gfx, +me.all, -me), and on an H200 the left half as 3g and as 4g would drive small instances to the right.
        self._places = {q.mask: q for p in self.allowed for q in p.placements}
        self._starting = [[q for q in self._places.values() if q.start == start] for start in range(self.slices)]
        self._ranked: dict[tuple[int, str, int, bool], tuple[tuple[Rank, Profile], ...]] = {}
        self._kept: dict[tuple[int, int], tuple[int, Placement] | None] = {}
        self._fillable: dict[int, int] = {}

    def tiers(self, request: Request, most_mib: int, upsize: bool) -> tuple[tuple[Profile, ...], ...]:
        """The profiles of at most `most_mib` that `request` may take, by memory, each tier preferred first."""
        if request.profile:
            profile = self._named.get(request.profile.lower())
            return ((profile,),) if profile and profile.memory_mib <= most_mib else ()
        first = bisect_left(self._sizes_mib, request.memory_mib)
        end = bisect_right(self._sizes_mib, most_mib)
        return self._ladder[first : end if upsize else min(first + 1, end)]

    def ranked(self, request: Request, most_mib: int, upsize: bool) -> tuple[tuple[Rank, Profile], ...]:
        """The same profiles in one row, each with its rank."""
        key = request.memory_mib, request.profile, most_mib, upsize
        row = self._ranked.get(key)
        if row is None:
            # Users ask for any size they like: what is kept has an end.
            if len(self._ranked) >= 1024:
                self._ranked.clear()
            steps = enumerate(self.tiers(request, most_mib, upsize))
            row = tuple(((step > 0, p.memory_mib, size_of(p)), p) for step, tier in steps for p in tier)
            self._ranked[key] = row
        return row

    def least_damage(self, profile: Profile, taken: int) -> tuple[int, Placement] | None:
        """How much the free placement of `profile` that spoils least would spoil, and which that is."""
        key = profile.id, taken
        try:
            return self._kept[key]
        except KeyError:
            free = (p for p in profile.placements if not p.mask & taken)
            found = self._kept[key] = min(((self._damage(p, taken), p) for p in free), default=None)
            return found

    def fillable(self, taken: int) -> int:
        """The most slices that any set of allowed profiles could still fill; free slices beyond that are stranded."""
        try:
            return self._fillable[taken]
        except KeyError:
            found = self._fillable[taken] = self._most(taken)
            return found

    def _by_memory(self) -> Iterator[tuple[Profile, ...]]:
        for memory_mib in sorted({p.memory_mib for p in self.allowed}):
            same = [p for p in self.allowed if p.memory_mib == memory_mib]
            plain = [p for p in same if not p.variant]
            yield tuple(sorted(plain or same, key=self._preference))

    def _preference(self, profile: Profile) -> tuple[int, int, int]:
        return size_of(profile), self._compute * profile.multiprocessors, profile.id

    def _most(self, taken: int) -> int:
        most = [0] * (self.slices + 1)
        for start in reversed(range(self.slices)):
            most[start] = most[start + 1]
            for placement in self._starting[start]:
                if not placement.mask & taken:
                    most[start] = max(most[start], placement.size + most[start + placement.size])
        return most[0]

    def _damage(self, placement: Placement, taken: int) -> int:
        mask = placement.mask
        destroyed = sum(q.size for other, q in self._places.items() if other & mask and not other & taken)
        stranded = self.fillable(taken) - self.fillable(taken | mask) - placement.size
        return destroyed + 2 * stranded


_same = lru_cache(maxsize=256)(Menu)
_seen: dict[tuple[int, tuple[str, ...] | None, str], tuple[tuple[Profile, ...], Menu]] = {}


def size_of(profile: Profile) -> int:
    """The memory slices an instance of it takes; the fewest, should they differ from place to place."""
    return min(p.size for p in profile.placements)


def menu_of(gpu: Gpu, settings: Settings) -> Menu:
    """What that GPU offers under those settings."""
    names = settings.allowed.get(gpu.model)
    key = id(gpu.profiles), names, settings.compute
    seen = _seen.get(key)
    if seen is None:
        # By identity first: to hash seven profiles takes longer than to choose. The entry holds the profiles,
        # so that their id cannot come round again while it is there.
        if len(_seen) >= 256:
            _seen.clear()
        seen = _seen[key] = gpu.profiles, _same(gpu.profiles, names, settings.compute)
    return seen[1]

"""Pure price of each profile: what an instance counts of a whole GPU, so that a count refuses nothing that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gres_mig.models import Profile

_Counts = tuple[int, ...]
"""How many instances of each size, smallest first."""


def prices(profiles: Sequence[Profile], most_mib: int) -> tuple[int, dict[int, int]]:
    """The count of a whole GPU, and of it the price of each size of memory, in MiB.

    What fits on a GPU together costs no more than the whole, so that a count refuses nothing that has a place; and of
    one size no more are paid for by a whole than fit, where both can be had. No price is below its size.
    Instances hold at most `most_mib` of a GPU together. Why it is done so is in docs/slurm-pricing.md.
    """
    sizes = sorted({p.memory_mib for p in profiles if p.placements})
    same = [[p for p in profiles if p.memory_mib == size] for size in sizes]
    packings = [counts for counts in _packings(same) if _cost(counts, sizes) <= most_mib]
    most = [max((counts[n] for counts in packings), default=0) for n in range(len(sizes))]
    whole, found = _least(sizes, most, packings)
    # What is left goes to the largest first: of the small ones many fit, so a little on each would be much.
    for n in reversed(range(len(sizes))):
        more = ((whole - _cost(counts, found)) // counts[n] for counts in packings if counts[n])
        found[n] += min(more, default=0)
    return whole, {size: price for size, price, number in zip(sizes, found, most, strict=True) if number}


def _least(sizes: list[int], most: list[int], packings: list[_Counts]) -> tuple[int, list[int]]:
    """The count of a whole, and prices at which one instance more of a size than fit is more than the whole."""
    whole = least = max((_cost(counts, sizes) for counts in packings), default=0)
    # A GH200's half is exactly half of its whole, and four eighths beside it must not be half: so the whole is a few
    # MiB more. Where it had to be much more, as on no board known, it is left at what memory says.
    while whole <= least + least // 100:
        found = [max(size, whole // (number + 1) + 1) for size, number in zip(sizes, most, strict=True)]
        needed = max((_cost(counts, found) for counts in packings), default=0)
        if needed <= whole:
            return whole, found
        whole = needed
    return least, list(sizes)


def _cost(counts: _Counts, each: Sequence[int]) -> int:
    return sum(number * price for number, price in zip(counts, each, strict=True))


def _packings(same: Sequence[Sequence[Profile]]) -> set[_Counts]:
    """How many of each size fit on a GPU together, every way there is.

    By places alone: an A30's NVML was seen to be off by one in its number of instances (mig-parted issue 157).
    Only of variants, which share media engines, are there fewer than places.
    """
    limits = [sum(p.instance_count for p in size) if all(p.variant for p in size) else None for size in same]
    places = [{place for p in size for place in p.placements} for size in same]
    end = max((place.start + place.size for size in places for place in size), default=0)
    from_slice: list[set[_Counts]] = [set() for _ in range(end)] + [{(0,) * len(same)}]
    for start in reversed(range(end)):
        from_slice[start] |= from_slice[start + 1]
        for n, size in enumerate(places):
            for place in size:
                if place.start == start:
                    from_slice[start] |= set(_with(from_slice[start + place.size], n, limits[n]))
    return from_slice[0]


def _with(packings: set[_Counts], n: int, limit: int | None) -> Iterator[_Counts]:
    for counts in packings:
        if limit is None or counts[n] < limit:
            yield (*counts[:n], counts[n] + 1, *counts[n + 1 :])

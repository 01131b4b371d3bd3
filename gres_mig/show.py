"""Draws GPUs as bars of their memory slices, with a line for each thing that holds some."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from gres_mig import slices
from gres_mig.errors import GresMigError
from gres_mig.machine import describe
from gres_mig.models import Gpu, Profile, Release, Request, Settings, State
from gres_mig.placement import allowed, choose
from gres_mig.rooms import room
from gres_mig.sizes import format_mib
from gres_mig.values import Value
from gres_mig.view import Holding, Kind, View, has_no_mig, holdings, mask

_WIDEST_BAR = 97
_FILL: dict[Kind, str] = {
    "allocation": "═", "intent": "~", "release": "~", "stuck": "!", "lost": "?", "foreign": "/",
}  # fmt: skip
_COLOUR: dict[str, str] = {
    "allocation": "32", "intent": "36", "release": "36", "stuck": "31", "lost": "31", "foreign": "35",
    "trouble": "31", "quiet": "2", "title": "1",
}  # fmt: skip
_ASCII = str.maketrans({"│": "|", "┊": ":", "═": "=", "×": "x", "…": "~"})


class Paper(Value):
    """What is drawn on: so many columns, with or without colour and characters beyond ASCII."""

    width: int = 80
    colour: bool = False
    ascii: bool = False

    def paint(self, what: str, text: str, *, solid: bool = False) -> str:
        """The text in the colour of a kind of holding, or of `trouble`, `quiet` or `title`; `solid`: on that colour."""
        if not (self.colour and what and text):
            return text
        return f"\x1b[{_COLOUR[what]}{';7' if solid else ''}m{text}\x1b[0m"

    def wrap(self, what: str, text: str, indent: int) -> list[str]:
        """The text in lines that fit, no word cut short: what one types next is in there."""
        width = max(20, self.width - indent)
        lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
        return [" " * indent + self.paint(what, line) for line in lines]

    def finish(self, lines: Iterable[str]) -> str:
        """The lines as one text of characters the paper takes; names found on a node may hold any."""
        text = "\n".join(lines)
        return text.translate(_ASCII).encode("ascii", "replace").decode() if self.ascii else text


PLAIN = Paper()


def draw(view: View, settings: Settings, *, now: float, paper: Paper = PLAIN) -> str:
    """Each GPU of the view, below one line that sums them up."""
    gpus = sorted(view.gpus, key=lambda gpu: gpu.index)
    held = {gpu.uuid: holdings(view, gpu) for gpu in gpus}
    columns = Columns(view, [holding for each in held.values() for holding in each], now, paper)
    lines = paper.wrap("title", summary(view, settings), 0)
    for note in view.notes:
        lines += paper.wrap("quiet", note, 0)
    for gpu in gpus:
        lines += ["", *_gpu(view, gpu, held[gpu.uuid], settings, columns)]
    return paper.finish(lines)


def summary(view: View, settings: Settings) -> str:
    """`2 GPUs: 9 of 24 memory slices free; 4 allocations, 1 stuck, 1 foreign`."""
    managed = [gpu for gpu in view.gpus if settings.manages(gpu)]
    counts: dict[str, int] = {}
    free = 0
    for gpu in managed:
        held = holdings(view, gpu)
        free += 0 if gpu.sliced or room(gpu, view.state).closed else gpu.slices - mask(held).bit_count()
        for holding in held:
            counts[holding.kind] = counts.get(holding.kind, 0) + 1
    counts["fenced"] = sum(gpu.uuid in view.state.fences for gpu in managed)
    text = "1 GPU" if len(view.gpus) == 1 else f"{len(view.gpus)} GPUs"
    if len(managed) < len(view.gpus):
        text += f", {len(managed)} managed"
    if managed:
        text += f": {free} of {sum(gpu.slices for gpu in managed)} memory slices free"
    for number in filter(None, [sum(gpu.sliced for gpu in managed)]):
        text += f", {number} shared by slices"
    some = [_count(counts[kind], kind) for kind in (*_FILL, "fenced") if counts.get(kind)]
    return f"{text}; {', '.join(some)}" if some else text


def age(seconds: float) -> str:
    """`45s`, `12m`, `2h 14m`, `3d 4h`; where a clock was set back, `0s`."""
    left = int(max(0.0, seconds))
    for unit, name, smaller, smaller_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m")):
        if left >= unit:
            rest = left % unit // smaller
            return f"{left // unit}{name}" + (f" {rest}{smaller_name}" if rest else "")
    return f"{left // 60}m" if left >= 60 else f"{left}s"


def who(view: View, holding: Holding) -> str:
    """Whose it is: the owner alone where all is well, else the state it is in as well."""
    if holding.record is None:
        assert holding.instance is not None
        bare = ", bare" if holding.instance.bare else ""
        if holding.instance.memory_mib:
            return f"foreign: slice {holding.instance.id}{bare}"
        return f"foreign: GPU instance {holding.instance.id}{bare}"
    if not view.owners:
        return "in use" if holding.kind == "allocation" else holding.kind
    owner = str(holding.record.owner)
    return owner if holding.kind == "allocation" else f"{holding.kind}: {owner}"


def largest_free(gpu: Gpu, state: State, settings: Settings) -> Profile | None:
    """The largest profile that a request for memory could get on that GPU now."""
    here = [room(gpu, state)]
    if gpu.sliced:
        most_mib = 0 if here[0].closed else slices.largest_mib(here[0], settings)
        return slices.profile(most_mib) if most_mib else None
    for profile in sorted(allowed(gpu, settings), key=lambda p: -p.memory_mib):
        try:
            return choose(here, Request(profile.memory_mib), settings).profile
        except GresMigError:
            continue
    return None


def _count(number: int, kind: str) -> str:
    return f"{number} {kind}" + ("s" if number != 1 and kind in ("allocation", "intent", "release") else "")


class Columns:
    """The lines of all holdings, their columns as wide as the widest needs them."""

    def __init__(self, view: View, held: Sequence[Holding], now: float, paper: Paper) -> None:
        self.view, self.now, self.paper = view, now, paper
        self._names = max((len(h.profile_name) for h in held), default=0)
        self._ages = max((len(self._age(h)) for h in held), default=0)
        # An owner is never cut short, for it is what one types next; on a narrow terminal the memory goes instead.
        before = 2 + 5 + 2 + self._names + 2 + 11 + 2 + self._ages + 2
        self._memory = all(before + len(who(view, h)) <= paper.width for h in held)

    def lines(self, holding: Holding) -> Iterator[str]:
        """One holding, and what keeps it where it is stuck."""
        memory = f"{format_mib(holding.memory_mib):>11}  " if self._memory else ""
        name = f"{holding.profile_name:<{self._names}}"
        start = f"  {holding.placement!s:>5}  {name}  {memory}{self._age(holding):>{self._ages}}  "
        owner, asked = who(self.view, holding), self._asked(holding)
        fits = len(start) + len(owner) + len(asked) <= self.paper.width
        yield start + self.paper.paint(holding.kind, owner) + (self.paper.paint("quiet", asked) if fits else "")
        record = holding.record
        if isinstance(record, Release) and record.stuck and self.view.owners:
            stuck, due = record.stuck, record.stuck.next_try - self.now
            tries = "1 try" if stuck.tries == 1 else f"{stuck.tries} tries"
            when = f"next in {age(due)}" if due > 0 else "next is due"
            told = [f"stuck for {age(self.now - stuck.since)}, {tries}, {when}", *stuck.holders]
            for text in told:
                yield from self.paper.wrap("quiet", text, 9)

    def _asked(self, holding: Holding) -> str:
        """What a job asked for: a job is looked up in the scheduler's queue, where that stands."""
        record = holding.record
        shown = record is not None and self.view.owners and record.owner.name.startswith("slurm:")
        return f" for {record.request}" if record and shown else ""

    def _age(self, holding: Holding) -> str:
        return age(self.now - holding.record.since) if holding.record else ""


def _gpu(view: View, gpu: Gpu, held: Sequence[Holding], settings: Settings, columns: Columns) -> Iterator[str]:
    paper = columns.paper
    yield title(gpu, paper)
    recorded = any(holding.record for holding in held)
    managed = settings.manages(gpu)
    if not recorded and (not managed or (has_no_mig(gpu) and not gpu.sliced)):
        reason = gpu.trouble or f"MIG mode is on, {len(gpu.instances)} instance(s)"
        yield from paper.wrap("quiet", reason if managed else f"not managed: {reason}", 2)
        return
    if not managed:
        yield from paper.wrap("trouble", "not managed any more, yet there are records of it", 2)
    closed = _closed(view, gpu, columns.now)
    for text in closed:
        yield from paper.wrap("trouble", text, 2)
    if gpu.slices:
        yield f"  {bar(gpu, held, bool(closed), paper)}"
    for holding in held:
        yield from columns.lines(holding)
    if gpu.sliced:
        yield from _shared(view, gpu, settings, columns)
        return
    free = gpu.slices - mask(held).bit_count()
    if free and managed and not closed:
        most = largest_free(gpu, view.state, settings)
        what = f"up to {most.name}, {format_mib(most.memory_mib)}" if most else "no profile fits"
        first, *rest = paper.wrap("", f"{free} of {gpu.slices} slices: {what}", 9)
        yield f"  {'free':>5}  {first.lstrip()}"
        yield from rest


def _shared(view: View, gpu: Gpu, settings: Settings, columns: Columns) -> Iterator[str]:
    paper, here = columns.paper, room(gpu, view.state)
    capacity_mib, overhead_mib = slices.capacity_mib(gpu, settings), slices.overhead_mib(gpu, settings)
    if not here.closed:
        most = slices.largest_mib(here, settings)
        free = f"up to {format_mib(most)} in one slice" if most else "nothing"
        over = f", and {format_mib(overhead_mib)} with each" if overhead_mib else ""
        text = f"{free}; {format_mib(here.held_mib)} of {format_mib(capacity_mib)} are taken{over}; {gpu.backend}"
        first, *rest = paper.wrap("", text, 9)
        yield f"  {'free':>5}  {first.lstrip()}"
        yield from rest
    strangers = [user for user in gpu.users if not user.slice]
    if gpu.foreign_mib or strangers:
        who_uses = ", ".join(describe(user.pid) for user in strangers) if view.owners else ""
        text = f"processes of no slice use {format_mib(gpu.foreign_mib)}"
        yield from paper.wrap("trouble", f"{text}: {who_uses}" if who_uses else text, 2)


def _closed(view: View, gpu: Gpu, now: float) -> list[str]:
    fence = view.state.fences.get(gpu.uuid)
    if fence is None:
        closed = room(gpu, view.state).closed
        return [closed] if closed else []
    since = f" for {age(now - fence.since)}" if fence.since else ""
    # On a line of its own, to be copied.
    return [f"fenced{since}: {fence.reason}", *([f"run: gres-mig unfence {gpu.uuid}"] if view.owners else [])]


def title(gpu: Gpu, paper: Paper) -> str:
    """`GPU 0  GPU-…  NVIDIA H200`, the model cut to what is left of the line."""
    name = f"GPU {gpu.index}  {gpu.uuid or gpu.pci_bus_id}"
    left = paper.width - len(name) - 2
    model = gpu.model if len(gpu.model) <= left else f"{gpu.model[: max(0, left - 1)]}…"
    return paper.paint("title", name) + (f"  {model}" if model and left > 1 else "")


def bar(gpu: Gpu, held: Sequence[Holding], closed: bool, paper: Paper) -> str:
    """The GPU's memory slices from left to right, each as wide as any other."""
    cell = max(2, (min(paper.width - 2, _WIDEST_BAR) - 1) // gpu.slices)
    starts: dict[int, Holding] = {}
    covered = 0
    # Where two claim a slice, what is there is drawn; the other has its line below.
    for holding in sorted(held, key=lambda h: h.instance is None):
        if not covered & holding.placement.mask:
            starts[holding.placement.start] = holding
            covered |= holding.placement.mask
    text, at = "", 0
    while at < gpu.slices:
        here = starts.get(at)
        slices = here.placement.size if here else 1
        text += "┊" if at and not here and not covered >> (at - 1) & 1 else "│"
        space = slices * cell - 1
        text += paper.paint(here.kind, _label(here, space), solid=True) if here else ("×" if closed else " ") * space
        at += slices
    return f"{text}│"


def _label(holding: Holding, space: int) -> str:
    words = holding.profile_name
    if holding.kind != "allocation":
        words = f"{holding.kind} {words}" if len(holding.kind) + len(words) < space else holding.kind
    if len(words) > space:
        words = f"{words[: max(0, space - 1)]}…"
    return f"{words} ".ljust(space, _FILL[holding.kind])[:space]

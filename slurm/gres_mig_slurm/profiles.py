"""What users may ask of migmem on each type of node, and what that counts."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from gres_mig import slices
from gres_mig.deadline import operate
from gres_mig.errors import BadRequest, NodeFault, TooBig
from gres_mig.menu import menu_of
from gres_mig.models import Gpu, Request, Settings
from gres_mig.values import Value
from gres_mig_slurm.pricing import prices


class Priced(Value):
    """A profile and what it counts of migmem."""

    name: str
    memory_mib: int
    price_mib: int
    by_size: bool
    """Given to whoever asks for memory; others only to whoever names them."""


class Board(Value):
    """GPUs of a node that offer the same."""

    model: str
    gpus: int
    whole_mib: int
    """What one of them adds to the node's count."""
    profiles: tuple[Priced, ...]
    slice_overhead_mib: int = -1
    """They are shared by slices, of any size, each of which counts so much more; -1: they are divided by MIG."""

    @property
    def largest_slice_mib(self) -> int:
        """The most that a slice can hold; 0 where there are none."""
        return self.whole_mib - self.slice_overhead_mib if self.slice_overhead_mib >= 0 else 0

    def price_mib(self, request: Request) -> int | None:
        """What that request counts here; None where it can never be had."""
        if self.largest_slice_mib:
            fits = request.memory_mib <= self.largest_slice_mib and not (request.profile or request.isolation)
            return request.memory_mib + self.slice_overhead_mib if fits else None
        if request.profile:
            name = request.profile.lower()
            return next((p.price_mib for p in self.profiles if p.name.lower() == name), None)
        fitting = [p for p in self.profiles if p.by_size and p.memory_mib >= request.memory_mib]
        return min(fitting, key=lambda p: p.memory_mib).price_mib if fitting else None


class NodeType(Value):
    """Nodes that are alike: what slurm.conf counts on each, and what may be asked of it."""

    name: str
    boards: tuple[Board, ...]
    nodes: str = ""
    """Slurm's names of them, as `n[1-4]`: a request that none of them can serve is kept away from them."""
    admission: str = "count"
    """`count`, or `gates`: for each size they have a feature that is active while they have a place for it."""

    @property
    def count_mib(self) -> int:
        """The node's `Gres=migmem:` in slurm.conf."""
        return sum(board.gpus * board.whole_mib for board in self.boards)

    @property
    def sizes_mib(self) -> tuple[int, ...]:
        """The memory of all that may be asked for, smallest first."""
        return tuple(sorted({p.memory_mib for board in self.boards for p in board.profiles}))


class Sizes(Value):
    """All that job_submit.lua knows of the cluster."""

    types: tuple[NodeType, ...]
    exclusive: str = "refuse"
    """What becomes of jobs that ask for migmem together with --exclusive: `refuse` or `allow`."""
    placeholders: int = 0
    """How many nodes of each type with gates only stand for them: a job of more nodes goes without a gate."""

    def price_mib(self, request: Request) -> int:
        """What that request counts on every node: the least that it costs on any type that can serve it.

        A job has one count wherever it starts, and only the least is never in the way of one that would fit.
        """
        boards = [board for node in self.types for board in node.boards]
        found = [price for board in boards if (price := board.price_mib(request)) is not None]
        if found:
            return min(found)
        offered = [(p.memory_mib, p.name) for board in boards for p in board.profiles if p.by_size]
        if not request.isolation:
            offered += [(mib, "a slice") for board in boards if (mib := board.largest_slice_mib)]
        if request.profile or not offered:
            raise BadRequest(f"no GPU of this cluster has a profile {request.profile or 'that is given by size'}")
        largest_mib, name = max(offered)
        raise TooBig(f"no instance holds {request}: the largest is {name} ({largest_mib:,} MiB)")


def node_type(gpus: Iterable[Gpu], settings: Settings, name: str = "", nodes: str = "") -> NodeType:
    """The type of a node with these GPUs; what is not managed does not count. By default named after its boards."""
    alike: dict[tuple[object, ...], list[Gpu]] = {}
    for gpu in gpus:
        # An L40 among the managed ones that is not shared has nothing to count.
        if not settings.manages(gpu) or not (gpu.sliced or gpu.profiles or gpu.mig_current is not None):
            continue
        if not gpu.profiles and not (gpu.sliced and not gpu.trouble):
            what = "gives no slices" if gpu.sliced else "shows no profiles"
            reason = gpu.trouble or "its NVML lists none"
            raise NodeFault(f"GPU {gpu.index} ({gpu.uuid}) {what}: {reason}", hint="run: gres-mig doctor")
        kept_mib = gpu.reserved_mib if gpu.sliced else 0
        alike.setdefault((gpu.model, gpu.memory_mib, gpu.profiles, gpu.sliced, kept_mib), []).append(gpu)
    if not alike:
        message = "no GPU of this node is managed that has MIG or is shared by slices"
        raise NodeFault(message, hint="run: gres-mig setup", code="CONFIG")
    boards = tuple(_board(same[0], len(same), settings) for same in alike.values())
    usual = " + ".join(f"{board.gpus}x {board.model}" for board in boards)
    return NodeType(_line(name) or usual, boards, nodes, settings.admission)


def of_this_node(settings: Settings, name: str = "", nodes: str = "") -> NodeType:
    """This node's type, as its NVML says now."""
    return node_type(operate(settings, lambda allocator: allocator.look()), settings, name, nodes)


def _board(gpu: Gpu, gpus: int, settings: Settings) -> Board:
    if gpu.sliced:
        whole_mib, overhead_mib = slices.capacity_mib(gpu, settings), slices.overhead_mib(gpu, settings)
        if whole_mib <= overhead_mib:
            message = f"slice_reserve and slice_overhead leave no slice of {gpu.model}"
            raise NodeFault(message, hint="see: docs/slices.md", code="CONFIG")
        return Board(_line(gpu.model), gpus, whole_mib, (), overhead_mib)
    menu = menu_of(gpu, settings)
    most_mib = gpu.memory_mib - settings.reserve_mib if settings.reserve_mib else sys.maxsize
    whole_mib, price_mib = prices(menu.nameable, most_mib)
    offered = [p for p in menu.nameable if p.memory_mib in price_mib]
    if not offered:
        message = f"the allow-list and the reserve leave no profile on {gpu.model}"
        raise NodeFault(message, hint="run: gres-mig profiles", code="CONFIG")
    offered.sort(key=lambda p: (p.memory_mib, p.variant, p.name))
    priced = tuple(Priced(p.name, p.memory_mib, price_mib[p.memory_mib], p in menu.allowed) for p in offered)
    return Board(_line(gpu.model), gpus, whole_mib, priced)


def _line(text: str) -> str:
    """The text as it can stand at the end of a line of the sizes file."""
    return " ".join(re.sub(r"[^ -~]", " ", text).split())

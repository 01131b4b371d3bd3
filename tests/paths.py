"""The ways through the core on one small node, each from a state of its own, and what must hold after any of them."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from gres_mig import config, log, machine
from gres_mig.allocator import Allocator, Grant
from gres_mig.errors import GresMigError
from gres_mig.models import Allocation, Intent, Owner, Process, Record, Release, Request, Settings, State
from gres_mig.simulator import boards
from gres_mig.simulator.admin import Found, Node
from gres_mig.simulator.assembly import create
from gres_mig.simulator.schema import Hardware
from gres_mig.state import Store
from gres_mig.values import replace

OWNER, NEIGHBOUR = Owner("manual:owner"), Owner("manual:neighbour")
SMALL, LARGE = Request(5_000), Request(11_000)
"""One slice, of which there are more free ones; and two, which can be divided into compute instances wrongly."""
NOBODY = Process(1 << 22, 1)
"""A process that cannot be there: pids end below."""


class Snapshot(NamedTuple):
    """What the hardware and the record file hold."""

    hardware: str
    state: bytes


class Way(NamedTuple):
    """An operation, and the state it begins from."""

    start: Snapshot
    operation: Callable[[Allocator], object]
    asks: bool = False
    """Something is asked for; refused, nothing of it may be left."""
    owned: bool = False
    """The owner lives and holds its instance from the start."""


class Call(NamedTuple):
    """The n-th call of a function on a way."""

    function: str
    nth: int
    gpu: str
    mutating: bool


class Told(NamedTuple):
    """How an operation ended."""

    exit: int
    value: object
    error: GresMigError | None


class Small:
    """A node of small GPUs: the first ones managed, with a neighbour and a foreign instance on the first, and one
    that is not. The GPUs are A30s that show only their two smallest profiles, so that a look takes few calls."""

    def __init__(self, folder: Path, managed: int = 1) -> None:
        board = boards.data("a30")
        board = {**board, "board": "small", "profiles": [p for p in board["profiles"] if p["enum"] in (0, 1)]}
        create(folder, [("small", managed + 1)], custom={"small": board})
        self.node = Node(folder)
        self.node.configure(gpu_profiles=2, compute_profiles=2, log="mutating")
        self.uuids = self.node.uuids
        self.settings: Settings = replace(
            config.defaults(node=folder), managed=self.uuids[:-1], in_use_wait_s=0.0, lock_wait_s=5.0
        )
        self.now = time.time()
        log.send_to(lambda level, line: None)
        self.ways = dict(self._ways())

    def allocator(self) -> Allocator:
        """The node's allocator, whose clock a test moves."""
        boot_id = machine.boot_id(self.settings.simulator)
        return Allocator(self.settings, Store(self.settings, boot_id), boot_id, clock=lambda: self.now)

    def state(self) -> State:
        """The records."""
        return Store(self.settings, machine.boot_id(self.settings.simulator)).read()

    def mutating(self) -> list[tuple[str, str]]:
        """Function and GPU of each call that changed something, or was to, since the last restore."""
        return [(call["function"], call["gpu"]) for call in self.node.calls() if call["mutating"]]

    def restore(self, snapshot: Snapshot) -> None:
        """Back to that state; no fault is planted and nothing logged any more."""
        generation = self.node.hardware()["generation"]
        hardware: Hardware = json.loads(snapshot.hardware)
        hardware["generation"] = generation + 1
        self.node.store.write(hardware)
        Path(self.settings.state_dir, "state.json").write_bytes(snapshot.state)
        Path(self.settings.simulator, "calls.jsonl").write_bytes(b"")

    def calls(self, name: str) -> list[Call]:
        """All calls of a way, found by walking it."""
        self.restore(self.ways[name].start)
        self.node.configure(log="all")
        assert self.walk(name).error is None
        counts: Counter[str] = Counter()
        found = []
        for call in self.node.calls():
            counts[call["function"]] += 1
            found.append(Call(call["function"], counts[call["function"]], call["gpu"], call["mutating"]))
        return found

    def walk(self, name: str) -> Told:
        """Do a way's operation; anything but an error of ours is a failure of the test."""
        try:
            return Told(0, self.ways[name].operation(self.allocator()), None)
        except GresMigError as error:
            return Told(error.fault.exit_code, None, error)

    def violations(self, name: str, told: Told) -> Iterator[str]:
        """What must not be, after a way was walked and then, without faults, after the node was reconciled."""
        way, before = self.ways[name], json.loads(self.ways[name].start.hardware)["gpus"]
        epochs = {i.epoch for i in self.node.instances()}
        if self.neighbour.epoch not in epochs or not any(r.owner == NEIGHBOUR for r in _living(self.state())):
            yield "the neighbour lost its instance"
        if self.foreign.epoch not in epochs and name != "reclaim foreign":
            yield "a foreign instance was destroyed"
        if self.node.hardware()["gpus"][-1] != before[-1]:
            yield "a GPU that is not managed was changed"
        yield from (f"{function} on a GPU that is not managed" for function, gpu in self.mutating()
                    if gpu == self.uuids[-1])  # fmt: skip
        held = [r for r in _living(self.state()) if r.owner == OWNER]
        if isinstance(told.value, (Grant, Allocation)):
            given = told.value.allocation if isinstance(told.value, Grant) else told.value
            if given not in held or not any(_is(i, given) for i in self.node.instances()):
                yield "it was told of an instance that it does not have"
            for gpu in self.node.hardware()["gpus"]:
                for made in gpu["instances"]:
                    if [compute["size"] for compute in made["compute"]] != [made["size"]]:
                        yield f"an instance of {made['size']} slices is given with {made['compute']}"
        elif told.error and held and way.asks:
            yield "it was refused, and has an instance"
        if way.owned and not any(_is(i, r) and i.epoch == self.own.epoch for i in self.node.instances() for r in held):
            yield "the owner lost its instance"
        if way.operation is _reclaim and held and not told.error:
            yield "it was reclaimed, and is still held"
        yield from self._settled()

    def _settled(self) -> Iterator[str]:
        records, kept = self.state().records, list[Record]()
        for _ in range(3):
            # Twice over the grace: the first look at a bare instance only starts its clock.
            self.now += 100
            self.allocator().reconcile(now=True)
            records = self.state().records
            kept = [r for r in records if isinstance(r, Release) and r.stuck and r.stuck.holders == (self.holder,)]
            if all(isinstance(r, Allocation) or r in kept for r in records):
                break
        names = [(r.gpu_uuid, r.placement.start) for r in (*_living(self.state()), *kept)]
        for instance in self.node.instances():
            count = names.count((instance.gpu_uuid, instance.start))
            if count == 0 and instance.epoch not in (self.foreign.epoch, self.other.epoch):
                yield f"a leak: {instance.profile} at {instance.start}"
            if count > 1:
                yield f"{count} owners of {instance.profile} at {instance.start}"
        yield from (f"left behind: {r!r}" for r in records if not isinstance(r, Allocation) and r not in kept)

    def _ways(self) -> Iterator[tuple[str, Way]]:
        self.foreign, self.other = self.node.make(0, "1g.6gb", 3), self.node.make(self.uuids[-1], "1g.6gb", 0)
        self.allocator().allocate(NEIGHBOUR, Request(5_000, gpus=self.uuids[:1]))
        self.neighbour, _ = self.node.instances(0)
        self.node.hold(0, self.neighbour.id, 0)
        self.holder = machine.describe(os.getpid())
        empty = self._snapshot()
        allocation = self.allocator().allocate(OWNER, replace(LARGE, gpus=self.uuids[:1])).allocation
        owned = self._snapshot()
        self.own = next(i for i in self.node.instances(0) if _is(i, allocation))
        self.node.hold(0, self.own.id, 0)
        held = self._snapshot()
        self.restore(owned)
        shared = {name: getattr(allocation, name) for name in Record.field_names()}
        crashed = Intent(**shared, maker=NOBODY, creating=True, gi_id=allocation.gi_id, ci=True)
        with Store(self.settings, machine.boot_id(self.settings.simulator)).transaction() as node:
            node.save(node.state.put(crashed))
        halfway = self._snapshot()
        self.restore(owned)
        self.node.destroy(0, self.own.id)
        lost = self._snapshot()
        gpu, gi = self.uuids[0], self.foreign.id
        again = allocation.request
        yield "allocate", Way(empty, lambda allocator: allocator.allocate(OWNER, LARGE), asks=True)
        yield "allocate a small one", Way(empty, lambda allocator: allocator.allocate(OWNER, SMALL), asks=True)
        yield "ask again", Way(owned, lambda allocator: allocator.allocate(OWNER, again), owned=True)
        yield "ask again after a crash", Way(halfway, lambda allocator: allocator.allocate(OWNER, again), asks=True)
        yield "reclaim", Way(owned, _reclaim)
        yield "reclaim in use", Way(held, _reclaim)
        yield "adopt", Way(empty, lambda allocator: allocator.adopt(OWNER, gpu, gi), asks=True)
        yield "reclaim foreign", Way(empty, lambda allocator: allocator.reclaim_foreign(gpu, gi))
        yield "reconcile after a crash", Way(halfway, lambda allocator: allocator.reconcile())
        yield "reconcile a loss", Way(lost, lambda allocator: allocator.reconcile())
        yield "status", Way(owned, lambda allocator: allocator.look(everything=True), owned=True)

    def _snapshot(self) -> Snapshot:
        return Snapshot(json.dumps(self.node.hardware()), Path(self.settings.state_dir, "state.json").read_bytes())


WAYS = (
    "allocate", "allocate a small one", "ask again", "ask again after a crash", "reclaim", "reclaim in use",
    "adopt", "reclaim foreign", "reconcile after a crash", "reconcile a loss", "status",
)  # fmt: skip


def _reclaim(allocator: Allocator) -> object:
    return allocator.reclaim(OWNER)


def _living(state: State) -> list[Allocation]:
    return [r for r in state.records if isinstance(r, Allocation) and not r.lost]


def _is(instance: Found, record: Allocation) -> bool:
    return (instance.gpu_uuid, instance.id, instance.start, instance.mig_uuids) == (
        record.gpu_uuid, record.gi_id, record.placement.start, (record.mig_uuid,)
    )  # fmt: skip

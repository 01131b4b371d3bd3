"""Nodes on which an operation is killed or stopped: always with a neighbour at work and an instance of an admin's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driver import Driver, Operation, Told

from gres_mig import simulator
from gres_mig.simulator.hardware import start_of

NEIGHBOUR, SUBJECT, OTHER = "jupyter:1000:neighbour", "slurm:c:1", "slurm:c:2"
CRASHED, UNLUCKY = "slurm:c:3", "slurm:c:4"

Found = dict[str, Any]
"""A GPU instance as the hardware file has it, or a record as the record file has it."""


@dataclass(frozen=True)
class Variant:
    """A board, how its halves are numbered, and what is asked of it: a profile of which so many fit."""

    board: str
    half_swapped: bool
    profile: str
    memory_mib: int
    fits: int

    def __str__(self) -> str:
        return f"{self.board}{'-swapped' if self.half_swapped else ''}"


VARIANTS = (
    Variant("rtx-pro-6000", True, "1g.24gb", 8000, 4),
    Variant("rtx-pro-6000", False, "1g.24gb", 8000, 4),
    Variant("a100-40", False, "1g.5gb", 4000, 7),
    Variant("a100-40", True, "1g.5gb", 4000, 7),
)
"""Two steps on is the other board, numbered the other way."""


class Holder:
    """A process that uses the neighbour's instance, and counts on for as long as nobody ends it."""

    def __init__(self) -> None:
        counting = "import sys\nfor count, _ in enumerate(sys.stdin, 1):\n    print(count, flush=True)"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", counting], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        self.start = start_of(self.pid) or 0
        self._count = 0

    def counts_on(self) -> bool:
        """Whether it goes on exactly where it was."""
        assert self._process.stdin
        assert self._process.stdout
        print(file=self._process.stdin, flush=True)
        self._count += 1
        return self._process.stdout.readline() == f"{self._count}\n"

    def end(self) -> None:
        """End it."""
        self._process.communicate()


@dataclass(frozen=True)
class Scene:
    """A node in a folder, what is asked of it, and what has to be there whatever happens to whoever does it."""

    name: str
    folder: Path
    gpus: int
    holder: Holder
    operation: Operation
    ask: Operation
    """What the same owner asks afterwards."""
    allocation: Operation
    """An allocation for that owner."""
    planned: tuple[int, str, int]
    """GPU, profile and start where the operation works, and where an admin gets in its way."""
    foreign: tuple[Found, ...]
    """The admin's instances."""
    kept: dict[str, Found]
    """What owners were given and still have."""
    spare: Found | None = None
    """The admin's instance that the operation is about: it may become somebody's, or go."""

    @property
    def has_remains(self) -> bool:
        """Whether a crash left something of the owner's."""
        return self.name == "allocate_after_a_crash"

    def copy(self, folder: Path) -> Path:
        """The node as it is here, in another folder."""
        return Path(shutil.copytree(self.folder, folder))


class Builder:
    """Puts a node together with the product's own operations."""

    def __init__(self, folder: Path, driver: Driver, holder: Holder, variant: Variant, gpus: int) -> None:
        self.folder, self.driver, self.holder, self.variant = folder, driver, holder, variant
        simulator.create(folder / "node", [(variant.board, gpus)], half_swapped=variant.half_swapped)
        self.node = simulator.Node(folder / "node")
        self._starts = self.node.store.board(self.node.hardware()["gpus"][0]).profile(variant.profile).starts
        self.foreign = self.made_by_admin(self._starts[-1])
        self.done(self.allocate(NEIGHBOUR))
        self.hold(NEIGHBOUR)
        self.kept = {NEIGHBOUR: self.of(NEIGHBOUR)}

    def allocate(self, owner: str, *, alive: bool = True, refusing_guard: bool = False) -> Operation:
        """An ask of that owner, who lives as long as the holder, or is dead already."""
        witness = (self.holder.pid, self.holder.start + (not alive))
        return Operation(
            "allocate", owner, self.variant.memory_mib, witnesses=(witness,), refusing_guard=refusing_guard
        )

    def done(self, operation: Operation) -> Told:
        """Run it to its end, which must be a good one."""
        told = self.driver.run(self.folder, operation)
        assert told.value is not None, (operation, told)
        return told

    def killed_in(self, operation: Operation, function: str) -> None:
        """Run it until it dies in a call of that function."""
        self.node.plant(function, "kills", count="node")
        told = self.driver.start(self.folder, operation)
        self.node.mend()
        assert told.state == "killed", (operation, told)

    def hold(self, owner: str) -> None:
        """The holder uses that owner's instance."""
        found = self.of(owner)
        self.node.hold(found["gpu_uuid"], found["id"], found["compute"][0]["id"], pid=self.holder.pid)

    def of(self, owner: str) -> Found:
        """That owner's instance on the hardware."""
        (record,) = (r for r in records(self.folder) if r["owner"]["name"] == owner)
        return next(i for i in instances(self.folder) if is_at(i, record))

    def made_by_admin(self, start: int) -> Found:
        """An instance that an admin makes on the first GPU."""
        made = self.node.make(0, self.variant.profile, start)
        return next(i for i in instances(self.folder) if i["epoch"] == made.epoch)

    def last_free(self) -> int:
        """The last start on the first GPU that nothing overlaps."""
        taken = [i["start"] for i in instances(self.folder) if i["gpu_uuid"] == self.node.uuids[0]]
        return max(s for s in self._starts if all(abs(s - t) >= self.foreign["size"] for t in taken))

    def tried(self, operation: Operation) -> Found:
        """The instance that an allocation gets when nothing disturbs it, in a copy of this node."""
        copy = self.folder.with_name(f"{self.folder.name}-tried")
        shutil.copytree(self.folder, copy)
        value = self.driver.run(copy, operation).value
        found = next(i for i in instances(copy) if i["id"] == value["gi_id"] and i["gpu_uuid"] == value["gpu_uuid"])
        shutil.rmtree(copy)
        return found

    def scene(
        self, name: str, operation: Operation, where: Found, *, ask: Operation | None = None, spare: Found | None = None
    ) -> Scene:
        """The scene, which is over `where` on the hardware."""
        planned = (self.node.uuids.index(where["gpu_uuid"]), self.variant.profile, where["start"])
        allocation = self.allocate(SUBJECT)
        return Scene(
            name,
            self.folder,
            len(self.node.uuids),
            self.holder,
            operation,
            ask=ask or allocation,
            allocation=allocation,
            planned=planned,
            foreign=(self.foreign,),
            kept=self.kept,
            spare=spare,
        )


def _allocate(on: Builder) -> Scene:
    # What is made once is to be made by this one: a boot empties /run, a full disk takes the space kept for it.
    shutil.rmtree(on.folder / "run")
    (on.folder / "state" / "spare").unlink()
    operation = on.allocate(SUBJECT)
    return on.scene("allocate", operation, on.tried(operation))


def _allocate_again(on: Builder) -> Scene:
    operation = on.allocate(SUBJECT)
    on.done(operation)
    on.kept[SUBJECT] = on.of(SUBJECT)
    return on.scene("allocate_again", operation, on.of(SUBJECT))


def _allocate_after_a_crash(on: Builder) -> Scene:
    operation = on.allocate(SUBJECT)
    on.killed_in(operation, "nvmlGpuInstanceCreateComputeInstance")
    return on.scene("allocate_after_a_crash", operation, on.of(SUBJECT))


def _allocate_refused_by_the_guard(on: Builder) -> Scene:
    operation = on.allocate(SUBJECT, refusing_guard=True)
    return on.scene("allocate_refused_by_the_guard", operation, on.tried(on.allocate(SUBJECT)))


def _reclaim(on: Builder) -> Scene:
    on.done(on.allocate(SUBJECT))
    return on.scene("reclaim", Operation("reclaim", SUBJECT), on.of(SUBJECT))


def _reclaim_in_use(on: Builder) -> Scene:
    on.done(on.allocate(SUBJECT))
    on.hold(SUBJECT)
    return on.scene("reclaim_in_use", Operation("reclaim", SUBJECT), on.of(SUBJECT))


def _adopt(on: Builder) -> Scene:
    spare = on.made_by_admin(on.last_free())
    operation = Operation("adopt", SUBJECT, instance=(spare["gpu_uuid"], spare["id"]))
    return on.scene("adopt", operation, spare, ask=operation, spare=spare)


def _reclaim_foreign(on: Builder) -> Scene:
    spare = on.made_by_admin(on.last_free())
    operation = Operation("reclaim_foreign", instance=(spare["gpu_uuid"], spare["id"]))
    return on.scene("reclaim_foreign", operation, spare, ask=operation, spare=spare)


def _reconcile(on: Builder) -> Scene:
    on.done(on.allocate(SUBJECT, alive=False))
    on.killed_in(on.allocate(CRASHED), "nvmlGpuInstanceCreateComputeInstance")
    on.done(on.allocate(UNLUCKY))
    on.node.destroy(on.of(UNLUCKY)["gpu_uuid"], on.of(UNLUCKY)["id"])
    return on.scene("reconcile", Operation("reconcile"), on.of(SUBJECT))


SCENES: dict[str, tuple[Callable[[Builder], Scene], int]] = {
    "allocate": (_allocate, 4),
    "allocate_again": (_allocate_again, 4),
    "allocate_after_a_crash": (_allocate_after_a_crash, 4),
    "allocate_refused_by_the_guard": (_allocate_refused_by_the_guard, 4),
    "reclaim": (_reclaim, 4),
    "reclaim_in_use": (_reclaim_in_use, 4),
    "adopt": (_adopt, 4),
    "reclaim_foreign": (_reclaim_foreign, 4),
    "reconcile": (_reconcile, 6),
}
"""Each with the number of instances it takes room for, one of them for another owner: on a small board, two GPUs."""


def build(name: str, folder: Path, driver: Driver, holder: Holder, variant: Variant, *, gpus: int = 1) -> Scene:
    """That scene on so many of that board, or on as many as it takes."""
    make, room = SCENES[name]
    return make(Builder(folder / "scene", driver, holder, variant, max(gpus, -(-room // variant.fits))))


def records(folder: Path) -> list[Found]:
    """The records as the file has them."""
    path = folder / "state" / "state.json"
    found: list[Found] = json.loads(path.read_bytes())["records"] if path.exists() else []
    return found


def instances(folder: Path) -> list[Found]:
    """The GPU instances as the hardware has them, each with its GPU's UUID."""
    hardware = json.loads((folder / "node" / "hardware.json").read_bytes())
    return [{"gpu_uuid": gpu["uuid"], **instance} for gpu in hardware["gpus"] for instance in gpu["instances"]]


def is_at(instance: Found, record: Found) -> bool:
    """Whether an instance has exactly a record's GPU, profile and placement."""
    place = {"start": instance["start"], "size": instance["size"]}
    return (instance["gpu_uuid"], instance["profile"], place) == (
        record["gpu_uuid"],
        record["profile_id"],
        record["placement"],
    )

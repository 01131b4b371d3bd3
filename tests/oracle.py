"""What must hold of a node: whenever anybody looks, and once whoever worked on it is done."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from driver import Operation, Told
from scene import SUBJECT, Found, Scene, instances, is_at, records

from gres_mig import simulator
from gres_mig.exporter import shown
from gres_mig.models import Owner
from gres_mig.simulator.admin import SimulatedRefusal

LEAK, DOUBLE, LOST, FOREIGN = "leak", "double owner", "live instance lost", "foreign"
LOCK, ANSWER, RESERVE, MAPPING = "lock", "answer", "reserve", "mapping"


class Violation(NamedTuple):
    """Something that must not be, and where."""

    kind: str
    what: str


class Expected:
    """One node in a folder: what owners were told, and what an admin has, compared with what is there."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        self.scene, self.folder = scene, folder
        self.kept, self.foreign = dict(scene.kept), list(scene.foreign)
        if scene.spare and scene.operation.name == "adopt":
            self.foreign.append(scene.spare)

    def copy(self, folder: Path) -> Expected:
        """The same of a copy of the node."""
        other = Expected(self.scene, folder)
        other.kept, other.foreign = dict(self.kept), list(self.foreign)
        return other

    def hears(self, operation: Operation, told: Told) -> Iterator[Violation]:
        """An answer; what it gives is its owner's from now on, and must be there."""
        if isinstance(told.value, dict):
            found = self._of_grant(told.value)
            if found is None:
                yield Violation(LOST, f"{operation.owner} was told that it has {told.value}, which is not there")
            else:
                self._give(operation.owner, found)
        self._notice_adoption()

    def over(self, owner: str) -> None:
        """The owner's work is over."""
        self._notice_adoption()
        self.kept.pop(owner, None)

    def adopted_for_one_who_is_over(self) -> None:
        """What an admin gave to an owner is not his any more, and not the owner's unless it is recorded."""
        self._notice_adoption()
        self.foreign = [i for i in self.foreign if i != self.scene.spare]

    def admin_in_the_way(self) -> bool:
        """An admin makes an instance where the operation works, if the driver lets him; it is his from now on."""
        try:
            made = simulator.Node(self.folder / "node").make(*self.scene.planned)
        except SimulatedRefusal:
            return False
        self.foreign += [i for i in instances(self.folder) if i["epoch"] == made.epoch]
        return True

    def standing(self) -> Iterator[Violation]:
        """What is wrong at this moment."""
        self._notice_adoption()
        hardware, recorded = instances(self.folder), records(self.folder)
        for instance in self.foreign:
            if instance not in hardware:
                yield Violation(FOREIGN, f"the admin's {_name(instance)} is touched: {_names(hardware)}")
        for owner, instance in self.kept.items():
            if instance not in hardware:
                yield Violation(LOST, f"{owner} has no {_name(instance)} any more: {_names(hardware)}")
            if not any(r["owner"]["name"] == owner and _gives(r, instance) for r in recorded):
                yield Violation(LOST, f"{owner} is not recorded with its {_name(instance)}: {_names(recorded)}")
        if not self.scene.holder.counts_on():
            yield Violation(LOST, "the neighbour's process does not go on")
        for one, other in combinations(recorded, 2):
            if one["gpu_uuid"] == other["gpu_uuid"] and _overlap(one["placement"], other["placement"]):
                yield Violation(DOUBLE, f"two records on one place: {_names([one, other])}")
            if one["owner"] == other["owner"] and not (one.get("stuck") or other.get("stuck")):
                yield Violation(DOUBLE, f"two records of one owner: {_names([one, other])}")
        for path in self.folder.glob("state/*.damaged*"):
            yield Violation(LEAK, f"the records were damaged: {path.name}")

    def settled(self) -> Iterator[Violation]:
        """What is wrong once nobody works here and what was left is settled: the above, and what is left over."""
        yield from self.standing()
        hardware, recorded = instances(self.folder), records(self.folder)
        spare = [self.scene.spare] if self.scene.operation.name == "reclaim_foreign" and self.scene.spare else []
        theirs = {instance["epoch"] for instance in (*self.foreign, *spare)}
        for instance in hardware:
            if instance["epoch"] not in theirs and not any(_accounts_for(r, instance) for r in recorded):
                yield Violation(LEAK, f"{_name(instance)} is nobody's: {_names(recorded)}")
        for record in recorded:
            if not record.get("lost") and not any(_accounts_for(record, instance) for instance in hardware):
                yield Violation(LEAK, f"{_name(record)} has nothing on the hardware: {_names(hardware)}")
        yield from self.told()

    def told(self) -> Iterator[Violation]:
        """What dcgm-exporter reads that is not so."""
        indexes = {uuid: index for index, uuid in enumerate(simulator.Node(self.folder / "node").uuids)}
        wanted = {
            f"{indexes[record['gpu_uuid']]}.{record['gi_id']}": f"{shown(Owner(record['owner']['name']))}\n"
            for record in records(self.folder)
            if record["kind"] == "allocation" and not record["lost"]
        }
        files = (p for p in (self.folder / "run" / "mapping").glob("*.*") if p.suffix != ".new")
        found = {path.name: text for path in files if (text := path.read_text())}
        if found != wanted:
            yield Violation(MAPPING, f"the exporter is told {found}, and the records say {wanted}")

    def nothing_of(self, owner: str) -> Iterator[Violation]:
        """What an owner still has whose work is over, but for what the hardware does not let go."""
        for record in records(self.folder):
            if record["owner"]["name"] == owner and not record.get("stuck"):
                yield Violation(LEAK, f"{owner} is over and still has {_name(record)}")

    def reserve(self) -> Iterator[Violation]:
        """What is wrong with the space kept for giving back on a full disk, once anything was given."""
        kept, needed = ((self.folder / "state" / name).stat().st_size for name in ("spare", "state.json"))
        if kept < needed:
            yield Violation(RESERVE, f"{kept} bytes are kept for writing {needed} on a full disk")

    def _give(self, owner: str, instance: Found) -> None:
        self.kept[owner] = instance
        self.foreign = [i for i in self.foreign if i != instance]

    def _notice_adoption(self) -> None:
        # Recorded is adopted, whether or not the admin was told.
        spare = self.scene.spare
        if spare in self.foreign and any(_gives(record, spare) for record in records(self.folder)):
            self._give(SUBJECT, spare)

    def _of_grant(self, grant: Found) -> Found | None:
        for instance in instances(self.folder):
            place = (instance["gpu_uuid"], instance["id"], instance["start"], instance["profile"])
            uuids = [compute["uuid"] for compute in instance["compute"]]
            asked = (grant["gpu_uuid"], grant["gi_id"], grant["start"], grant["profile_id"])
            if place == asked and uuids == [grant["mig_uuid"]]:
                return instance
        return None


def _gives(record: Found, instance: Found) -> bool:
    return (
        record["kind"] == "allocation"
        and not record["lost"]
        and is_at(instance, record)
        and record["gi_id"] == instance["id"]
        and [compute["uuid"] for compute in instance["compute"]] == [record["mig_uuid"]]
    )


def _accounts_for(record: Found, instance: Found) -> bool:
    is_stuck = record["kind"] == "release" and record["stuck"] is not None
    return _gives(record, instance) or (is_stuck and is_at(instance, record))


def _overlap(one: Found, other: Found) -> bool:
    return bool(one["start"] < other["start"] + other["size"] and other["start"] < one["start"] + one["size"])


def _name(found: Found) -> str:
    if "kind" in found:
        shown = {k: found[k] for k in ("creating", "gi_id", "ci", "stuck", "lost") if k in found}
        return f"{found['kind']} of {found['owner']['name']} at {found['placement']['start']} {shown}"
    bare = "" if found["compute"] else "bare "
    return f"{bare}GPU instance {found['id']} at {found['start']} (epoch {found['epoch']})"


def _names(found: list[Found]) -> str:
    return "; ".join(_name(each) for each in found) or "nothing"

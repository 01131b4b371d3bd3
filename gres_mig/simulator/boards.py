"""What each simulated board is: figures with their sources, one JSON file a board, read once a process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from gres_mig.errors import BadRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FOLDER = os.path.join(os.path.dirname(__file__), "boards")

KNOWN_PROFILE_IDS = frozenset({0, 5, 6, 9, 14, 15, 19, 20, 21, 32, 35, 47, 64, 65, 66, 67})
"""GPU instance profile ids of all boards: a driver tells an id of another chip from one that nobody has."""

# Compute instance profiles by the slices of the GPU instance: (enum = id, slices, count). From `-lcip` of A100 and
# H100. A 7-slice instance also takes smaller ones, in numbers that no source at hand gives: left out.
_COMPUTE = {
    1: ((0, 1, 1),),
    2: ((0, 1, 2), (1, 2, 1)),
    3: ((0, 1, 3), (1, 2, 1), (2, 3, 1)),
    4: ((0, 1, 4), (1, 2, 2), (3, 4, 1)),
    7: ((4, 7, 1),),
}


class GpuProfile:
    """A GPU instance profile of a board."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.enum: int = data["enum"]
        self.id: int = data["id"]
        self.name: str = data["name"]
        self.memory_mib: int = data["memory_mib"]
        self.slices: int = data["slices"]
        self.instance_count: int = data["instance_count"]
        self.multiprocessors: int = data["multiprocessors"]
        self.copy_engines: int = data["copy_engines"]
        self.decoders: int = data["decoders"]
        self.encoders: int = data["encoders"]
        self.jpeg: int = data["jpeg"]
        self.ofa: int = data["ofa"]
        self.starts: tuple[int, ...] = tuple(data["starts"])
        self.size: int = data["size"]
        self.media: tuple[int, ...] = (self.decoders, self.encoders, self.jpeg, self.ofa)
        """The media engines an instance takes for itself."""


class ComputeProfile:
    """A compute instance profile of a GPU instance; its id is its enum."""

    def __init__(self, enum: int, name: str, slices: int, instance_count: int, multiprocessors: int) -> None:
        self.id = enum
        self.name = name
        self.slices = slices
        self.instance_count = instance_count
        self.multiprocessors = multiprocessors

    def starts(self, slices: int) -> tuple[int, ...]:
        """Where it may begin in a GPU instance of so many compute slices."""
        return tuple(range(0, slices - self.slices + 1, self.slices))[: self.instance_count]


class Board:
    """One model of GPU; a board without profiles has no MIG."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.name: str = data["board"]
        self.model: str = data["model"]
        self.pci_device_id = int(data["pci_device_id"] or "0", 16)
        self.pci_subsystem_id = int(data["pci_subsystem_id"] or "0", 16)
        self.memory_bytes: int = data["memory_mib"] << 20
        self.reserved_bytes: int = data["reserved_bytes"] or 0
        self.units: int = data["units"]
        self.max_instances: int = data["max_instances"]
        self.compute_slices: int = data["compute_slices"]
        self.resetless: bool = data["resetless"]
        self.mode_survives_reboot: bool = data["mode_survives_reboot"]
        self.profiles = tuple(GpuProfile(profile) for profile in data["profiles"])
        self.by_enum = {p.enum: p for p in self.profiles}
        self.by_id = {p.id: p for p in self.profiles}
        whole = [p for p in self.profiles if p.size == self.units]
        self.media: tuple[int, ...] | None = whole[0].media if whole else None
        """Media engines of the whole GPU; None where no source gives them."""
        self.filled: dict[tuple[type, int], Any] = {}
        """Structures of a caller's type, filled for a profile id."""

    @property
    def mig(self) -> bool:
        """Whether it can be partitioned at all."""
        return bool(self.profiles)

    @property
    def hole(self) -> frozenset[int]:
        """Memory slices that no compute slice stands beside: slot 7 of the seven-slice boards."""
        return frozenset({self.units - 1}) if self.compute_slices == self.units - 1 else frozenset()

    def profile(self, key: int | str) -> GpuProfile:
        """By the driver's id or by name."""
        for profile in self.profiles:
            if key in (profile.id, profile.name):
                return profile
        known = ", ".join(p.name for p in self.profiles) or "none"
        raise BadRequest(f"{self.model} has no profile {key}: it has {known}")

    def compute_profiles(self, profile: GpuProfile) -> tuple[ComputeProfile, ...]:
        """What a GPU instance of that profile can be divided into."""
        return tuple(
            ComputeProfile(
                enum,
                profile.name if slices == profile.slices else f"{slices}c.{profile.name}",
                slices,
                count,
                self._multiprocessors(profile, slices),
            )
            for enum, slices, count in _COMPUTE[profile.slices]
        )

    def _multiprocessors(self, profile: GpuProfile, slices: int) -> int:
        # Of a part: inferred to be those of the plain profile of that many slices (14 and 28 on an A100).
        plain = next((p for p in self.profiles if p.slices == slices and p.enum <= 4), profile)
        return profile.multiprocessors if slices == profile.slices else plain.multiprocessors


_loaded: dict[tuple[str, str], Board] = {}


def names() -> tuple[str, ...]:
    """The boards that come with the package."""
    return tuple(sorted(entry[:-5] for entry in os.listdir(_FOLDER) if entry.endswith(".json")))


def data(name: str) -> dict[str, Any]:
    """A board's figures with their sources, as a fresh copy: change it to describe a board nobody has heard of.

    `owner/repo#number` in a source is a public thread; a file id, a log or listing found in a public code index.
    """
    if name not in names():
        raise BadRequest(f"no simulated board {name!r}", hint="boards: " + ", ".join(names()))
    with open(os.path.join(_FOLDER, f"{name}.json"), "rb") as file:
        figures: dict[str, Any] = json.load(file)
    return figures


def board(name: str, node: str) -> Board:
    """The board of that name; a node's own `boards/NAME.json` comes before the packaged one."""
    found = _loaded.get((name, node))
    if found is None:
        own = os.path.join(node, "boards", f"{name}.json")
        path = own if os.path.exists(own) else os.path.join(_FOLDER, f"{name}.json")
        with open(path, "rb") as file:
            found = _loaded[name, node] = Board(json.load(file))
    return found

"""Whoever makes, gives back and settles slices is killed at each of its steps; the steps are found by running."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked import each
from points import Points
from vgpu import require_compiler, slicing

from gres_mig import log, machine, simulator
from gres_mig.allocator import Allocator
from gres_mig.errors import GresMigError
from gres_mig.models import Allocation, Owner, Process, Record, Request, Settings, State
from gres_mig.simulator.admin import Node
from gres_mig.simulator.assembly import create
from gres_mig.slice_models import Slicing
from gres_mig.state import Store
from gres_mig.values import replace

require_compiler()
pytestmark = pytest.mark.timeout(300)

OWNER, NEIGHBOUR, OTHER = (Owner(f"manual:{name}") for name in ("owner", "neighbour", "other"))
NOBODY = Process(1 << 22, 1)
"""A process that cannot be there: pids end below."""
ASKED = Request(20000)

RECOVERIES = ("the owner asks", "its epilog runs", "reconcile runs")
"""What comes after a kill: of making all of them, of the others each in its turn."""

Way = Callable[[Allocator], object]

WAYS: dict[str, Way] = {
    "allocate": lambda allocator: allocator.allocate(OWNER, ASKED),
    "allocate again": lambda allocator: allocator.allocate(OWNER, ASKED),
    "reclaim": lambda allocator: allocator.reclaim(OWNER),
    "reconcile": lambda allocator: allocator.reconcile(),
}


class Shared:
    """A node of one L40 in a folder, shared by slices, with a neighbour's slice on it."""

    def __init__(self, folder: Path, slicing: Slicing) -> None:
        self.folder = folder
        self.settings = Settings(
            state_dir=str(folder / "state"),
            run_dir=str(folder / "run"),
            simulator=str(folder / "node"),
            slicing=slicing,
            bare_grace_s=0.0,
            young_s=0.0,
            in_use_wait_s=0.0,
        )

    def make(self) -> None:
        """The node itself, on a driver that has limits of its own."""
        create(self.folder / "node", [("l40", 1)])
        Node(self.folder / "node").configure(driver="615.10.04")
        cgroups = self.folder / "node/sys/fs/cgroup"
        cgroups.mkdir(parents=True)
        (cgroups / "cgroup.controllers").touch()
        self.allocator().allocate(NEIGHBOUR, Request(4000))

    def begin(self, way: str) -> None:
        """What the way begins from."""
        if way in ("allocate again", "reclaim"):
            self.allocator().allocate(OWNER, ASKED)
        elif way == "reconcile":
            self.allocator().allocate(OWNER, ASKED, witnesses=(NOBODY,))

    def allocator(self) -> Allocator:
        boot_id = machine.boot_id(self.settings.simulator)
        return Allocator(self.settings, Store(self.settings, boot_id), boot_id)

    def state(self) -> State:
        return Store(self.settings, machine.boot_id(self.settings.simulator)).read()

    def held(self) -> list[Record]:
        return [r for r in self.state().records if isinstance(r, Allocation)]

    def wrong(self) -> Iterator[str]:
        """What must not be: folders or limits of nobody, records of nothing, a neighbour without his slice."""
        names = {f"{r.gpu_uuid}.{r.placement.start}.{r.memory_mib + r.overhead_mib}.{r.nonce}" for r in self.held()}
        there = {path.name for path in (self.folder / "run/slices").glob("*/*")}
        if names != there:
            yield f"recorded {names}, there {there}"
        limits = json.loads((self.folder / "node/hardware.json").read_bytes())["gpus"][0].get("limits", {})
        owners = {r.owner.name.replace(":", "-") for r in self.held() if r.slice == "driver-limit"}
        if {os.path.basename(path) for path in limits} != owners:
            yield f"limited {limits}, owners {owners}"
        if NEIGHBOUR not in [r.owner for r in self.held()]:
            yield "the neighbour lost his slice"
        if len(self.held()) != len(self.state().records):
            yield f"left behind: {self.state().records}"


class Steps(Points):
    """Points that remember what each would leave to others: hardware, records, and all below the slices."""

    def _fingerprints(self) -> dict[str, str]:
        folder = self._state.parent
        files = (path for part in ("state", "run/slices", "node") for path in sorted((folder / part).rglob("*")))
        seen = ((path, path.lstat()) for path in files)
        return {"left": "".join(f"{path} {status.st_mtime_ns} {status.st_mode};" for path, status in seen)}


def steps(node: Shared, way: str) -> list[int]:
    """The points of an undisturbed run: of those between which nothing changed, the first stands for all."""
    reached = _run(node, way, Steps(node.folder, lambda event: None, trace=True))
    left = [""] + [point["left"] for point in reached]
    return [at for at in range(len(reached)) if left[at] != left[at + 1]]


def _run(node: Shared, way: str, points: Points) -> list[dict[str, str]]:
    """Do it in a process of its own; the points that it had, none when it was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            points.install()
            WAYS[way](node.allocator())
            data = memoryview(json.dumps(points.reached).encode())
            while data:
                data = data[os.write(writing, data) :]
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -points._signal
    found: list[dict[str, str]] = json.loads(said or "[]")
    return found


def killed(case: tuple[str, Path, Slicing, int, str]) -> list[str]:
    """What is wrong after a kill at that point and then that recovery."""
    way, scene, slicing, at, recovery = case
    log.send_to(lambda level, line: None)
    folder = Path(shutil.copytree(scene, f"{scene}-{at}-{recovery.replace(' ', '-')}", symlinks=True))
    node = Shared(folder, slicing)
    try:
        _point_into(folder, scene)
        _run(node, way, Points(folder, lambda event: None, at=at, signal_number=signal.SIGKILL))
        for _ in range(3):
            # What is bare is seen twice before it goes.
            _do(node, recovery)
        found = list(node.wrong())
        given = [r for r in node.held() if r.owner == OWNER]
        if recovery == "the owner asks" and len(given) != 1:
            found.append(f"the owner has {given}")
        if recovery == "its epilog runs" and given:
            found.append("its end left the owner's slice")
        # Nothing of it takes room any more: another owner gets all that there is.
        node.allocator().reclaim(OWNER)
        node.allocator().reconcile(now=True)
        node.allocator().allocate(OTHER, Request(39000))
        return [f"{way} killed at {at}, then {recovery}: {each}" for each in found]
    finally:
        simulator.uninstall()
        shutil.rmtree(folder)


def _do(node: Shared, recovery: str) -> None:
    try:
        if recovery == "the owner asks":
            node.allocator().allocate(OWNER, ASKED)
        elif recovery == "its epilog runs":
            node.allocator().reclaim(OWNER)
    except GresMigError as error:
        assert error.code in ("BUSY", "NOCAP"), error  # noqa: PT017 - not settled yet, or its room is withheld
    node.allocator().reconcile(now=True)


def _point_into(folder: Path, scene: Path) -> None:
    """The cgroups and limits of the copy are its own."""
    for link in (folder / "run").glob("slices/*/*/cgroup"):
        target = os.readlink(link).replace(str(scene), str(folder))
        link.unlink()
        link.symlink_to(target)
    hardware = folder / "node/hardware.json"
    hardware.write_text(hardware.read_text().replace(str(scene), str(folder)))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Slicing:
    """Both back ends there are; which one is used, a test says."""
    return slicing(tmp_path_factory.mktemp("libraries"))


@pytest.mark.parametrize("backend", ["driver-limit", "cooperative"])
@pytest.mark.parametrize("way", WAYS)
def test_a_kill_at_any_step_leaks_no_slice(memory: Path, libraries: Slicing, way: str, backend: str) -> None:
    shared = replace(libraries, driver_limit=backend == "driver-limit")
    node = Shared(memory / "scene", shared)
    node.make()
    node.begin(way)
    simulator.uninstall()
    copy = Path(shutil.copytree(node.folder, memory / "counted", symlinks=True))
    _point_into(copy, node.folder)

    points = steps(Shared(copy, shared), way)
    cases = [
        (way, node.folder, shared, at, recovery)
        for turn, at in enumerate(points)
        for recovery in (RECOVERIES if way == "allocate" else (RECOVERIES[turn % len(RECOVERIES)],))
    ]
    found = [violation for violations in each(killed, cases) for violation in violations]

    assert found == []
    assert len(points) >= (1 if way == "allocate again" else 6)

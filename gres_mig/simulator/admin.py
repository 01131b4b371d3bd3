"""The hands on a simulated node: reboot it, reset or lose a GPU, hold an instance, plant a fault, read it all."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gres_mig.errors import BadRequest, GresMigError

from . import changes, codes, faults, physics
from .assembly import new_boot_id
from .codes import Refused
from .hardware import Store, alive, start_of
from .library import log_path
from .schema import ComputeInstance, Fault, Gpu, GpuInstance, Hardware, Holder, Settings


class Found(NamedTuple):
    """A GPU instance as the hardware has it, for tests and for looking at."""

    gpu: int
    gpu_uuid: str
    id: int
    profile: str
    profile_id: int
    start: int
    size: int
    epoch: int
    mig_uuids: tuple[str, ...]
    holders: tuple[int, ...]
    """Pids that live, of the GPU instance and its compute instances."""


class Node:
    """A simulated node from outside: what its owner, its BIOS and its bad luck can do. A GPU is an index or a UUID."""

    def __init__(self, folder: Path | str) -> None:
        self.store = Store(folder)

    @property
    def boot_id(self) -> str:
        """Changes with each reboot."""
        return self.store.read()["boot_id"]

    @property
    def module_instance(self) -> int:
        """Counts the loads of the driver."""
        return self.store.read()["load"]

    @property
    def uuids(self) -> tuple[str, ...]:
        """The GPUs by index."""
        return tuple(gpu["uuid"] for gpu in self.store.read()["gpus"])

    def hardware(self) -> Hardware:
        """Everything in the file, as a copy."""
        return self.store.read_copy()

    def instances(self, gpu: int | str | None = None) -> list[Found]:
        """The GPU instances there are, by GPU and start."""
        found = []
        for index, each in enumerate(self.store.read()["gpus"]):
            if gpu is None or gpu in (index, each["uuid"]):
                found += [_found(self.store, index, each, i) for i in each["instances"]]
        return sorted(found, key=lambda f: (f.gpu, f.start))

    def reboot(self, order: Sequence[int] = ()) -> None:
        """All instances go; the MIG mode stays where the board keeps it; another boot id; faults stay planted.

        `order`: the old indexes in their new order, where the GPUs come up differently.
        """
        with self.store.change() as hardware:
            physics.forget_instances(hardware)
            hardware["gpus"] = [hardware["gpus"][index] for index in order] if order else hardware["gpus"]
            hardware["boot_id"] = new_boot_id()
            hardware["load"] += 1
            hardware["loaded"], hardware["mismatch"] = True, False

    def reload_driver(self) -> None:
        """As a reboot, but in the same boot (that a Hopper forgets its MIG mode here as well is inferred)."""
        with self.store.change() as hardware:
            physics.forget_instances(hardware)
            hardware["load"] += 1
            hardware["loaded"], hardware["mismatch"] = True, False

    def unload_driver(self) -> None:
        """Until `reload_driver`, `nvmlInit` answers DRIVER_NOT_LOADED."""
        with self.store.change() as hardware:
            physics.forget_instances(hardware)
            hardware["load"] += 1
            hardware["loaded"] = False

    def upgrade_library(self) -> None:
        """User space is newer than the module: LIB_RM_VERSION_MISMATCH for all until a reboot or reload."""
        with self.store.change() as hardware:
            hardware["mismatch"] = True

    def reset(self, gpu: int | str) -> None:
        """Instances and users go, a pending MIG mode comes into force, a lost GPU is back; the boot id stays."""
        with self.store.change() as hardware:
            each = hardware["gpus"][self._index(gpu)]
            each["instances"], each["holders"], each["lost"] = [], [], ""
            each["mig"] = each["pending"]

    def set_mig(self, gpu: int | str, current: bool, *, pending: bool | None = None) -> None:
        """The MIG mode in force, and the one that waits for a reset where it differs; turning it off clears the GPU."""
        with self.store.change() as hardware:
            each = hardware["gpus"][self._index(gpu)]
            if not self.store.board(each).mig:
                raise BadRequest(f"GPU {gpu} has no MIG")
            each["mig"] = int(current)
            each["pending"] = int(current if pending is None else pending)
            each["instances"] = each["instances"] if current else []

    def set_gpu(self, gpu: int | str, *, half_swapped: bool | None = None, survives_reboot: bool | None = None) -> None:
        """How a chip is: its halves exchanged, its MIG mode kept over a reboot."""
        with self.store.change() as hardware:
            each = hardware["gpus"][self._index(gpu)]
            each["half_swapped"] = each["half_swapped"] if half_swapped is None else half_swapped
            each["survives_reboot"] = each["survives_reboot"] if survives_reboot is None else survives_reboot

    def lose(self, gpu: int | str, *, identity: bool = False) -> None:
        """It falls off the bus until reset or reboot. With `identity` NVML still gives its handle and says who it was,
        as in a session that knew it before; without, not even the handle."""
        with self.store.change() as hardware:
            hardware["gpus"][self._index(gpu)]["lost"] = "calls" if identity else "all"

    def hold(
        self,
        gpu: int | str,
        gi: int | None = None,
        ci: int | None = None,
        *,
        pid: int | None = None,
        listed: bool = True,
        memory_mib: int = 0,
    ) -> None:
        """A process uses the GPU, the GPU instance or the compute instance until it ends. `listed=False`: no CUDA
        process, a monitoring agent say."""
        pid = os.getpid() if pid is None else pid
        start = start_of(pid)
        if start is None:
            raise BadRequest(f"no process {pid}")
        with self.store.change() as hardware:
            holders = self._holders(hardware, gpu, gi, ci)
            holders[:] = alive(holders)
            holders.append({"pid": pid, "start": start, "listed": listed, "memory_mib": memory_mib})

    def let_go(self, gpu: int | str, gi: int | None = None, ci: int | None = None, *, pid: int | None = None) -> None:
        """The opposite of `hold`."""
        pid = os.getpid() if pid is None else pid
        with self.store.change() as hardware:
            holders = self._holders(hardware, gpu, gi, ci)
            holders[:] = [h for h in holders if h["pid"] != pid]

    def make(self, gpu: int | str, profile: int | str, start: int | None = None, *, bare: bool = False) -> Found:
        """What an admin makes by hand; `bare`: no compute instance. The driver's own rules hold."""
        index = self._index(gpu)
        board = self.store.board(self.store.read()["gpus"][index])
        kind = board.profile(profile)
        if start is not None and start not in kind.starts:
            raise BadRequest(f"{kind.name} never starts at {start}: it starts at {kind.starts}")
        try:
            made = changes.make_gpu_instance(self.store, index, kind, start)
            if not bare:
                whole = board.compute_profiles(kind)[-1]
                changes.make_compute_instance(self.store, index, made["epoch"], whole, None)
        except Refused as refused:
            raise SimulatedRefusal(refused, f"making {kind.name} on GPU {gpu}") from refused
        return self._instance(index, made["id"])

    def complete(self, gpu: int | str, gi: int) -> Found:
        """Give a bare GPU instance its compute instance."""
        index = self._index(gpu)
        instance = self._instance(index, gi)
        board = self.store.board(self.store.read()["gpus"][index])
        whole = board.compute_profiles(board.by_id[instance.profile_id])[-1]
        try:
            changes.make_compute_instance(self.store, index, instance.epoch, whole, None)
        except Refused as refused:
            raise SimulatedRefusal(refused, f"completing GPU instance {gi} of GPU {gpu}") from refused
        return self._instance(index, gi)

    def destroy(self, gpu: int | str, gi: int, *, compute_only: bool = False) -> None:
        """What an admin destroys by hand, compute instances first. The driver's own rules hold."""
        index = self._index(gpu)
        instance = self._raw(self.store.read(), index, gi)
        try:
            for compute in instance["compute"]:
                changes.destroy_compute_instance(self.store, index, compute["epoch"])
            if not compute_only:
                changes.destroy_gpu_instance(self.store, index, instance["epoch"])
        except Refused as refused:
            raise SimulatedRefusal(refused, f"destroying GPU instance {gi} of GPU {gpu}") from refused

    def plant(
        self,
        function: str,
        action: str,
        *,
        code: int = codes.UNKNOWN,
        after: bool = False,
        gpu: int | str | None = None,
        nth: int = 1,
        times: int = 1,
        count: str = "process",
        sticky: bool = False,
    ) -> int:
        """The `nth` call of `function` (`*`: of any; a `_v2` may be left out) and the `times - 1` after it (0: for
        ever) meet a fault; the answer is its number. `count`: each process counts for itself, or the `node` counts.

        `returns` gives `code` instead of doing it, or `after` doing it; `lies` says SUCCESS and does nothing; `kills`
        and `stops` signal the caller before or `after`; `hangs` blocks before or `after` until `release`. `sticky`
        with GPU_IS_LOST or LIB_RM_VERSION_MISMATCH stays so.
        """
        if action not in faults.ACTIONS or count not in ("process", "node"):
            raise BadRequest(f"no fault {action!r} counted by {count!r}", hint="faults: " + ", ".join(faults.ACTIONS))
        with self.store.change() as hardware:
            number = hardware["generation"]
            fault: Fault = {
                "id": number,
                "function": function,
                "gpu": "" if gpu is None else self.uuids[self._index(gpu)],
                "nth": nth,
                "times": times,
                "count": count,
                "action": action,
                "code": code,
                "after": after,
                "sticky": sticky,
                "seen": 0,
                "fired": [],
            }
            if action == "hangs":
                Path(faults.release_path(self.store, number)).touch()
            hardware["faults"].append(fault)
        return number

    def fired(self, number: int) -> list[int]:
        """The pids a planted fault has hit so far, written before it acts."""
        return next((f["fired"] for f in self.store.read()["faults"] if f["id"] == number), [])

    def release(self, number: int) -> None:
        """End a hang: the calls that hang go on."""
        Path(faults.release_path(self.store, number)).unlink(missing_ok=True)

    def mend(self) -> None:
        """Remove all planted faults; hanging calls go on."""
        with self.store.change() as hardware:
            for fault in hardware["faults"]:
                self.release(fault["id"])
            hardware["faults"] = []

    def configure(self, **settings: Any) -> None:
        """Change `Settings` (create_s, destroy_s, compute_s, permission, monitor, stale_sessions, log) or what
        `Driver` is loaded."""
        if settings.get("log", "off") != "off":
            # Whoever calls the library writes to it, whatever user he is.
            Path(log_path(self.store)).touch()
            os.chmod(log_path(self.store), 0o666)
        with self.store.change() as hardware:
            for name, value in settings.items():
                into: Any = hardware["settings"] if name in Settings.__annotations__ else hardware["driver"]
                if name not in into:
                    raise BadRequest(f"a simulated node has no setting {name}")
                into[name] = value

    def calls(self) -> list[dict[str, Any]]:
        """The log (`configure(log="all")` or `"mutating"`): at_ns, pid, function, gpu, mutating, code of each call."""
        try:
            with open(log_path(self.store), encoding="utf-8") as file:
                return [json.loads(line) for line in file]
        except FileNotFoundError:
            return []

    def _index(self, gpu: int | str) -> int:
        uuids = self.uuids
        if gpu in uuids:
            return uuids.index(str(gpu))
        if isinstance(gpu, int) and 0 <= gpu < len(uuids):
            return gpu
        raise BadRequest(f"no GPU {gpu} on this node")

    def _holders(self, hardware: Hardware, gpu: int | str, gi: int | None, ci: int | None) -> list[Holder]:
        index = self._index(gpu)
        if gi is None:
            return hardware["gpus"][index]["holders"]
        instance = self._raw(hardware, index, gi)
        if ci is None:
            return instance["holders"]
        found: ComputeInstance | None = next((c for c in instance["compute"] if c["id"] == ci), None)
        if found is None:
            raise BadRequest(f"no compute instance {ci} in GPU instance {gi} of GPU {gpu}")
        return found["holders"]

    def _raw(self, hardware: Hardware, index: int, gi: int) -> GpuInstance:
        for instance in hardware["gpus"][index]["instances"]:
            if instance["id"] == gi:
                return instance
        raise BadRequest(f"no GPU instance {gi} on GPU {index}")

    def _instance(self, index: int, gi: int) -> Found:
        return next(f for f in self.instances(index) if f.id == gi)


class SimulatedRefusal(GresMigError):
    """The simulated driver said no to its admin; `nvml_code` is its code."""

    def __init__(self, refused: Refused, what: str) -> None:
        super().__init__(f"{what}: {refused}")
        self.nvml_code = refused.code


def _found(store: Store, index: int, gpu: Gpu, instance: GpuInstance) -> Found:
    holders = [*instance["holders"], *(h for c in instance["compute"] for h in c["holders"])]
    return Found(
        gpu=index,
        gpu_uuid=gpu["uuid"],
        id=instance["id"],
        profile=store.board(gpu).by_id[instance["profile"]].name,
        profile_id=instance["profile"],
        start=instance["start"],
        size=instance["size"],
        epoch=instance["epoch"],
        mig_uuids=tuple(c["uuid"] for c in instance["compute"]),
        holders=tuple(h["pid"] for h in alive(holders)),
    )

"""The nouns: frozen values that every other module passes around; a hook imports them, so only the stdlib."""

from __future__ import annotations

from collections.abc import Mapping

from gres_mig.serving import Serving
from gres_mig.slice_models import GpuUser, Slicing
from gres_mig.values import Value, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar

GPU_VARIANTS = frozenset({7, 8, 10, 11, 12, 13, 14, 15, 16, 17})
"""`NVML_GPU_INSTANCE_PROFILE_*` enums (nvml.h) whose instances differ from a plain one of their size
in media engines (`+me`, `-me`, `+me.all`) or graphics (`+gfx`); never chosen unless named."""

_NOTHING: Mapping[str, Any] = {}


class Placement(Value):
    """Memory slices `start .. start+size-1` of one GPU, in the logical numbering NVML shows."""

    start: int
    size: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and (self.start, self.size) == (other.start, other.size)

    def __hash__(self) -> int:
        return hash((self.start, self.size))

    def __lt__(self, other: Placement) -> bool:
        return (self.start, self.size) < (other.start, other.size)

    @property
    def mask(self) -> int:
        """The slices as bits, slice 0 lowest."""
        return ((1 << self.size) - 1) << self.start

    def overlaps(self, other: Placement) -> bool:
        """Whether a slice belongs to both."""
        return self.start < other.start + other.size and other.start < self.start + self.size

    def __str__(self) -> str:
        return f"{self.start}:{self.size}"


class Profile(Value):
    """A GPU instance profile as this GPU's NVML reports it; never taken from a table, never parsed from its name."""

    id: int
    """The driver's id: 14 is `2g` on an A100 and `1g` on an RTX PRO 6000, so it means nothing without the GPU."""
    name: str
    """NVML's name without the `MIG ` prefix, such as `1g.24gb`; a label, not a key."""
    memory_mib: int
    compute_slices: int
    multiprocessors: int
    instance_count: int
    placements: tuple[Placement, ...]
    variant: bool = False
    """A media-engine or graphics variant of a plain profile."""


class _Handled(Value):
    """A value with a driver handle, which is good in one NVML session of one process only."""

    _aside: ClassVar[frozenset[str]] = frozenset({"handle"})

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "handle": None}


class ComputeInstance(_Handled):
    """The compute instance of a GPU instance; with it the instance is a MIG device with a UUID."""

    id: int
    mig_uuid: str
    handle: Any = None
    variables: tuple[str, ...] = ()
    """What a slice's processes need in their environment besides, as `NAME=value`; empty for a MIG device."""


class Instance(_Handled):
    """A GPU instance found on the hardware. One without compute instances is *bare*: it is no MIG device,
    so a walk of MIG devices misses it, yet it holds its slices."""

    gpu_uuid: str
    id: int
    profile_id: int
    placement: Placement
    compute_instances: tuple[ComputeInstance, ...] = ()
    handle: Any = None
    memory_mib: int = 0
    """What a slice takes of its GPU, overhead included; 0 for a GPU instance, whose profile says it."""

    @property
    def bare(self) -> bool:
        """No compute instance."""
        return not self.compute_instances


class Gpu(Value):
    """A physical GPU as one look found it.

    `trouble` is empty when instances can be made on it, else the reason in words (MIG off, pending, lost).
    """

    uuid: str
    index: int
    minor: int
    pci_bus_id: str
    model: str
    memory_mib: int
    mig_current: bool | None
    """None: this board has no MIG."""
    mig_pending: bool | None
    profiles: tuple[Profile, ...] = ()
    instances: tuple[Instance, ...] = ()
    full_profiles: frozenset[int] = frozenset()
    """Profile ids of which the driver says that no further instance can be made now (remaining capacity 0)."""
    trouble: str = ""
    lost: bool = False
    sliced: bool = False
    """Shared by software limits, as the configuration says: its instances are slices, and it has no profiles."""
    backend: str = ""
    """What holds a new slice on it to its memory: `cooperative` or `driver-limit`; empty: nothing can."""
    reserved_mib: int = 0
    """Memory of a shared GPU that its driver keeps for itself."""
    foreign_mib: int = 0
    """Memory of a shared GPU that processes of no slice use."""
    users: tuple[GpuUser, ...] = ()
    """The processes that use a shared GPU's memory, for root only."""

    _aside: ClassVar[frozenset[str]] = frozenset({"users"})

    def profile(self, profile_id: int) -> Profile | None:
        """The profile of that driver id on this GPU."""
        return next((p for p in self.profiles if p.id == profile_id), None)

    def mode_trouble(self) -> str:
        """Why MIG keeps instances from being made on it; empty when it does not."""
        if self.mig_current is None:
            return "this board has no MIG"
        if self.mig_current != self.mig_pending:
            return f"a change of MIG mode to {'on' if self.mig_pending else 'off'} is pending"
        if not self.mig_current:
            return "MIG mode is off"
        return "" if self.profiles else "NVML lists no GPU instance profile for it"

    @property
    def slices(self) -> int:
        """Memory slices of the GPU: the end of its last placement (8 on an H200, 12 on an RTX PRO 6000)."""
        return max((p.start + p.size for q in self.profiles for p in q.placements), default=0)


class Process(Value):
    """A process by pid and start time (clock ticks since boot, /proc/PID/stat field 22); a bare pid proves nothing."""

    pid: int
    start: int


class Owner(Value):
    """Who an instance is for: `slurm:<cluster>:<jobid>`, `jupyter:<uid>:<kernel uuid>` or `manual:<name>`.

    `uid` and `submitted` (Slurm's submit time, seconds) tell two jobs of one id apart: a mismatch is another owner.
    """

    name: str
    uid: int = 0
    submitted: int = 0

    def __str__(self) -> str:
        return self.name


class Request(Value):
    """What an owner asks for: memory, or a profile by name; on named GPUs only, if any are named."""

    memory_mib: int
    """0 when a profile is named."""
    profile: str = ""
    gpus: tuple[str, ...] = ()
    isolation: str = ""
    """`mig`: nothing less than a MIG instance will do; empty: the strongest limit that there is room under."""

    def __str__(self) -> str:
        asked = self.profile or f"{self.memory_mib:,} MiB"
        return f"{asked} (isolation={self.isolation})" if self.isolation else asked


class Stuck(Value):
    """The hardware would not let an instance go; retried with back-off, its slices withheld."""

    since: float
    tries: int
    next_try: float
    """Wall clock seconds, as `since`."""
    holders: tuple[str, ...] = ()
    """`pid 4711 python3 (alice)`, for root only."""


class Record(Value):
    """What the node knows of one owner's instance; `Intent`, `Allocation` and `Release` are its three kinds."""

    _aside: ClassVar[frozenset[str]] = frozenset({"extra"})

    nonce: str
    owner: Owner
    request: Request
    begin: int
    """Start of the hook that asked, nanoseconds since boot (CLOCK_BOOTTIME); tells runs of one job apart."""
    boot_id: str
    gpu_uuid: str
    profile_id: int
    profile_name: str
    memory_mib: int
    placement: Placement
    since: float
    """Wall clock, for display only."""
    witnesses: tuple[Process, ...] = ()
    """Processes whose life is the owner's, where the owner is a process (a kernel and its server)."""
    slice: str = ""
    """What holds a slice to its memory, `cooperative` or `driver-limit`; empty: it is a GPU instance."""
    overhead_mib: int = 0
    """What a slice takes of its GPU beyond what its owner was given."""
    extra: Mapping[str, Any] = _NOTHING
    """Fields a newer version wrote; kept as they are."""


class Intent(Record):
    """Written before anything is made. `gi_id` and `ci` follow as the hardware work goes on."""

    maker: Process = Process(0, 0)
    creating: bool = False
    gi_id: int | None = None
    ci: bool = False
    """A compute instance may be there."""


class Allocation(Record):
    """Given to its owner; the hardware was there when this was written."""

    gi_id: int = -1
    ci_id: int = -1
    mig_uuid: str = ""
    isolation: str = "env"
    lost: bool = False
    """The owner lives, the hardware is gone."""
    variables: tuple[str, ...] = ()
    """What a slice's processes need in their environment besides, as `NAME=value`."""
    over_since: float = 0.0
    """Since when a slice has used more than it was given, wall clock; 0: it does not."""


class Release(Record):
    """Being given back; answers no ask, keeps its place until the hardware is seen to be gone."""

    creating: bool = True
    gi_id: int | None = None
    ci: bool = False
    mig_uuid: str = ""
    """Known when it was an allocation."""
    stuck: Stuck | None = None
    bare_since: float = 0.0
    """When its instance was first seen bare with nobody known to have made it so; 0 = not yet."""


class Fence(Value):
    """A GPU that takes no new work until `unfence` or the next boot."""

    reason: str
    since: float


class Tombstone(Value):
    """An owner's work ended at `begin` (nanoseconds since boot); an ask that began before it gets nothing.

    By name alone: an epilog does not know when its job was submitted, and a later job of the id began later.
    """

    owner: str
    begin: int


class State(Value):
    """Everything the node has recorded, as one file holds it."""

    boot_id: str
    records: tuple[Record, ...] = ()
    tombstones: tuple[Tombstone, ...] = ()
    fences: Mapping[str, Fence] = _NOTHING
    generation: int = 0
    distrusted: bool = False
    """Rebuilt after damage: GPUs that hold instances take no new work until an admin adopts or reclaims them."""
    extra: Mapping[str, Any] = _NOTHING

    def get(self, nonce: str) -> Record | None:
        """The record with that nonce."""
        return next((r for r in self.records if r.nonce == nonce), None)

    def ended(self, owner: Owner) -> int:
        """The newest end of that owner's work, nanoseconds since boot; an ask from before it gets nothing."""
        return max((t.begin for t in self.tombstones if t.owner == owner.name), default=-1)

    def buried(self, owner: Owner, begin: int) -> State:
        """This state with the owner's work ended at `begin`, or later where it already was."""
        others = tuple(t for t in self.tombstones if t.owner != owner.name)
        return replace(self, tombstones=(*others, Tombstone(owner.name, max(begin, self.ended(owner)))))

    def of(self, owner: Owner) -> tuple[Record, ...]:
        """Records of exactly that owner."""
        return tuple(r for r in self.records if r.owner == owner)

    def named(self, owner: Owner) -> tuple[Record, ...]:
        """Records of that owner's name, and of its submit time where it has one."""
        return tuple(
            r for r in self.records if r.owner.name == owner.name and owner.submitted in (0, r.owner.submitted)
        )

    def put(self, record: Record) -> State:
        """This state with `record` in the place of the one of the same nonce, or added."""
        others = tuple(r for r in self.records if r.nonce != record.nonce)
        return replace(self, records=(*others, record))

    def without(self, nonce: str) -> State:
        """This state with the record of that nonce forgotten."""
        return replace(self, records=tuple(r for r in self.records if r.nonce != nonce))


class Settings(Value):
    """A node's configuration after validation; `config.load` makes it, everything else only reads it."""

    state_dir: str
    run_dir: str
    config_path: str = ""
    simulator: str = ""
    """Folder of a simulated node, or empty for the real library."""
    managed: tuple[str, ...] = ()
    """GPU UUIDs or PCI addresses; `*` alone means all; empty means none is touched."""
    allowed: Mapping[str, tuple[str, ...]] = _NOTHING
    """Profile names by GPU model; a model not listed allows every plain profile."""
    placement: str = "least-damage"
    """`least-damage`, `spread` or `binpack`."""
    compute: str = "most"
    """Among profiles of the same memory and slices: `most` or `least` multiprocessors."""
    upsize: bool = False
    reserve_mib: int = 0
    """Memory of each managed GPU that is never given out, MiB."""
    mig_at_boot: bool = False
    bare: str = "destroy"
    """A bare instance under an intent or release: `destroy` it after a grace, or `quarantine` it."""
    bare_grace_s: float = 5.0
    hardware_timeout_s: float = 10.0
    lock_wait_s: float = 30.0
    in_use_wait_s: float = 2.0
    young_s: float = 10.0
    """Records younger than this count as alive."""
    aged_s: float = 300.0
    """A request that has waited longer than this for a place has one kept free for it."""
    admission: str = "count"
    """What keeps Slurm from starting jobs without a place: its `count` alone, or `gates`, features for each size."""
    dcgm_mapping: str = ""
    """The folder of dcgm-exporter's HPC job mapping; empty: it is told nothing."""
    dcgm_whole_gpu: bool = False
    """Whether the mapping has a file of each whole GPU as well."""
    dcgm_sighup: str = ""
    """What gets SIGHUP when instances changed: the exporter's unit or pid file; empty: nothing."""
    slicing: Slicing = Slicing()
    serving: Serving = Serving()

    @property
    def in_use_limit_s(self) -> float:
        """How long one call is repeated while the driver says in use: never so long that it would pass for a hang."""
        return min(self.in_use_wait_s, self.hardware_timeout_s / 4)

    @property
    def manages_any(self) -> bool:
        """Whether any GPU is listed, for MIG or for slices."""
        return bool(self.managed or self.slicing.gpus)

    def manages(self, gpu: Gpu) -> bool:
        """Whether mutating calls may reach this GPU, or slices of it be given out."""
        return self.managed == ("*",) or _named(gpu, self.managed) or self.shares(gpu)

    def shares(self, gpu: Gpu) -> bool:
        """Whether this GPU is shared by slices; a name says more than `*`, and `*` means what has no MIG."""
        if self.slicing.gpus != ("*",) or _named(gpu, self.managed):
            return _named(gpu, self.slicing.gpus)
        return gpu.mig_current is None and not gpu.profiles

    def names_twice(self, gpu: Gpu) -> bool:
        """Whether it is listed for MIG and for slices, by two names of it."""
        return _named(gpu, self.managed) and _named(gpu, self.slicing.gpus)


def _named(gpu: Gpu, names: tuple[str, ...]) -> bool:
    return gpu.uuid in names or gpu.pci_bus_id.lower() in names

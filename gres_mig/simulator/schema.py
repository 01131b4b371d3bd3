"""The shape of the hardware file; the hot path imports it for its types only, for making them takes milliseconds."""

from __future__ import annotations

from typing import TypedDict


class Holder(TypedDict):
    """A process that uses a GPU or an instance; counts only while it lives."""

    pid: int
    start: int
    listed: bool
    """Shows up among the compute processes; a monitoring agent does not (NVIDIA/DCGM#95)."""
    memory_mib: int


class ComputeInstance(TypedDict):
    """Compute slices `start .. start+size-1` of its GPU instance; with it, that is a MIG device."""

    id: int
    profile: int
    start: int
    size: int
    uuid: str
    epoch: int
    holders: list[Holder]


class GpuInstance(TypedDict):
    """Memory slices `start .. start+size-1` of its GPU; `epoch` tells it from any other made at the same place."""

    id: int
    profile: int
    start: int
    size: int
    epoch: int
    holders: list[Holder]
    compute: list[ComputeInstance]


class _Limited(TypedDict, total=False):
    limits: dict[str, int]
    """Bytes that the processes of a cgroup are held to, by its path."""


class Gpu(_Limited):
    """One board in its slot."""

    board: str
    uuid: str
    pci: str
    minor: int
    half_swapped: bool
    """Its halves are exchanged between the placements NVML shows and the physical ids (NVIDIA/DCGM#138)."""
    mig: int
    pending: int
    survives_reboot: bool
    """The MIG mode, not the instances: those never do."""
    lost: str
    """Empty; `all`: not even a handle; `calls`: NVML still tells from its cache which GPU it was."""
    holders: list[Holder]
    instances: list[GpuInstance]


class Fault(TypedDict):
    """A planted fault; `Node.plant` says what the fields mean."""

    id: int
    function: str
    gpu: str
    nth: int
    times: int
    """0: for ever."""
    count: str
    action: str
    code: int
    after: bool
    sticky: bool
    seen: int
    fired: list[int]
    """Pids, in order."""


class Driver(TypedDict):
    """What the loaded driver is."""

    driver: str
    nvml: str
    cuda: int
    gpu_profiles: int
    """The first GPU instance profile enum it does not know."""
    compute_profiles: int
    virtualization: int
    missing: list[str]
    """Symbols this library does not export."""


class Settings(TypedDict):
    """How the node behaves, apart from its hardware."""

    create_s: float
    """Seconds that making a GPU instance takes; only its own GPU is busy meanwhile."""
    destroy_s: float
    compute_s: float
    """Making or destroying a compute instance."""
    permission: str
    """Who may create and destroy: `owner` of the folder and root, `root`, `administrator` (who has CAP_SYS_ADMIN),
    `anyone` or `no-one`."""
    monitor: bool
    """Whether mig/monitor is readable: whole-GPU memory and processes in MIG mode."""
    stale_sessions: bool
    """A session lists the MIG devices there were when it began (NVIDIA/libcudacxx#224)."""
    log: str
    """`off`, `mutating` or `all`."""


class Hardware(TypedDict):
    """Everything in the file."""

    format: int
    generation: int
    boot_id: str
    load: int
    """How often the driver was loaded: the module instance."""
    loaded: bool
    mismatch: bool
    """User space was upgraded, the module not reloaded."""
    epoch: int
    driver: Driver
    settings: Settings
    gpus: list[Gpu]
    faults: list[Fault]

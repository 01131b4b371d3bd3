"""The nouns of GPUs that are shared by software limits; `models` has the rest, and holds these."""

from __future__ import annotations

from gres_mig.values import Value

COOPERATIVE, DRIVER_LIMIT = "cooperative", "driver-limit"
"""What holds a slice to its memory: a library that its own processes load, or the driver."""

SLICE_PROFILE = -1
"""The profile id of every slice; no driver has it."""

MOST_SLICES = 64
"""Of one GPU. A slice has a number below it, as a GPU instance has a place, so that records of two never overlap."""


class Slicing(Value):
    """What the configuration says of GPUs that are shared by slices."""

    gpus: tuple[str, ...] = ()
    """By UUID or PCI address; `*` alone means all that have no MIG."""
    hami_core: str = ""
    """The admin's libvgpu.so, or empty."""
    keep_umask: str = ""
    """The library that keeps libvgpu.so from changing a process's umask, or empty."""
    overhead_mib: int = -1
    """What each slice takes beyond its size; -1: 512 where its limit is cooperative, else 0."""
    reserve_mib: int = -1
    """Memory of each shared GPU that is never given out; -1: 1 GiB or 3 %, whichever is more."""
    driver_limit: bool = False
    """Whether the driver's own limits may be used, which no test on hardware has seen yet."""
    over_grant: str = "warn"
    """What becomes of a slice that uses more than it was given: `warn` or `end`."""
    over_grant_after_s: float = 60.0


class GpuUser(Value):
    """A process with memory on a shared GPU, by pid and start time, and the slice it belongs to."""

    pid: int
    start: int
    memory_mib: int
    slice: str
    """The nonce of the slice's record; empty: of no slice."""

"""What the silicon and its driver allow: places, ids, limits. Pure; refusals are NVML's codes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from . import codes
from .codes import Refused
from .hardware import alive

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .boards import Board, ComputeProfile, GpuProfile
    from .schema import ComputeInstance, Gpu, GpuInstance, Hardware


def new_gpu_instance(board: Board, gpu: Gpu, profile: GpuProfile, start: int | None) -> tuple[int, int]:
    """(id, start) that the driver gives a GPU instance asked for at `start`, or where it likes."""
    if not gpu["instances"] and alive(gpu["holders"]):
        # The first instance turns partitioning on, which needs the GPU idle (kmigmgrSetMIGState; seen on a GH200).
        raise Refused(codes.IN_USE)
    free = free_starts(board, gpu, profile)
    if start is None:
        start = preferred_start(free, profile.size, board.units, _busy(gpu["instances"]), board.hole)
    if start is None or start not in free:
        raise Refused(codes.INSUFFICIENT_RESOURCES)
    return gpu_instance_id(start, profile.size, board.units, gpu["half_swapped"]), start


def free_starts(board: Board, gpu: Gpu, profile: GpuProfile) -> tuple[int, ...]:
    """Where an instance of that profile could begin now; empty when one of its limits is reached."""
    if _headroom(board, gpu["instances"], profile) < 1:
        return ()
    busy = _busy(gpu["instances"])
    return tuple(s for s in profile.starts if busy.isdisjoint(range(s, s + profile.size)))


def remaining(board: Board, gpu: Gpu, profile: GpuProfile) -> int:
    """How many more instances of that profile fit beside what is there."""
    places = _disjoint(free_starts(board, gpu, profile), profile.size)
    return min(places, _headroom(board, gpu["instances"], profile)) if places else 0


def gpu_instance_id(start: int, size: int, units: int, half_swapped: bool) -> int:
    """The physical id ("swizzId": 0 all, 1-2 halves, 3-6 quarters, 7-14 eighths) of a logical placement."""
    if size >= units:
        return 0
    physical = (start + units // 2) % units if half_swapped else start
    if size * 2 >= units:
        return 1 + physical // (units // 2)
    if size * 4 >= units:
        return 3 + physical // (units // 4)
    return 7 + physical // (units // 8)


def preferred_start(
    free: Iterable[int], size: int, units: int, busy: frozenset[int], hole: frozenset[int]
) -> int | None:
    """Where a driver puts an instance nobody placed: best fit over buddy blocks, lowest start on ties.

    Undocumented; this rule reproduces 17 public logs of A100, H100, A30 and RTX PRO 6000.
    """
    costs = ((_block(start, size, units, busy, hole), start) for start in free)
    return min(costs, default=(0, None))[1]


def new_compute_instance(
    board: Board, instance: GpuInstance, profile: ComputeProfile, start: int | None
) -> tuple[int, int]:
    """(id, start) of a compute instance: the lowest free id, and the lowest free start where none is asked for."""
    free = free_compute_starts(board, instance, profile)
    if not free or (start is not None and start not in free):
        raise Refused(codes.INSUFFICIENT_RESOURCES)
    used = {c["id"] for c in instance["compute"]}
    return min(set(range(8)) - used), free[0] if start is None else start


def free_compute_starts(board: Board, instance: GpuInstance, profile: ComputeProfile) -> tuple[int, ...]:
    """Where a compute instance of that profile could begin now in its GPU instance."""
    busy = _busy(instance["compute"])
    starts = profile.starts(board.by_id[instance["profile"]].slices)
    return tuple(s for s in starts if busy.isdisjoint(range(s, s + profile.slices)))


def remaining_compute(board: Board, instance: GpuInstance, profile: ComputeProfile) -> int:
    """How many more compute instances of that profile fit in the GPU instance."""
    return len(free_compute_starts(board, instance, profile))


def mig_uuid(gpu_uuid: str, gi_id: int, ci_id: int) -> str:
    """The same for the same GPU, GPU instance and compute instance id, whenever they are made (gpu_uuid.c); version 5
    as every published one. The mixing is ours: the real one hashes a chip id that no API shows."""
    seed = int(gpu_uuid.removeprefix("GPU-").replace("-", ""), 16)
    mixed = (seed + (gi_id * 8 + ci_id + 1) * 0x9E3779B97F4A7C15F39CC0605CEDC835) & (1 << 128) - 1
    digits = f"{mixed & ~(0xF << 76) & ~(0x3 << 62) | 0x5 << 76 | 0x2 << 62:032x}"
    return f"MIG-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def mig_devices(gpu: Gpu) -> list[tuple[GpuInstance, ComputeInstance]]:
    """The MIG devices in the order of their index, which shifts when another is made or destroyed before them."""
    devices = [(instance, compute) for instance in gpu["instances"] for compute in instance["compute"]]
    return sorted(devices, key=lambda device: (device[0]["id"], device[1]["id"]))


def forget_instances(hardware: Hardware) -> None:
    """A reboot or a driver reload: nobody keeps instances, a new GPU state begins."""
    for gpu in hardware["gpus"]:
        gpu["instances"] = []
        gpu["holders"] = []
        gpu["lost"] = ""
        gpu.pop("limits", None)
        gpu["mig"] = gpu["pending"] = gpu["pending"] if gpu["survives_reboot"] else 0


def _headroom(board: Board, instances: Sequence[GpuInstance], profile: GpuProfile) -> int:
    """How many more of that profile the limits allow that are no matter of place."""
    left = profile.instance_count
    slices = board.compute_slices
    media = list(board.media or ())
    for instance in instances:
        other = board.by_id[instance["profile"]]
        left -= other.id == profile.id
        slices -= other.slices
        # Media engines are dedicated: `+me` and `+me.all` take what only one instance can have.
        media = [free - taken for free, taken in zip(media, other.media, strict=False)]
    left = min(left, slices // profile.slices)
    return min([left, *(free // own for free, own in zip(media, profile.media, strict=False) if own)])


def _busy(instances: Sequence[GpuInstance] | Sequence[ComputeInstance]) -> frozenset[int]:
    return frozenset(slice_ for i in instances for slice_ in range(i["start"], i["start"] + i["size"]))


def _disjoint(starts: Sequence[int], size: int) -> int:
    end, count = -1, 0
    for start in starts:
        if start >= end:
            end, count = start + size, count + 1
    return count


def _block(start: int, size: int, units: int, busy: frozenset[int], hole: frozenset[int]) -> int:
    split = hole.intersection(range(start, start + size))
    if split:
        return size - len(split)
    occupied = busy | hole
    block = size
    while block < units:
        low = start // (2 * block) * (2 * block)
        if not occupied.isdisjoint(range(low, low + 2 * block)):
            break
        block *= 2
    return block

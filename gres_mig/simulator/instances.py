"""The C functions about GPU instances and their profiles."""

from __future__ import annotations

from . import changes, codes, physics
from .boards import KNOWN_PROFILE_IDS, Board, GpuProfile
from .codes import Refused
from .memory import number, pointer, put, put_handle, put_handles, put_places, put_structure, target, versioned
from .session import GPU, GPU_INSTANCE, Function, Session, answers, handle, partitioned

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_GPU_PROFILE_V2 = 0x02000098
_COMPUTE_PROFILE_V2 = 0x02000088
_VGPU_GUEST = 2


def _profile_info(session: Session, device: Any, enum: Any, info: Any) -> None:
    board, profile = _by_enum(session, device, enum)
    _put_profile(target(info), board, profile)


def _profile_info_v(session: Session, device: Any, enum: Any, info: Any) -> None:
    board, profile = _by_enum(session, device, enum)
    _put_profile(versioned(info, _GPU_PROFILE_V2), board, profile)


def _profile_info_by_id_v(session: Session, device: Any, profile_id: Any, info: Any) -> None:
    board = session.board(answers(session.gpu(device)[1]))
    # NOT_FOUND for an id that another chip has (47 on an H200), INVALID_ARGUMENT for one that none has (1, 255).
    profile = _by_id(board, profile_id, codes.NOT_FOUND)
    _put_profile(versioned(info, _GPU_PROFILE_V2), board, profile)


def _placements(session: Session, device: Any, profile_id: Any, array: Any, count: Any) -> None:
    gpu = answers(session.gpu(device)[1])
    profile = _by_id(session.board(gpu), profile_id)
    put_places(array, count, [(start, profile.size) for start in profile.starts])


def _remaining(session: Session, device: Any, profile_id: Any, count: Any) -> None:
    gpu = answers(session.gpu(device)[1])
    board = session.board(gpu)
    put(count, physics.remaining(board, gpu, _by_id(board, profile_id)))


def _create(session: Session, device: Any, profile_id: Any, instance: Any) -> None:
    _create_at(session, device, profile_id, None, instance)


def _create_placed(session: Session, device: Any, profile_id: Any, placement: Any, instance: Any) -> None:
    _create_at(session, device, profile_id, target(placement), instance)


def _create_at(session: Session, device: Any, profile_id: Any, placement: Any, instance: Any) -> None:
    index, gpu = session.gpu(device)
    target(instance)
    if not session.board(answers(gpu)).mig:
        raise Refused(codes.NOT_SUPPORTED)
    session.privileged()
    if session.hardware["driver"]["virtualization"] == _VGPU_GUEST:
        raise Refused(codes.NOT_SUPPORTED)
    partitioned(gpu, codes.NOT_SUPPORTED)
    profile = _by_id(session.board(gpu), profile_id)
    start = None if placement is None else int(placement.start)
    if placement is not None and (start not in profile.starts or placement.size != profile.size):
        raise Refused(codes.INVALID_ARGUMENT)
    made = changes.make_gpu_instance(session.store, index, profile, start)
    put_handle(instance, handle(GPU_INSTANCE, index, made["epoch"]))


def _destroy(session: Session, instance: Any) -> None:
    index, gpu, found = session.gpu_instance(instance)
    answers(gpu)
    session.privileged()
    changes.destroy_gpu_instance(session.store, index, found["epoch"])


def _list(session: Session, device: Any, profile_id: Any, array: Any, count: Any) -> None:
    index, gpu = session.gpu(device)
    profile = _by_id(session.board(answers(gpu)), profile_id)
    if gpu["mig"]:
        session.privileged()
    found = [handle(GPU_INSTANCE, index, i["epoch"]) for i in gpu["instances"] if i["profile"] == profile.id]
    put_handles(array, count, found, profile.instance_count)


def _by_instance_id(session: Session, device: Any, gi_id: Any, instance: Any) -> None:
    index, gpu = session.gpu(device)
    partitioned(gpu, codes.NOT_FOUND)
    session.privileged()
    for each in gpu["instances"]:
        if each["id"] == number(gi_id):
            put_handle(instance, handle(GPU_INSTANCE, index, each["epoch"]))
            return
    raise Refused(codes.NOT_FOUND)


def _info(session: Session, instance: Any, info: Any) -> None:
    index, gpu, found = session.gpu_instance(instance)
    answers(gpu)
    into = target(info)
    into.device = pointer(into.device, handle(GPU, index))
    into.id, into.profileId = found["id"], found["profile"]
    into.placement.start, into.placement.size = found["start"], found["size"]


def _by_enum(session: Session, device: Any, enum: Any) -> tuple[Board, GpuProfile]:
    board = session.board(answers(session.gpu(device)[1]))
    if number(enum) >= session.hardware["driver"]["gpu_profiles"]:
        raise Refused(codes.INVALID_ARGUMENT)
    profile = board.by_enum.get(number(enum))
    if profile is None:
        raise Refused(codes.NOT_SUPPORTED)
    return board, profile


def _by_id(board: Board, profile_id: Any, elsewhere: int = codes.NOT_SUPPORTED) -> GpuProfile:
    profile = board.by_id.get(number(profile_id))
    if profile is None:
        raise Refused(elsewhere if number(profile_id) in KNOWN_PROFILE_IDS else codes.INVALID_ARGUMENT)
    return profile


def _put_profile(into: Any, board: Board, profile: GpuProfile) -> None:
    kind = type(into)
    filled = board.filled.get((kind, profile.id))
    if filled is None:
        # Made once a process: pynvml's structures take microseconds a field.
        filled = board.filled[kind, profile.id] = _profile_structure(kind, profile)
    put_structure(into, filled)


def _profile_structure(kind: Any, profile: GpuProfile) -> Any:
    into = kind()
    into.id, into.isP2pSupported = profile.id, 0
    into.sliceCount, into.instanceCount = profile.slices, profile.instance_count
    into.multiprocessorCount, into.copyEngineCount = profile.multiprocessors, profile.copy_engines
    into.decoderCount, into.encoderCount = profile.decoders, profile.encoders
    into.jpegCount, into.ofaCount = profile.jpeg, profile.ofa
    into.memorySizeMB = profile.memory_mib
    if hasattr(into, "version"):
        # The library clears the whole structure: used again as it is, it is refused (seen on an H200, 580.159.04).
        into.version, into.name = 0, f"MIG {profile.name}".encode()
    return into


SYMBOLS: dict[str, Function] = {
    "nvmlDeviceGetGpuInstanceProfileInfo": _profile_info,
    "nvmlDeviceGetGpuInstanceProfileInfoV": _profile_info_v,
    "nvmlDeviceGetGpuInstanceProfileInfoByIdV": _profile_info_by_id_v,
    "nvmlDeviceGetGpuInstancePossiblePlacements_v2": _placements,
    "nvmlDeviceGetGpuInstanceRemainingCapacity": _remaining,
    "nvmlDeviceCreateGpuInstance": _create,
    "nvmlDeviceCreateGpuInstanceWithPlacement": _create_placed,
    "nvmlGpuInstanceDestroy": _destroy,
    "nvmlDeviceGetGpuInstances": _list,
    "nvmlDeviceGetGpuInstanceById": _by_instance_id,
    "nvmlGpuInstanceGetInfo": _info,
}

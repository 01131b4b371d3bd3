"""The C functions about compute instances, which make a GPU instance a MIG device."""

from __future__ import annotations

from . import changes, codes, physics
from .boards import Board, ComputeProfile, GpuProfile
from .codes import Refused
from .memory import number, pointer, put, put_handle, put_handles, put_places, target, versioned
from .session import COMPUTE_INSTANCE, GPU_INSTANCE, MIG_DEVICE, Function, Session, answers, handle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .schema import GpuInstance

_PROFILE_V2 = 0x02000088


def _profile_info(session: Session, instance: Any, enum: Any, engine: Any, info: Any) -> None:
    _fill(target(info), *_by_enum(session, instance, enum, engine))


def _profile_info_v(session: Session, instance: Any, enum: Any, engine: Any, info: Any) -> None:
    into = versioned(info, _PROFILE_V2)
    profile, compute = _by_enum(session, instance, enum, engine)
    _fill(into, profile, compute)
    into.version, into.name = 0, f"MIG {compute.name}".encode()


def _placements(session: Session, instance: Any, profile_id: Any, array: Any, count: Any) -> None:
    _, gpu, found = session.gpu_instance(instance)
    board = session.board(answers(gpu))
    profile = _by_id(session, board, found, profile_id)
    starts = profile.starts(board.by_id[found["profile"]].slices)
    put_places(array, count, [(start, profile.slices) for start in starts])


def _remaining(session: Session, instance: Any, profile_id: Any, count: Any) -> None:
    _, gpu, found = session.gpu_instance(instance)
    board = session.board(answers(gpu))
    put(count, physics.remaining_compute(board, found, _by_id(session, board, found, profile_id)))


def _create(session: Session, instance: Any, profile_id: Any, compute: Any) -> None:
    _create_at(session, instance, profile_id, None, compute)


def _create_placed(session: Session, instance: Any, profile_id: Any, placement: Any, compute: Any) -> None:
    _create_at(session, instance, profile_id, target(placement), compute)


def _create_at(session: Session, instance: Any, profile_id: Any, placement: Any, compute: Any) -> None:
    index, gpu, found = session.gpu_instance(instance)
    target(compute)
    board = session.board(answers(gpu))
    session.privileged()
    profile = _by_id(session, board, found, profile_id)
    start = None if placement is None else int(placement.start)
    legal = profile.starts(board.by_id[found["profile"]].slices)
    if placement is not None and (start not in legal or placement.size != profile.slices):
        raise Refused(codes.INVALID_ARGUMENT)
    made = changes.make_compute_instance(session.store, index, found["epoch"], profile, start)
    put_handle(compute, handle(COMPUTE_INSTANCE, index, made["epoch"]))


def _destroy(session: Session, compute: Any) -> None:
    index, gpu, _, found = session.compute_instance(compute)
    answers(gpu)
    session.privileged()
    changes.destroy_compute_instance(session.store, index, found["epoch"])


def _list(session: Session, instance: Any, profile_id: Any, array: Any, count: Any) -> None:
    index, gpu, found = session.gpu_instance(instance)
    profile = _by_id(session, session.board(answers(gpu)), found, profile_id)
    session.privileged()
    made = [handle(COMPUTE_INSTANCE, index, c["epoch"]) for c in found["compute"] if c["profile"] == profile.id]
    put_handles(array, count, made, profile.instance_count)


def _by_instance_id(session: Session, instance: Any, ci_id: Any, compute: Any) -> None:
    index, gpu, found = session.gpu_instance(instance)
    answers(gpu)
    session.privileged()
    for each in found["compute"]:
        if each["id"] == number(ci_id):
            put_handle(compute, handle(COMPUTE_INSTANCE, index, each["epoch"]))
            return
    raise Refused(codes.NOT_FOUND)


def _info(session: Session, compute: Any, info: Any) -> None:
    index, gpu, instance, found = session.compute_instance(compute)
    answers(gpu)
    into = target(info)
    into.device = pointer(into.device, handle(MIG_DEVICE, index, found["epoch"]))
    into.gpuInstance = pointer(into.gpuInstance, handle(GPU_INSTANCE, index, instance["epoch"]))
    into.id, into.profileId = found["id"], found["profile"]
    into.placement.start, into.placement.size = found["start"], found["size"]


def _by_enum(session: Session, instance: Any, enum: Any, engine: Any) -> tuple[GpuProfile, ComputeProfile]:
    _, gpu, found = session.gpu_instance(instance)
    board = session.board(answers(gpu))
    if number(engine) != 0:
        raise Refused(codes.INVALID_ARGUMENT)
    return board.by_id[found["profile"]], _by_id(session, board, found, enum)


def _by_id(session: Session, board: Board, instance: GpuInstance, profile_id: Any) -> ComputeProfile:
    if number(profile_id) >= session.hardware["driver"]["compute_profiles"]:
        raise Refused(codes.INVALID_ARGUMENT)
    for profile in board.compute_profiles(board.by_id[instance["profile"]]):
        if profile.id == number(profile_id):
            return profile
    raise Refused(codes.NOT_SUPPORTED)


def _fill(into: Any, profile: GpuProfile, compute: ComputeProfile) -> None:
    into.id, into.sliceCount, into.instanceCount = compute.id, compute.slices, compute.instance_count
    into.multiprocessorCount, into.sharedCopyEngineCount = compute.multiprocessors, profile.copy_engines
    into.sharedDecoderCount, into.sharedEncoderCount = profile.decoders, profile.encoders
    into.sharedJpegCount, into.sharedOfaCount = profile.jpeg, profile.ofa


SYMBOLS: dict[str, Function] = {
    "nvmlGpuInstanceGetComputeInstanceProfileInfo": _profile_info,
    "nvmlGpuInstanceGetComputeInstanceProfileInfoV": _profile_info_v,
    "nvmlGpuInstanceGetComputeInstancePossiblePlacements": _placements,
    "nvmlGpuInstanceGetComputeInstanceRemainingCapacity": _remaining,
    "nvmlGpuInstanceCreateComputeInstance": _create,
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement": _create_placed,
    "nvmlComputeInstanceDestroy": _destroy,
    "nvmlGpuInstanceGetComputeInstances": _list,
    "nvmlGpuInstanceGetComputeInstanceById": _by_instance_id,
    "nvmlComputeInstanceGetInfo_v2": _info,
}

"""The C functions about the system, GPUs and MIG devices."""

from __future__ import annotations

from . import changes, codes, physics
from .codes import Refused
from .memory import address, number, put, put_handle, put_text, target
from .session import GPU, MIG_DEVICE, Device, Function, Session, answers, handle, partitioned

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .schema import ComputeInstance, Gpu

_NO_INSTANCE = 0xFFFFFFFF
_MEMORY_V2 = 0x02000028
_RESETLESS_MIG, _MIG_INDEPENDENT_QUERIES = 184, 199
_UNSIGNED_INT = 1


def _driver_version(session: Session, buffer: Any, size: Any) -> None:
    put_text(buffer, size, session.hardware["driver"]["driver"])


def _nvml_version(session: Session, buffer: Any, size: Any) -> None:
    put_text(buffer, size, session.hardware["driver"]["nvml"])


def _cuda_version(session: Session, version: Any) -> None:
    put(version, session.hardware["driver"]["cuda"])


def _count(session: Session, count: Any) -> None:
    put(count, len(session.hardware["gpus"]))


def _by_index(session: Session, index: Any, device: Any) -> None:
    gpus = session.hardware["gpus"]
    if number(index) >= len(gpus):
        raise Refused(codes.INVALID_ARGUMENT)
    _known(gpus[number(index)])
    put_handle(device, handle(GPU, number(index)))


def _by_uuid(session: Session, uuid: Any, device: Any) -> None:
    text = (getattr(uuid, "value", uuid) or b"").decode(errors="replace")
    for index, gpu in enumerate(session.hardware["gpus"]):
        if gpu["uuid"] == text:
            _known(gpu)
            put_handle(device, handle(GPU, index))
            return
        for instance, compute in physics.mig_devices(gpu):
            # R450 to R460 wrote the second form; later drivers still take it.
            if text in (compute["uuid"], f"MIG-{gpu['uuid']}/{instance['id']}/{compute['id']}"):
                answers(gpu)
                put_handle(device, handle(MIG_DEVICE, index, compute["epoch"]))
                return
    raise Refused(codes.NOT_FOUND)


def _by_pci(session: Session, bus_id: Any, device: Any) -> None:
    text = (getattr(bus_id, "value", bus_id) or b"").decode(errors="replace").lower()
    for index, gpu in enumerate(session.hardware["gpus"]):
        if text in (gpu["pci"].lower(), gpu["pci"][4:].lower(), gpu["pci"][9:].lower()):
            _known(gpu)
            put_handle(device, handle(GPU, index))
            return
    raise Refused(codes.NOT_FOUND)


def _name(session: Session, device: Any, buffer: Any, size: Any) -> None:
    found = session.device(device)
    board = session.board(_known(found.gpu))
    text = board.model
    if found.instance and found.compute:
        profiles = board.compute_profiles(board.by_id[found.instance["profile"]])
        text += next(f" MIG {p.name}" for p in profiles if p.id == found.compute["profile"])
    put_text(buffer, size, text)


def _uuid(session: Session, device: Any, buffer: Any, size: Any) -> None:
    found = session.device(device)
    _known(found.gpu)
    put_text(buffer, size, found.compute["uuid"] if found.compute else found.gpu["uuid"])


def _minor(session: Session, device: Any, minor: Any) -> None:
    put(minor, _known(session.gpu(device)[1])["minor"])


def _index(session: Session, device: Any, index: Any) -> None:
    found = session.device(device)
    _known(found.gpu)
    # A MIG device's index is the one that finds it again on its GPU.
    put(
        index,
        session.mig_handles(found.gpu_index, found.gpu).index(address(device)) if found.compute else found.gpu_index,
    )


def _pci(session: Session, device: Any, info: Any) -> None:
    gpu = _known(session.gpu(device)[1])
    board = session.board(gpu)
    into = target(info)
    into.busId = gpu["pci"].encode()
    into.busIdLegacy = gpu["pci"][4:].encode()
    into.domain, into.bus, into.device = int(gpu["pci"][:8], 16), int(gpu["pci"][9:11], 16), int(gpu["pci"][12:14], 16)
    into.pciDeviceId, into.pciSubSystemId = board.pci_device_id, board.pci_subsystem_id


def _persistence_mode(session: Session, device: Any, mode: Any) -> None:
    answers(session.gpu(device)[1])
    put(mode, 1)


def _virtualization_mode(session: Session, device: Any, mode: Any) -> None:
    answers(session.gpu(device)[1])
    put(mode, session.hardware["driver"]["virtualization"])


def _field_values(session: Session, device: Any, count: Any, values: Any) -> None:
    board = session.board(answers(session.gpu(device)[1]))
    known = {_RESETLESS_MIG: int(board.mig and board.resetless), _MIG_INDEPENDENT_QUERIES: 1}
    array = target(values)
    for index in range(number(count)):
        field = array[index]
        field.nvmlReturn = codes.SUCCESS if field.fieldId in known else codes.NOT_SUPPORTED
        field.valueType = _UNSIGNED_INT
        field.value.uiVal = known.get(field.fieldId, 0)


def _set_mig_mode(session: Session, device: Any, mode: Any, status: Any) -> None:
    index, gpu = session.gpu(device)
    if number(mode) not in (0, 1):
        raise Refused(codes.INVALID_ARGUMENT)
    if not session.board(answers(gpu)).mig:
        raise Refused(codes.NOT_SUPPORTED)
    session.privileged()
    put(status, changes.set_mig_mode(session.store, index, number(mode)))


def _mig_mode(session: Session, device: Any, current: Any, pending: Any) -> None:
    gpu = answers(session.gpu(device)[1])
    if not session.board(gpu).mig:
        raise Refused(codes.NOT_SUPPORTED)
    put(current, gpu["mig"])
    put(pending, gpu["pending"])


def _is_mig_device(session: Session, device: Any, answer: Any) -> None:
    put(answer, int(session.device(device).compute is not None))


def _max_mig_devices(session: Session, device: Any, count: Any) -> None:
    gpu = answers(session.gpu(device)[1])
    put(count, session.board(gpu).max_instances if gpu["mig"] else 0)


def _mig_by_index(session: Session, device: Any, index: Any, mig: Any) -> None:
    gpu_index, gpu = session.gpu(device)
    partitioned(gpu, codes.NOT_FOUND)
    handles = session.mig_handles(gpu_index, gpu)
    if number(index) >= session.board(gpu).max_instances:
        raise Refused(codes.INVALID_ARGUMENT)
    if number(index) >= len(handles):
        raise Refused(codes.NOT_FOUND)
    put_handle(mig, handles[number(index)])


def _parent(session: Session, mig: Any, device: Any) -> None:
    found = session.device(mig)
    _mig(found)
    put_handle(device, handle(GPU, found.gpu_index))


def _gpu_instance_id(session: Session, device: Any, gi_id: Any) -> None:
    found = session.device(device)
    _mig(found)
    put(gi_id, found.instance["id"] if found.instance else 0)


def _compute_instance_id(session: Session, device: Any, ci_id: Any) -> None:
    put(ci_id, _mig(session.device(device))["id"])


def _attributes(session: Session, device: Any, attributes: Any) -> None:
    found = session.device(device)
    if found.instance is None or found.compute is None:
        raise Refused(codes.NOT_SUPPORTED)
    board = session.board(answers(found.gpu))
    profile = board.by_id[found.instance["profile"]]
    compute = next(p for p in board.compute_profiles(profile) if p.id == found.compute["profile"])
    into = target(attributes)
    into.multiprocessorCount = compute.multiprocessors
    into.sharedCopyEngineCount = profile.copy_engines
    into.sharedDecoderCount, into.sharedEncoderCount = profile.decoders, profile.encoders
    into.sharedJpegCount, into.sharedOfaCount = profile.jpeg, profile.ofa
    into.gpuInstanceSliceCount, into.computeInstanceSliceCount = profile.slices, compute.slices
    into.memorySizeMB = profile.memory_mib


def _known(gpu: Gpu) -> Gpu:
    # Which GPU it was NVML may still tell from its cache when the GPU itself is gone.
    if gpu["lost"] == "all":
        raise Refused(codes.GPU_IS_LOST)
    return gpu


def _mig(found: Device) -> ComputeInstance:
    if found.compute is None:
        raise Refused(codes.INVALID_ARGUMENT)
    answers(found.gpu)
    return found.compute


SYMBOLS: dict[str, Function] = {
    "nvmlSystemGetDriverVersion": _driver_version,
    "nvmlSystemGetNVMLVersion": _nvml_version,
    "nvmlSystemGetCudaDriverVersion": _cuda_version,
    "nvmlSystemGetCudaDriverVersion_v2": _cuda_version,
    "nvmlDeviceGetCount_v2": _count,
    "nvmlDeviceGetHandleByIndex_v2": _by_index,
    "nvmlDeviceGetHandleByUUID": _by_uuid,
    "nvmlDeviceGetHandleByPciBusId_v2": _by_pci,
    "nvmlDeviceGetName": _name,
    "nvmlDeviceGetUUID": _uuid,
    "nvmlDeviceGetMinorNumber": _minor,
    "nvmlDeviceGetIndex": _index,
    "nvmlDeviceGetPciInfo_v3": _pci,
    "nvmlDeviceGetPersistenceMode": _persistence_mode,
    "nvmlDeviceGetVirtualizationMode": _virtualization_mode,
    "nvmlDeviceGetFieldValues": _field_values,
    "nvmlDeviceSetMigMode": _set_mig_mode,
    "nvmlDeviceGetMigMode": _mig_mode,
    "nvmlDeviceIsMigDeviceHandle": _is_mig_device,
    "nvmlDeviceGetMaxMigDeviceCount": _max_mig_devices,
    "nvmlDeviceGetMigDeviceHandleByIndex": _mig_by_index,
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": _parent,
    "nvmlDeviceGetGpuInstanceId": _gpu_instance_id,
    "nvmlDeviceGetComputeInstanceId": _compute_instance_id,
    "nvmlDeviceGetAttributes_v2": _attributes,
}

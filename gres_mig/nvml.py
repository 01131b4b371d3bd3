"""The only module that talks to NVML."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from ctypes import byref, c_uint
from types import TracebackType

from gres_mig import log
from gres_mig.errors import NodeFault
from gres_mig.light import pynvml
from gres_mig.models import GPU_VARIANTS, ComputeInstance, Gpu, Instance, Placement, Profile
from gres_mig.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    T = TypeVar("T")

IN_USE = pynvml.NVML_ERROR_IN_USE
INSUFFICIENT_RESOURCES = pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES

REFUSALS = frozenset(
    {
        IN_USE,
        INSUFFICIENT_RESOURCES,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION,
    }
)
"""Answers to a create that mean nothing was made (nvml.h); after any other the hardware has to be looked at."""

_CANNOT_TELL = frozenset(
    {pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
)
_GONE = frozenset({pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT})
_NOTHING: frozenset[int] = frozenset()

_LAST_ENUM = 64
_MOST_INSTANCES = 16


class DriverError(NodeFault):
    """An NVML call failed; `nvml_code` is what it returned."""

    def __init__(self, doing: str, error: pynvml.NVMLError) -> None:
        self.nvml_code: int = error.value
        super().__init__(
            f"{doing}: {error} (NVML code {error.value})",
            hint=_HINTS.get(error.value, ""),
            code="GPULOST" if error.value == pynvml.NVML_ERROR_GPU_IS_LOST else "NVML",
        )


class Refused(DriverError):
    """The driver refused to make a GPU instance, with an answer that means nothing was made."""


_HINTS = {
    pynvml.NVML_ERROR_NO_PERMISSION: "run it as root",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "load the NVIDIA driver, then see: gres-mig doctor",
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "install the NVIDIA driver, then see: gres-mig doctor",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the driver was upgraded under a running system: reboot the node",
    pynvml.NVML_ERROR_GPU_IS_LOST: "reset the GPU or reboot the node",
    pynvml.NVML_ERROR_RESET_REQUIRED: "reset the GPU or reboot the node",
}


class Session:
    """One NVML session, open between `with` and its end only: an open session alone can keep an instance in use.

    Handles are good for one session; a look in a new one is the truth after another process changed a GPU.
    """

    def __init__(self, simulator: str = "", watch: Callable[[str], None] = lambda where: None) -> None:
        """`watch` hears which GPU is read next: `GPU 3` until its UUID is known, then that."""
        if simulator:
            from gres_mig import simulator as simulated

            simulated.install(simulator)
        self._watch = watch
        self._handles: dict[str, Any] = {}
        self._compute_profiles: dict[tuple[str, int], list[Any]] = {}
        self._slices: dict[tuple[str, int], int] = {}

    def __enter__(self) -> Session:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        if not hasattr(pynvml, "_nvmlGetFunctionPointer"):
            raise NodeFault(
                f"the module pynvml at {pynvml.__file__} is not NVIDIA's",
                hint="run: pip uninstall pynvml && pip install --force-reinstall nvidia-ml-py",
            )
        _call("opening an NVML session", pynvml.nvmlInit)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError as failed:
            # An operation that is over stays over; one that failed has a better reason to tell.
            log.warning("closing the NVML session: %s (NVML code %d)", failed, failed.value)

    def versions(self) -> tuple[str, str]:
        """Driver and NVML version."""
        driver = _call("reading the driver version", pynvml.nvmlSystemGetDriverVersion)
        return driver, _call("reading the NVML version", pynvml.nvmlSystemGetNVMLVersion)

    def gpus(self, wanted: Callable[[Gpu], bool], reading: Callable[[Gpu], str] = lambda gpu: "") -> tuple[Gpu, ...]:
        """Physical GPUs that are wanted, in NVML's order, with profiles and instances.

        `wanted` sees identity only. `reading` hears which GPU comes next and may answer why it is to be left alone.
        A GPU that fails its look is there with `trouble`; it does not hide the others.
        """
        found = []
        for index in range(_call("counting GPUs", pynvml.nvmlDeviceGetCount)):
            gpu = self._identity(index)
            if not wanted(gpu):
                continue
            if why_not := gpu.trouble or reading(gpu):
                found.append(replace(gpu, trouble=why_not))
                continue
            try:
                found.append(self._deep(gpu))
            except NodeFault as error:
                found.append(replace(gpu, trouble=error.message, lost=error.code == "GPULOST"))
        return tuple(found)

    def gpu(self, uuid: str) -> Gpu:
        """That GPU as it is now; `NodeFault` when it is gone or not all of it can be read.

        Half a look is none: an instance that was not seen would count as gone.
        """
        unknown = ""
        for index in range(_call("counting GPUs", pynvml.nvmlDeviceGetCount)):
            gpu = self._identity(index)
            if gpu.uuid == uuid and not gpu.trouble:
                return self._deep(gpu)
            unknown = unknown or gpu.trouble
        hint = "reset the GPU or reboot the node" if unknown else "see: gres-mig doctor"
        raise NodeFault(f"{uuid} is not seen on this node any more; {unknown}".rstrip("; "), hint=hint, code="GPULOST")

    def refresh(self, gpu: Gpu) -> Gpu:
        """That GPU of this session with its instances as they are now."""
        return replace(gpu, instances=tuple(self._instances(gpu, self._handles[gpu.uuid])))

    def create_gpu_instance(self, gpu: Gpu, profile_id: int, placement: Placement) -> Instance:
        """Make a GPU instance at exactly that place; the driver's own choice of place fragments a GPU."""
        doing = f"creating a GPU instance of profile {profile_id} at {placement} on {gpu.uuid}"
        place = pynvml.c_nvmlGpuInstancePlacement_t(placement.start, placement.size)
        # By reference: the struct by value ends the process with SIGSEGV (nvidia-ml-py 13.615.71).
        create = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement
        try:
            handle = create(self._handles[gpu.uuid], profile_id, byref(place))
        except pynvml.NVMLError as error:
            raise (Refused if error.value in REFUSALS else DriverError)(doing, error) from error
        info = _call(f"{doing}: reading it back", pynvml.nvmlGpuInstanceGetInfo, handle)
        return self._instance(gpu.uuid, handle, info)

    def create_compute_instance(self, instance: Instance) -> ComputeInstance:
        """Make the compute instance that takes the whole GPU instance; it has the MIG device's UUID."""
        doing = f"creating the compute instance of GPU instance {instance.id} of {instance.gpu_uuid}"
        profile_id = self._whole_compute_profile(instance, doing)
        handle = _call(doing, pynvml.nvmlGpuInstanceCreateComputeInstance, instance.handle, profile_id)
        info = _call(f"{doing}: reading it back", pynvml.nvmlComputeInstanceGetInfo, handle)
        return _compute_instance(doing, handle, info)

    def destroy_compute_instance(self, instance: Instance, compute: ComputeInstance) -> None:
        """Ask the driver to destroy it, by the handle of the look that found it; only a look shows whether it did."""
        doing = f"destroying compute instance {compute.id} of GPU instance {instance.id} of {instance.gpu_uuid}"
        _call(doing, pynvml.nvmlComputeInstanceDestroy, compute.handle)

    def destroy_gpu_instance(self, instance: Instance) -> None:
        """Ask the driver to destroy it; it refuses while a compute instance or a client is there."""
        doing = f"destroying GPU instance {instance.id} of {instance.gpu_uuid}"
        _call(doing, pynvml.nvmlGpuInstanceDestroy, instance.handle)

    def set_mig_mode(self, gpu: Gpu, on: bool) -> int:
        """Ask for a MIG mode; returns the activation status, an NVML code that is not raised: 0 means in force."""
        doing = f"turning MIG {'on' if on else 'off'} on {gpu.uuid}"
        return int(_call(doing, pynvml.nvmlDeviceSetMigMode, self._handles[gpu.uuid], int(on)))

    def users(self, instance: Instance) -> tuple[int, ...]:
        """Pids that NVML lists on the MIG devices of an instance; monitoring clients are not among them."""
        pids: set[int] = set()
        for compute in instance.compute_instances:
            doing = f"listing processes on {compute.mig_uuid}"
            info = _unless(_CANNOT_TELL, doing, pynvml.nvmlComputeInstanceGetInfo, compute.handle)
            if info is not None:
                listing = pynvml.nvmlDeviceGetComputeRunningProcesses
                pids |= {p.pid for p in _unless(_CANNOT_TELL, doing, listing, info.device) or ()}
        return tuple(sorted(pids))

    def used_mib(self, mig_uuid: str) -> int:
        """How much of a MIG device's memory is in use; the driver tells it to whoever may use the device."""
        doing = f"reading the memory of {mig_uuid}"
        device = _call(doing, pynvml.nvmlDeviceGetHandleByUUID, mig_uuid)
        return int(_call(doing, pynvml.nvmlDeviceGetMemoryInfo, device).used) >> 20

    def gpu_users(self, gpu: Gpu) -> tuple[int, ...]:
        """Pids that NVML lists on the whole GPU."""
        pids: set[int] = set()
        for listing in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
            doing = f"listing processes on {gpu.uuid}"
            pids |= {p.pid for p in _unless(_CANNOT_TELL, doing, listing, self._handles[gpu.uuid]) or ()}
        return tuple(sorted(pids))

    def _identity(self, index: int) -> Gpu:
        self._watch(f"GPU {index}")
        gpu = Gpu("", index, -1, "", "", 0, None, None)
        try:
            handle = _call(f"opening GPU {index}", pynvml.nvmlDeviceGetHandleByIndex, index)
            gpu = replace(gpu, uuid=_call(f"reading the UUID of GPU {index}", pynvml.nvmlDeviceGetUUID, handle))
            self._handles[gpu.uuid] = handle
            pci = _call(f"reading the PCI address of {gpu.uuid}", pynvml.nvmlDeviceGetPciInfo, handle).busId
            gpu = replace(gpu, pci_bus_id=pci if isinstance(pci, str) else pci.decode())
            minor = _call(f"reading the minor number of {gpu.uuid}", pynvml.nvmlDeviceGetMinorNumber, handle)
            model = _call(f"reading the name of {gpu.uuid}", pynvml.nvmlDeviceGetName, handle)
            return replace(gpu, minor=minor, model=model)
        except DriverError as error:
            return replace(gpu, trouble=error.message, lost=error.code == "GPULOST")

    def _deep(self, gpu: Gpu) -> Gpu:
        self._watch(gpu.uuid)
        handle = self._handles[gpu.uuid]
        profiles = tuple(_profiles(handle))
        self._slices.update({(gpu.uuid, p.id): p.compute_slices for p in profiles})
        mode = _mig_mode(handle, profiles)
        gpu = replace(
            gpu,
            memory_mib=_memory_mib(handle, profiles),
            mig_current=mode and bool(mode[0]),
            mig_pending=mode and bool(mode[1]),
            profiles=profiles,
        )
        if gpu.mig_current:
            instances = tuple(self._instances(gpu, handle))
            full = frozenset(p.id for p in profiles if _remaining(handle, p.id) == 0)
            gpu = replace(gpu, instances=instances, full_profiles=full)
        return replace(gpu, trouble=gpu.mode_trouble())

    def _instances(self, gpu: Gpu, handle: Any) -> Iterator[Instance]:
        # By GPU instance, not by MIG device: one that a crash left without a compute instance is no MIG device,
        # yet holds its slices.
        for profile in gpu.profiles:
            doing = f"listing GPU instances of {profile.name} on {gpu.uuid}"
            # More room than instanceCount says: it is off by one on an A30 (mig-parted issue 157).
            room = (pynvml.c_nvmlGpuInstance_t * max(_MOST_INSTANCES, profile.instance_count))()
            listing, reading = pynvml.nvmlDeviceGetGpuInstances, pynvml.nvmlGpuInstanceGetInfo
            for found, info in _listed(doing, listing, (handle, profile.id, room), reading):
                yield self._instance(gpu.uuid, found, info)

    def _instance(self, gpu_uuid: str, handle: Any, info: Any) -> Instance:
        instance = Instance(
            gpu_uuid, info.id, info.profileId, Placement(info.placement.start, info.placement.size), handle=handle
        )
        return replace(instance, compute_instances=tuple(self._compute_instances(instance)))

    def _compute_instances(self, instance: Instance) -> Iterator[ComputeInstance]:
        doing = f"listing compute instances of GPU instance {instance.id} of {instance.gpu_uuid}"
        for profile in self._compute_profiles_of(instance, doing):
            room = (pynvml.c_nvmlComputeInstance_t * max(_MOST_INSTANCES, profile.instanceCount))()
            listing, reading = pynvml.nvmlGpuInstanceGetComputeInstances, pynvml.nvmlComputeInstanceGetInfo
            for found, info in _listed(doing, listing, (instance.handle, profile.id, room), reading):
                yield _compute_instance(doing, found, info)

    def _whole_compute_profile(self, instance: Instance, doing: str) -> int:
        # The first of two that are as large: the other may not be makeable here (7_SLICE_NVL on an A100).
        return int(max(self._compute_profiles_of(instance, doing), key=lambda profile: profile.sliceCount).id)

    def _compute_profiles_of(self, instance: Instance, doing: str) -> list[Any]:
        key = (instance.gpu_uuid, instance.profile_id)
        if key not in self._compute_profiles:
            found = list(_compute_profiles(instance.handle, doing))
            if max((p.sliceCount for p in found), default=0) < self._slices.get(key, 0):
                # None that fills it, and there always is one: part of the list was refused, and an instance whose
                # compute instance is not seen would pass for a bare one. What is answered twice is believed.
                found = list(_compute_profiles(instance.handle, doing))
            if not found:
                raise NodeFault(f"{doing}: NVML lists no compute instance profile for it")
            self._compute_profiles[key] = found
        return self._compute_profiles[key]


def _call(doing: str, function: Callable[..., T], *arguments: Any) -> T:
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        raise DriverError(doing, error) from error


def _unless(codes: frozenset[int], doing: str, function: Callable[..., T], *arguments: Any) -> T | None:
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        if error.value in codes:
            return None
        raise DriverError(doing, error) from error


def _listed(
    doing: str, listing: Callable[..., Any], arguments: tuple[Any, Any, Any], reading: Callable[[Any], Any]
) -> list[tuple[Any, Any]]:
    """The handles of a list with what is read of each; one that went away since the list was made is not there."""
    *whose, room = arguments
    for unread in (_GONE, _NOTHING):
        count = c_uint(len(room))
        _call(doing, listing, *whose, room, byref(count))
        found = [(room[n], _unless(unread, doing, reading, room[n])) for n in range(count.value)]
        if all(info for _, info in found):
            return found
        # What is still listed and still cannot be read is not gone: to take it for that would be to forget it.
    raise AssertionError


def _profiles(handle: Any) -> Iterator[Profile]:
    # Not up to the binding's COUNT: an old binding would hide the newer profiles. The library answers
    # NOT_SUPPORTED for one the chip lacks, INVALID_ARGUMENT past its own last one (H200, driver 580.159).
    plain: list[Profile] = []
    unknown: list[Profile] = []
    for enum in itertools.count():
        if enum > _LAST_ENUM:
            raise NodeFault(f"NVML answers for profile {enum} and beyond; its list has no end")
        try:
            info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, enum, version=2)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED:
                continue
            if error.value == pynvml.NVML_ERROR_INVALID_ARGUMENT:
                break
            raise DriverError(f"reading GPU instance profile {enum}", error) from error
        name = info.name.decode() if isinstance(info.name, bytes) else str(info.name)
        profile = Profile(
            id=info.id,
            name=name.removeprefix("MIG ") or f"profile-{info.id}",
            memory_mib=int(info.memorySizeMB),
            compute_slices=info.sliceCount,
            multiprocessors=info.multiprocessorCount,
            instance_count=info.instanceCount,
            placements=_placements(handle, info.id),
            variant=enum in GPU_VARIANTS,
        )
        (plain if enum <= max(GPU_VARIANTS) else unknown).append(profile)
    yield from plain
    for profile in unknown:
        # A kind of profile this code does not know: plain only where no known one has its size.
        twin = any((p.memory_mib, p.compute_slices) == (profile.memory_mib, profile.compute_slices) for p in plain)
        yield replace(profile, variant=twin)


def _placements(handle: Any, profile_id: int) -> tuple[Placement, ...]:
    doing = f"listing the placements of profile {profile_id}"
    count = c_uint(0)
    _call(doing, pynvml.nvmlDeviceGetGpuInstancePossiblePlacements, handle, profile_id, None, byref(count))
    found = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    if count.value:
        _call(doing, pynvml.nvmlDeviceGetGpuInstancePossiblePlacements, handle, profile_id, found, byref(count))
    return tuple(Placement(found[n].start, found[n].size) for n in range(count.value))


def _mig_mode(handle: Any, profiles: tuple[Profile, ...]) -> tuple[int, int] | None:
    # A board that has profiles has MIG; taken for one without, its instances would count as gone.
    mode = _unless(_NOTHING if profiles else _CANNOT_TELL, "reading the MIG mode", pynvml.nvmlDeviceGetMigMode, handle)
    return (mode[0], mode[1]) if mode else None


def _memory_mib(handle: Any, profiles: tuple[Profile, ...]) -> int:
    memory = _unless(_CANNOT_TELL, "reading the memory size", pynvml.nvmlDeviceGetMemoryInfo, handle)
    # Refused on a GPU in MIG mode without the mig/monitor capability: the largest profile is the best bound.
    return int(memory.total) >> 20 if memory else max((p.memory_mib for p in profiles), default=0)


def _remaining(handle: Any, profile_id: int) -> int | None:
    doing = f"reading how many of profile {profile_id} still fit"
    return _unless(_CANNOT_TELL, doing, pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity, handle, profile_id)


def _compute_profiles(handle: Any, doing: str) -> Iterator[Any]:
    for enum in itertools.count():
        if enum > _LAST_ENUM:
            raise NodeFault(f"{doing}: NVML answers for compute profile {enum} and beyond; its list has no end")
        try:
            yield pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(
                handle, enum, pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
            )
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED:
                continue
            if error.value == pynvml.NVML_ERROR_INVALID_ARGUMENT:
                return
            raise DriverError(doing, error) from error


def _compute_instance(doing: str, handle: Any, info: Any) -> ComputeInstance:
    return ComputeInstance(info.id, _call(doing, pynvml.nvmlDeviceGetUUID, info.device), handle)

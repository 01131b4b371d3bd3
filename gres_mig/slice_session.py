"""NVML, and on GPUs that are shared by slices the folders that stand for those: so one protocol serves both.

A slice is made, looked at and destroyed in the steps of a GPU instance. Its folder below `slices` in the run folder is
the instance: what it takes of which GPU is in its name. The folder inside is the compute instance. Both are root's: the
owner has one file there, and no tree that root would have to walk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from gres_mig import machine, nvml_memory, slice_driver, slice_hami, slice_users
from gres_mig.errors import Busy, NodeFault
from gres_mig.models import ComputeInstance, Gpu, Instance, Placement, Record, Settings
from gres_mig.nvml import Session
from gres_mig.slice_models import COOPERATIVE, DRIVER_LIMIT, SLICE_PROFILE
from gres_mig.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gres_mig.slice_models import GpuUser

_OWN, _CACHE, _CGROUP = "own", "cache", "cgroup"
_CACHE_VARIABLE = "CUDA_DEVICE_MEMORY_SHARED_CACHE"
_NOBODY = 65534


class SliceSession(Session):
    """A session of NVML; `record` is the one whose slice is to be made, `records` are those there are."""

    def __init__(
        self,
        settings: Settings,
        watch: Callable[[str], None] = lambda where: None,
        records: Sequence[Record] = (),
        record: Record | None = None,
    ) -> None:
        super().__init__(settings.simulator, watch)
        self._settings, self._records, self._record = settings, records, record

    def refresh(self, gpu: Gpu) -> Gpu:
        """That GPU with its instances as they are now."""
        return replace(gpu, instances=tuple(self._there(gpu.uuid))) if gpu.sliced else super().refresh(gpu)

    def create_gpu_instance(self, gpu: Gpu, profile_id: int, placement: Placement) -> Instance:
        """Make it; a slice's folder is there at once or not at all."""
        if not gpu.sliced:
            return super().create_gpu_instance(gpu, profile_id, placement)
        assert self._record is not None
        if gpu.trouble:
            raise NodeFault(f"making a slice of {gpu.uuid}: {gpu.trouble}", code="SLICE")
        record, takes_mib = self._record, self._record.memory_mib + self._record.overhead_mib
        path = os.path.join(self._folder, f"{gpu.uuid}.{placement.start}.{takes_mib}.{record.nonce}")
        try:
            self._make_folders()
            _make(path, 0o711)
        except OSError as error:
            raise NodeFault(f"making {error.filename}: {error.strerror}", code="STATE") from error
        return Instance(gpu.uuid, placement.start, SLICE_PROFILE, placement, handle=path, memory_mib=takes_mib)

    def create_compute_instance(self, instance: Instance) -> ComputeInstance:
        """Make it; a slice's limit is in force after that, and proved to be."""
        if instance.profile_id != SLICE_PROFILE:
            return super().create_compute_instance(instance)
        assert self._record is not None
        record, path = self._record, str(instance.handle)
        own = os.path.join(path, _OWN)
        if record.slice == DRIVER_LIMIT and record.owner.name.startswith("jupyter:"):
            # A limit on a cgroup without processes holds nobody.
            raise NodeFault(f"nothing puts the processes of {record.owner} into a cgroup that is limited", code="SLICE")
        try:
            if record.slice == DRIVER_LIMIT:
                cgroup = slice_driver.cgroup(self._settings.simulator or "/", record.owner)
                # Before the limit is set, so that whoever finds the folder knows where it may be.
                os.symlink(cgroup, os.path.join(path, _CGROUP))
                slice_driver.limit(self._handles[instance.gpu_uuid], cgroup, record.memory_mib)
                more: tuple[str, ...] = (f"GRES_MIG_CGROUP={cgroup}",)
            else:
                more = slice_hami.variables(self._settings.slicing, own, record.memory_mib)
            _make(own, 0o711)
            if record.slice == COOPERATIVE:
                _give(os.path.join(own, _CACHE), record.owner.uid)
        except OSError as error:
            raise NodeFault(f"making {error.filename}: {error.strerror}", code="STATE") from error
        variables = (*more, f"{slice_users.VARIABLE}={record.nonce}")
        if record.slice == COOPERATIVE:
            self._prove(instance.gpu_uuid, variables, record)
        return ComputeInstance(0, instance.gpu_uuid, own, variables)

    def destroy_compute_instance(self, instance: Instance, compute: ComputeInstance) -> None:
        """Destroy it; a slice with memory in use says so, as the driver does of an instance."""
        if instance.profile_id != SLICE_PROFILE:
            return super().destroy_compute_instance(instance, compute)
        if self.users(instance):
            raise nvml_memory.in_use(f"ending slice {instance.id} of {instance.gpu_uuid}")
        return _remove(str(compute.handle))

    def destroy_gpu_instance(self, instance: Instance) -> None:
        """Destroy it; of a slice the driver's limit goes first."""
        if instance.profile_id != SLICE_PROFILE:
            return super().destroy_gpu_instance(instance)
        path = str(instance.handle)
        try:
            cgroup = os.readlink(os.path.join(path, _CGROUP))
        except OSError:
            # It has no limit of the driver's.
            pass
        else:
            slice_driver.lift(self._handles[instance.gpu_uuid], cgroup)
        return _remove(path)

    def users(self, instance: Instance) -> tuple[int, ...]:
        """Pids that NVML lists; of a slice those on its GPU that belong to it."""
        if instance.profile_id != SLICE_PROFILE:
            return super().users(instance)
        nonce = str(instance.handle).rpartition(".")[2]
        return tuple(user.pid for user in self._users(instance.gpu_uuid) if user.slice == nonce)

    def _deep(self, gpu: Gpu) -> Gpu:
        gpu = super()._deep(gpu)
        if self._settings.names_twice(gpu):
            return replace(gpu, trouble="it is named both in gpus and in slices; take it out of one")
        if not self._settings.shares(gpu):
            return gpu
        handle = self._handles[gpu.uuid]
        backend, why_not = self._backend()
        users = self._users(gpu.uuid)
        return replace(
            gpu,
            sliced=True,
            profiles=(),
            full_profiles=frozenset(),
            instances=tuple(self._there(gpu.uuid)),
            trouble="its MIG mode is on, and it is to be shared by slices" if gpu.mig_current else why_not,
            backend=backend,
            reserved_mib=nvml_memory.reserved_mib(handle, gpu.uuid),
            foreign_mib=sum(user.memory_mib for user in users if not user.slice),
            users=users,
        )

    def _backend(self) -> tuple[str, str]:
        """What limits a new slice, the strongest first; else why nothing does."""
        slicing, root = self._settings.slicing, self._settings.simulator
        off = "" if slicing.driver_limit else "experimental_driver_limit is off"
        no_driver = off or slice_driver.flaw(root or "/")
        if not no_driver:
            return DRIVER_LIMIT, ""
        no_hami = slice_hami.flaw(slicing, simulated=bool(root))
        if not no_hami:
            return COOPERATIVE, ""
        return "", f"nothing limits slices: {no_hami}, and {no_driver}"

    def _users(self, gpu_uuid: str) -> tuple[GpuUser, ...]:
        nonces = {str(instance.handle).rpartition(".")[2] for instance in self._there(gpu_uuid)}
        # Of this GPU alone: who has a slice of another and uses this one is a stranger here.
        records = [record for record in self._records if record.gpu_uuid == gpu_uuid]
        return slice_users.users(nvml_memory.used_mib(self._handles[gpu_uuid], gpu_uuid), records, nonces)

    def _there(self, gpu_uuid: str) -> Iterator[Instance]:
        for path in _entries(self._folder):
            name, *figures = os.path.basename(path).split(".")
            if name != gpu_uuid or len(figures) != 3 or not (figures[0].isdigit() and figures[1].isdigit()):
                continue
            number, takes_mib = int(figures[0]), int(figures[1])
            own = os.path.join(path, _OWN)
            computes = (ComputeInstance(0, gpu_uuid, own),) if os.path.isdir(own) else ()
            place = Placement(number, 1)
            yield Instance(gpu_uuid, number, SLICE_PROFILE, place, computes, handle=path, memory_mib=takes_mib)

    @cached_property
    def _folder(self) -> str:
        # Of this boot alone: no slice outlives it, should the run folder do.
        return os.path.join(self._settings.run_dir, "slices", machine.boot_id(self._settings.simulator)[:8])

    def _make_folders(self) -> None:
        if os.path.exists(run_dir := self._settings.run_dir) and os.stat(run_dir).st_uid not in (0, os.geteuid()):
            # Whoever has it could lead root to another folder, whose content would go.
            raise NodeFault(f"{run_dir} is another user's; he makes slices in it, or nobody does", code="SLICE")
        if os.path.isdir(self._folder):
            return
        above = os.path.dirname(self._folder)
        for old in _entries(above):
            # Unless somebody who makes a slice of another GPU has made it meanwhile.
            if old != self._folder:
                _remove(old)
        # An owner may go through them to his own folder, and nobody but root can list what is there.
        _make(above, 0o711)
        _make(self._folder, 0o711)

    def _prove(self, gpu_uuid: str, variables: tuple[str, ...], record: Record) -> None:
        environment = {"CUDA_VISIBLE_DEVICES": gpu_uuid, **dict(line.split("=", 1) for line in variables)}
        # Half of it: past the whole the GPU would pass for one that hangs.
        limit_s = self._settings.hardware_timeout_s / 2
        cache, uid = environment[_CACHE_VARIABLE], record.owner.uid
        try:
            slice_hami.prove(environment, record.memory_mib, uid, limit_s)
        except NodeFault as error:
            if os.geteuid() != 0 or uid in (0, _NOBODY):
                raise
            # What runs as its owner he can end, stop and change (`pkill -u alice`), and the node is not at fault then;
            # as nobody it is out of his reach.
            apart = f"{cache}.{_NOBODY}"
            _give(apart, _NOBODY)
            slice_hami.prove({**environment, _CACHE_VARIABLE: apart}, record.memory_mib, _NOBODY, limit_s / 2)
            raise Busy(f"{error.message}; as uid {_NOBODY} it works", hint="ask again") from error
        try:
            # Anew for the job's first process: a dead process's slot in it would upset the count (HAMi-core 8f3a89c
            # loses a live process's when it clears a dead one's).
            os.unlink(cache)
            _give(cache, record.owner.uid)
        except OSError as error:
            raise NodeFault(f"making {cache}: {error.strerror}", code="STATE") from error


def _make(path: str, mode: int) -> None:
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return
    os.chmod(path, mode)


def _give(path: str, uid: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchown(descriptor, uid, -1)
    finally:
        os.close(descriptor)


def _entries(folder: str) -> list[str]:
    try:
        return sorted(os.path.join(folder, name) for name in os.listdir(folder))
    except OSError:
        # None was made since the boot, or whoever looks may not list them.
        return []


def _remove(path: str) -> None:
    import shutil

    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise NodeFault(f"removing {path}: {error.strerror}", code="STATE") from error

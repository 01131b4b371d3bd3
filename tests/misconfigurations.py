"""A node on which everything is as it should be, and one thing at a time that is not; each is told in a few words.

A node is a folder: a simulated one, whose folder stands for `/` as well, so that units, processes, CDI files and
Slurm's configuration lie where they would on a machine.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gres_mig import config_text, machine, simulator
from gres_mig.allocator import Allocator
from gres_mig.commands import boot_unit
from gres_mig.models import Owner, Request
from gres_mig.simulator.codes import INVALID_ARGUMENT, NOT_SUPPORTED
from gres_mig.slice_models import Slicing
from gres_mig.state import Store
from gres_mig.values import replace

BOARDS = [("rtx-pro-6000", 4), ("l40", 1)]
"""The first two GPUs are Slurm's as a whole, the next two are managed, the last has no MIG."""

_UNITS = {
    "nvidia-persistenced.service": "[Unit]\nDescription=NVIDIA Persistence Daemon\n",
    "nvidia-fabricmanager.service": "[Unit]\nDescription=NVIDIA fabric manager\n",
    "nvidia-dcgm.service": "[Unit]\nDescription=NVIDIA DCGM\n",
    "nvidia-cdi-refresh.service": "[Unit]\nDescription=Refresh of the CDI files\n",
    "slurmd.service": "[Unit]\nDescription=Slurm node daemon\nAfter=munge.service network-online.target\n",
}
_CDI = '{"kind": "nvidia.com/gpu", "devices": [{"name": "GPU-0", "containerEdits": {}}]}\n'
_SLURM_CONF = """\
ClusterName=c
GresTypes=gpu
TaskPlugin=task/cgroup,task/affinity
NodeName=n1 NodeHostname={host} Gres=gpu:rtx:2 CPUs=8
"""
_GRES_CONF = "NodeName=n1 AutoDetect=off\nNodeName=n1 Name=gpu Type=rtx File=/dev/nvidia[0-1]\n"
_SOME_MIG_DEVICE = "MIG-11111111-2222-5333-8444-555555555555"


class Place:
    """The good node, to be made worse."""

    def __init__(self, folder: Path) -> None:
        simulator.create(folder, BOARDS)
        self.folder, self.node = folder, simulator.Node(folder)
        settings = config_text.write_node_config(folder, self.node.uuids[2:4])
        self.settings = replace(settings, in_use_wait_s=0.0, dcgm_mapping=str(folder / "run" / "mapping"))
        self.configure()
        driver = self.node.hardware()["driver"]["driver"]
        self.write("sys/module/nvidia/version", f"{driver}\n")
        for name, text in _UNITS.items():
            self.write(f"usr/lib/systemd/system/{name}", text)
            self.enable(name)
        self.write(f"etc/systemd/system/{boot_unit.NAME}", boot_unit.render())
        self.enable(boot_unit.NAME)
        self.runs(900, "/usr/bin/nv-hostengine", "-n")
        self.runs(901, "/usr/bin/dcgm-exporter", f"--hpc-job-mapping-dir={self.settings.dcgm_mapping}")
        self.runs(902, "/usr/bin/nvidia-persistenced", "--user", "nvidia-persistenced")
        # A user may have MPS in his job.
        self.runs(903, "nvidia-cuda-mps-control", "-d", uid=1000)
        self.write("run/cdi/nvidia.yaml", _CDI)
        self.write("etc/slurm/slurm.conf", _SLURM_CONF.format(host=socket.gethostname()))
        self.write("etc/slurm/gres.conf", _GRES_CONF)
        self.write("etc/slurm/cgroup.conf", "ConstrainDevices=yes\n")

    @property
    def slurm_conf(self) -> str:
        return str(self.folder / "etc/slurm/slurm.conf")

    def write(self, name: str, text: str = "") -> Path:
        """A file below `/`."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def enable(self, unit: str) -> None:
        """Have a unit start at boot."""
        self.write(f"etc/systemd/system/multi-user.target.wants/{unit}")

    def disable(self, unit: str) -> None:
        """Have it start no more."""
        (self.folder / f"etc/systemd/system/multi-user.target.wants/{unit}").unlink()

    def runs(self, pid: int, *command: str, uid: int = 0) -> None:
        """A process of the node."""
        self.write(f"proc/{pid}/cmdline", "\0".join((*command, "")))
        self.write(f"proc/{pid}/status", f"Name:\tsomething\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
        self.write(f"proc/{pid}/cgroup", "0::/system.slice/something.service\n")

    def configure(self, **changes: Any) -> None:
        """Change the configuration."""
        self.settings = replace(self.settings, **changes)
        config_text.write(self.settings)

    def edit(self, name: str, old: str, new: str) -> None:
        """Change a file that is there."""
        path = self.folder / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def allocator(self) -> Allocator:
        boot_id = machine.boot_id(self.settings.simulator)
        return Allocator(self.settings, Store(self.settings, boot_id), boot_id)

    def allocate(self, *names: str) -> list[int]:
        """Instances for these owners; their ids."""
        return [self.allocator().allocate(Owner(name), Request(30000)).allocation.gi_id for name in names]


@dataclass(frozen=True)
class Planted:
    """What is wrong, in words that docs/coexistence.md repeats, and what has to be found."""

    what: str
    plant: Callable[[Place], object]
    check: str
    text: str
    """A part of what is said."""


def _driver(place: Place, driver: str, nvml: str, module: str) -> None:
    place.node.configure(driver=driver, nvml=nvml)
    place.write("sys/module/nvidia/version", f"{module}\n")


def _old_driver(place: Place) -> None:
    _driver(place, "570.86.15", "12.570.86.15", "570.86.15")
    # As a driver answers that knows the board, and nothing of its MIG.
    place.node.plant("nvmlDeviceGetMigMode", "returns", code=NOT_SUPPORTED, gpu=2, times=0)
    place.node.plant("nvmlDeviceGetGpuInstanceProfileInfoV", "returns", code=INVALID_ARGUMENT, gpu=2, times=0)


def _stuck(place: Place) -> None:
    (gi_id,) = place.allocate("manual:alice")
    gpu = next(found.gpu for found in place.node.instances())
    place.node.hold(gpu, gi_id, 0)
    place.allocator().reclaim(Owner("manual:alice"))


def _gone(place: Place) -> None:
    (gi_id,) = place.allocate("manual:alice")
    place.node.destroy(next(found.gpu for found in place.node.instances()), gi_id)


def _reloaded(place: Place) -> None:
    place.allocate("manual:alice", "manual:bob", "manual:carol")
    place.node.reload_driver()
    for gpu in (2, 3):
        place.node.set_mig(gpu, True)


def _damaged(place: Place) -> None:
    place.allocate("manual:alice")
    place.allocator().reclaim(Owner("manual:alice"))
    Path(place.settings.state_dir, "state.json").write_bytes(b"{")
    place.allocator().reconcile()


def _behind(place: Place) -> None:
    place.allocate("manual:alice")
    state = Path(place.settings.state_dir, "state.json")
    later = state.stat().st_mtime + 7200
    os.utime(state, (later, later))


def _without_fabric(place: Place) -> None:
    place.write("dev/nvidia-nvswitch0")
    place.disable("nvidia-fabricmanager.service")


def _first_managed(place: Place) -> None:
    place.configure(managed=place.node.uuids[:2])
    place.edit("etc/slurm/gres.conf", "[0-1]", "[2-3]")


def _hears_another(place: Place) -> None:
    place.configure(dcgm_sighup=str(place.write("run/dcgm-exporter.pid", f"{os.getpid()}\n")))


def _boot(place: Place, old: str, new: str) -> None:
    place.edit(f"etc/systemd/system/{boot_unit.NAME}", old, new)


def _maker(program: str) -> Callable[[Place], object]:
    return lambda place: place.runs(4711, f"/usr/bin/{program}", "--v=4")


MISCONFIGURATIONS = (
    Planted("a mistake in config.toml", lambda p: p.edit("config.toml", '# placement = "least', 'placement = "last'),
            "configuration", 'placement: found "last-damage"'),
    Planted("no GPU is managed", lambda p: p.configure(managed=()), "managed GPUs", "no GPU of this node is managed"),
    Planted("a managed GPU that is not on the node",
            lambda p: p.configure(managed=(p.node.uuids[2], "GPU-00000000-1111-2222-3333-444444444444")),
            "managed GPUs", "GPU-00000000-1111-2222-3333-444444444444 is managed, but not on this node"),
    Planted("an allowed profile that the model does not have",
            lambda p: p.configure(allowed={"NVIDIA RTX PRO 6000 Blackwell Server Edition": ("1g.25gb",)}),
            "managed GPUs", "1g.25gb is allowed for"),
    Planted("a managed board without MIG", lambda p: p.configure(managed=p.node.uuids[2:]),
            "MIG mode", "but this board has no MIG"),
    Planted("a driver older than MIG on the board needs", _old_driver,
            "MIG mode", "has no MIG with driver 570.86.15: an NVIDIA RTX PRO 6000"),
    Planted("a shared GPU that is not on the node",
            lambda p: p.configure(slicing=Slicing(("GPU-00000000-1111-2222-3333-444444444444",))),
            "managed GPUs", "GPU-00000000-1111-2222-3333-444444444444 is to be shared, but not on this node"),
    Planted("nothing limits the slices of a shared GPU", lambda p: p.configure(slicing=Slicing(p.node.uuids[4:])),
            "slices", "nothing limits slices: hami_core names no library"),
    Planted("MIG is on where slices are to be",
            lambda p: p.configure(managed=p.node.uuids[2:3], slicing=Slicing(p.node.uuids[3:4])),
            "slices", "its MIG mode is on, and it is to be shared by slices"),
    Planted("MIG mode is off", lambda p: p.node.set_mig(2, False), "MIG mode", "MIG mode is off"),
    Planted("a change of MIG mode is pending", lambda p: p.node.set_mig(3, True, pending=False),
            "MIG mode", "a change of MIG mode to off is pending"),
    Planted("a GPU is lost", lambda p: p.node.lose(2, identity=True), "MIG mode", "lost"),
    Planted("the driver is not loaded", lambda p: (shutil.rmtree(p.folder / "sys/module"), p.node.unload_driver()),
            "driver", "no kernel module nvidia is loaded"),
    Planted("the driver was upgraded under a running system", lambda p: p.node.upgrade_library(),
            "driver", "the kernel module is"),
    Planted("another libnvidia-ml.so.1 is found first",
            lambda p: p.node.configure(nvml="12.570.133.20"), "driver", "is not of driver"),
    Planted("the driver was reloaded under running jobs", _reloaded,
            "records", "none of the 3 recorded instances is there"),
    Planted("somebody destroyed an owner's instance", _gone, "records", "recorded, but not on the hardware"),
    Planted("an instance is stuck", _stuck, "records", "the hardware does not let it go"),
    Planted("an instance that no record names", lambda p: p.node.make(2, "1g.24gb", 0), "foreign", "is foreign"),
    Planted("the records were damaged", _damaged, "records", "damaged records were set aside"),
    Planted("the records are a newer version's",
            lambda p: p.write("state/state.json", '{"format": 99}'), "records", "newer"),
    Planted("a GPU is fenced", lambda p: p.allocator().fence(p.node.uuids[2], "a driver call did not return"),
            "fences", "is fenced: a driver call did not return"),
    Planted("others can read the records", lambda p: os.chmod(p.settings.state_dir, 0o750),
            "records folder", "is readable or writable for others"),
    Planted("others can write where the locks are", lambda p: os.chmod(p.settings.run_dir, 0o777),
            "run folder", "is writable for others"),
    Planted("the clock is behind the records", _behind, "clock", "behind the last record"),
    Planted("NVIDIA's MIG manager starts at boot", lambda p: p.enable("nvidia-mig-manager.service"),
            "other managers", "nvidia-mig-manager.service is enabled"),
    Planted("NVIDIA's MIG manager runs",
            lambda p: p.write("sys/fs/cgroup/system.slice/nvidia-mig-manager.service/cgroup.procs", "1\n"),
            "other managers", "nvidia-mig-manager.service is active"),
    Planted("the DRA driver runs", _maker("gpu-kubelet-plugin"), "other managers", "the DRA driver for NVIDIA GPUs"),
    Planted("HAMi runs", _maker("vGPUmonitor"), "other managers", "HAMi makes and destroys"),
    Planted("Instaslice runs", _maker("instaslice-daemonset"), "other managers", "Instaslice makes and destroys"),
    Planted("a Kubernetes device plugin runs", _maker("nvidia-device-plugin"), "other managers", "hands out GPUs"),
    Planted("HAMi-core is loaded into every process",
            lambda p: p.write("etc/ld.so.preload", "/usr/local/vgpu/libvgpu.so\n"), "HAMi-core", "into every process"),
    Planted("root runs MPS", lambda p: p.runs(4711, "nvidia-cuda-mps-control", "-d"), "MPS", "root runs CUDA MPS"),
    Planted("NVSwitches without the fabric manager", _without_fabric, "fabric", "is not enabled"),
    Planted("a CDI file names instances that are gone",
            lambda p: p.write("run/cdi/nvidia.yaml", _CDI.replace("GPU-0", _SOME_MIG_DEVICE)),
            "CDI", f"the first is {_SOME_MIG_DEVICE}"),
    Planted("mig_at_boot without the boot unit",
            lambda p: (p.configure(mig_at_boot=True), p.disable(boot_unit.NAME)), "boot", "does not start at boot"),
    Planted("slurmd does not wait for the boot unit", lambda p: _boot(p, " slurmd.service", ""),
            "boot", "slurmd.service does not wait for"),
    Planted("the boot unit does not wait for the driver", lambda p: _boot(p, " nvidia-persistenced.service", ""),
            "boot", "does not wait for nvidia-persistenced.service"),
    Planted("the boot unit may take for ever", lambda p: _boot(p, "TimeoutStartSec=60", "TimeoutStartSec=infinity"),
            "boot", "has no TimeoutStartSec"),
    Planted("others can write the job mapping",
            lambda p: p.write("run/mapping/note").parent.chmod(0o777), "job mapping", "is writable for others"),
    Planted("dcgm-exporter reads another job mapping",
            lambda p: p.runs(901, "/usr/bin/dcgm-exporter", "--hpc-job-mapping-dir", "/srv/jobs"),
            "job mapping", "reads /srv/jobs, not"),
    Planted("dcgm_sighup names another program", _hears_another, "SIGHUP", "names no running dcgm-exporter"),
    Planted("gres/gpu has a managed GPU by File",
            lambda p: p.edit("etc/slurm/gres.conf", "[0-1]", "[0-2]"), "split", "gives out /dev/nvidia2"),
    Planted("gres/gpu has a managed GPU by MultipleFiles",
            lambda p: p.edit("etc/slurm/gres.conf", "Type=rtx File=/dev/nvidia[0-1]",
                             "Type=1g.24gb MultipleFiles=/dev/nvidia3,/dev/nvidia-caps/nvidia-cap66"),
            "split", "gives out /dev/nvidia3"),
    Planted("slurmd looks for GPUs by itself",
            lambda p: p.edit("etc/slurm/gres.conf", "AutoDetect=off", "AutoDetect=nvml"), "split", "AutoDetect=nvml"),
    Planted("gres/gpu without device files",
            lambda p: p.edit("etc/slurm/gres.conf", " File=/dev/nvidia[0-1]", ""), "split", "does not say which"),
    Planted("managed GPUs before those of gres/gpu", _first_managed, "split", "comes before /dev/nvidia3 of gres/gpu"),
)  # fmt: skip

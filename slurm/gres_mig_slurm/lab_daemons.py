"""The daemons and files of a throw-away Slurm on loopback: slurmctld, munged, a slurmd for each node, our hooks."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from gres_mig import config
from gres_mig.errors import NodeFault
from gres_mig.simulator import boards as known_boards
from gres_mig.simulator.assembly import create
from gres_mig_slurm import profiles, sizes_file, wanted

T = TypeVar("T")
Boards = Sequence[tuple[str, int]]

HOOKS = Path(__file__).parent / "hooks"
USER = "games"
"""An account that every Debian has, so that none is added."""

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_STOP_S = 10.0


class Daemons:
    """What a cluster is made of, in `folder`, which is to be empty, or in a temporary one.

    `boards` are each node's simulated GPUs. `extra` goes into slurm.conf before the nodes, `partitions` after them,
    `lua` becomes job_submit.lua, `env` the further lines of gres-mig.env, `config` those of each node's config.toml,
    `hardware` the times and quirks that `create` takes. `priced`: requests are counted at what they take of a GPU,
    by our own job_submit.lua. Without `hooks` no hook is configured.
    """

    def __init__(
        self,
        boards: Mapping[str, Boards] | None = None,
        *,
        prolog_flags: str = "Contain,DeferBatch",
        extra: str = "",
        partitions: str = "",
        lua: str = "",
        priced: bool = False,
        env: str = "",
        config: str = "",
        counts: Mapping[str, int] | None = None,
        hooks: bool = True,
        cpus: int = 32,
        hardware: Mapping[str, Any] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.boards = dict(boards or {"n1": [("rtx-pro-6000", 2)], "n2": [("rtx-pro-6000", 1)]})
        self.nodes = tuple(self.boards)
        self.given = folder is not None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="gres-mig-slurm-"))
        self.hooks = self.folder / "hooks"
        self._given = {
            "prolog_flags": prolog_flags,
            "extra": extra,
            "partitions": partitions,
            "lua": lua,
            "env": env,
            "config": config,
        }
        self._counts, self._with_hooks, self._cpus = counts or {}, hooks, cpus
        self._hardware, self._priced = hardware or {}, priced
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._clients: list[subprocess.Popen[str]] = []
        self.kept = False

    def start(self, daemon: str) -> None:
        """Start `munged`, `slurmctld` or the slurmd of a node; returns at once but for munged."""
        commands = {
            "munged": ["munged", "-F", *(f"--{key}={value}" for key, value in self._munge_files().items())],
            "slurmctld": ["slurmctld", "-D"],
        }
        command = commands.get(daemon, ["slurmd", "-D", "-N", daemon])
        user: dict[str, Any] = {"user": "munge", "group": "munge", "extra_groups": []} if daemon == "munged" else {}
        with open(self.folder / "log" / f"{daemon}.out", "ab") as log:
            self._running[daemon] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                cwd=self.folder,
                start_new_session=True,
                **user,
            )
        if daemon == "munged":
            self.until((self.folder / "munge" / "socket").is_socket, "munged's socket")

    def stop(self, daemon: str, *, by: signal.Signals = signal.SIGTERM) -> None:
        """End a daemon by its pid and wait until it is gone; slurmd's steps go on without it."""
        process = self._running.pop(daemon, None)
        if process is None:
            return
        process.send_signal(by)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self, daemon: str) -> None:
        """End a daemon as a crash does."""
        self.stop(daemon, by=signal.SIGKILL)

    def logs(self, lines: int = 30) -> str:
        """The ends of all logs."""
        parts = []
        for file in sorted((self.folder / "log").iterdir()):
            parts += [f"--- {file.name}", *file.read_text(errors="replace").splitlines()[-lines:]]
        return "\n".join(parts)

    def until(self, found: Callable[[], T], what: str, *, within: float = 15) -> T:
        """What `found` returns as soon as that is true; the other side is another program, so it is asked again."""
        deadline = time.monotonic() + within
        while True:
            if value := found():
                return value
            if time.monotonic() > deadline:
                self.kept = True
                raise NodeFault(f"not within {within:g} s: {what}", code="TIMEOUT")
            time.sleep(0.03)

    @property
    def env_file(self) -> Path:
        """The hooks' settings."""
        return self.hooks / "gres-mig.env"

    @property
    def handover(self) -> Path:
        """The folder of the hand-overs."""
        return self.folder / "run" / "slurm"

    @property
    def home(self) -> Path:
        """A folder in which every user may write; the jobs' working directory."""
        return self.folder / "home"

    @property
    def conf(self) -> Path:
        """slurm.conf."""
        return self.folder / "etc" / "slurm.conf"

    def gpus(self, node: str) -> Path:
        """The folder of a node's simulated GPUs, with its records in `state` and its locks in `run`."""
        return self.folder / node

    @contextmanager
    def hook_settings(self, lines: str) -> Iterator[None]:
        """Further lines of gres-mig.env."""
        before = self.env_file.read_text()
        self.env_file.write_text(f"{before}{lines}\n")
        try:
            yield
        finally:
            self.env_file.write_text(before)

    def _write_files(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.folder.chmod(0o755)
        owners = {"log": "slurm", "ctld": "slurm", "munge": "munge", "home": USER}
        for name in ("bin", "etc", "run", *owners):
            made = self.folder / name
            made.mkdir(mode=0o755)
            shutil.chown(made, owners.get(name, "root"))
        self.home.chmod(0o1777)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        shutil.chown(key, "munge")
        for name, boards in self.boards.items():
            create(self.gpus(name), boards, **self._hardware)
            (self.gpus(name) / "config.toml").write_text(f'simulator = "."\ngpus = "*"\n{self._given["config"]}\n')
        if self._with_hooks:
            self._install_hooks()
        if self._priced:
            self._price()
        self._ports = _free_ports(1 + len(self.nodes))
        self.conf.write_text(self._slurm_conf())
        (self.conf.parent / "gres.conf").write_text(f"{wanted.COUNT_ONLY}\n")
        (self.conf.parent / "cgroup.conf").write_text(_cgroup_conf())
        if self._given["lua"]:
            (self.conf.parent / "job_submit.lua").write_text(self._given["lua"])

    def _install_hooks(self) -> None:
        self.hooks.mkdir(mode=0o755)
        for name in wanted.HOOKS.values():
            shutil.copy(HOOKS / name, self.hooks / name)
            (self.hooks / name).chmod(0o755)
        self.env_file.write_text(
            f"PYTHON={sys.executable}\n"
            f"SLURM_BIN={self.folder}/bin\n"
            f"CONFIG={self.folder}/$SLURMD_NODENAME/config.toml\n"
            f"STATE={self.folder}/$SLURMD_NODENAME/state/state.json\n"
            f"HANDOVER={self.handover}\n"
            f"{self._given['env']}\n"
        )

    def _price(self) -> None:
        types = [profiles.of_this_node(config.load(node=self.gpus(name)), name=name, nodes=name) for name in self.nodes]
        self._counts = {each.nodes: each.count_mib for each in types}
        sizes = sizes_file.render(profiles.Sizes(tuple(types)))
        (self.conf.parent / sizes_file.FILE_NAME).write_text(sizes)
        self._given["lua"] = (HOOKS / "job_submit.lua").read_text()

    def _slurm_conf(self) -> str:
        folder, host = self.folder, socket.gethostname()
        lines = [
            "ClusterName=lab",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={self._ports[0]}",
            "SlurmUser=slurm",
            f"AuthInfo=socket={folder}/munge/socket,cred_expire=5",
            f"StateSaveLocation={folder}/ctld",
            f"SlurmdSpoolDir={folder}/spool.%n",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/slurmd.%n.pid",
            f"SlurmctldLogFile={folder}/log/slurmctld.log",
            f"SlurmdLogFile={folder}/log/slurmd.%n.log",
            "SlurmctldDebug=verbose",
            "SlurmdDebug=debug2",
            "MpiDefault=none",
            "ReturnToService=2",
            "SlurmctldTimeout=30",
            "SlurmdTimeout=60",
            "InactiveLimit=0",
            "MinJobAge=3600",
            "KillWait=1",
            "SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SlurmdParameters=config_overrides",
            "GresTypes=migmem",
        ]
        if self._given["prolog_flags"]:
            lines.append(f"PrologFlags={self._given['prolog_flags']}")
        if self._given["lua"]:
            lines.append("JobSubmitPlugins=lua")
        extra = str(self._given["extra"])
        if self._with_hooks:
            # Not beside another one: of two prologs the last counts on 22.05, and both do on 24.11.
            own = {key: hook for key, hook in wanted.HOOKS.items() if f"\n{key}=" not in f"\n{extra}"}
            lines += [f"{key}={self.hooks}/{hook}" for key, hook in own.items()]
            lines.append("PrologEpilogTimeout=60")
        lines.append(extra)
        for name, port in zip(self.nodes, self._ports[1:], strict=True):
            lines.append(
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self._cpus} "
                f"RealMemory=24000 Gres=migmem:{self._count(name)} State=UNKNOWN"
            )
        lines.append(f"PartitionName=main Nodes={','.join(self.nodes)} Default=YES MaxTime=INFINITE State=UP")
        lines.append(self._given["partitions"])
        return "\n".join(lines) + "\n"

    def _count(self, node: str) -> int:
        whole = sum(known_boards.data(name)["memory_mib"] * count for name, count in self.boards[node])
        return self._counts.get(node, whole)

    def _munge_files(self) -> dict[str, str]:
        folder = self.folder / "munge"
        return {
            "key-file": f"{folder}/key",
            "socket": f"{folder}/socket",
            "pid-file": f"{folder}/pid",
            "log-file": f"{folder}/log",
            "seed-file": f"{folder}/seed",
        }

    def environment(self) -> dict[str, str]:
        """What daemons and clients find in their environment."""
        return {"PATH": PATH, "SLURM_CONF": str(self.conf), "LANG": "C.UTF-8"}

    def processes(self) -> list[int]:
        """What runs of this cluster, its jobs too: processes whose SLURM_CONF is its own, and its step daemons."""
        mark, found = f"SLURM_CONF={self.conf}".encode(), []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                process = Path("/proc", entry)
                # Those that end meanwhile, and pid 1, whose environment is not even root's to read everywhere.
                with suppress(OSError):
                    if mark in (process / "environ").read_bytes().split(b"\0") or self._is_step(process):
                        found.append(int(entry))
        return found

    def _is_step(self, process: Path) -> bool:
        """A step daemon of 24.11 writes its title over its environment; it stays in the folder its slurmd began in."""
        titled = (process / "cmdline").read_bytes().startswith(b"slurmstepd: ")
        return titled and (process / "cwd").samefile(self.folder)

    def _end_steps(self) -> None:
        """End what slurmds left running, and wait until it is gone."""
        deadline = time.monotonic() + _STOP_S
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.03)


def _cgroup_conf() -> str:
    said = subprocess.run(["slurmd", "-V"], env={"PATH": PATH}, capture_output=True, text=True, check=True).stdout
    major, minor = said.split()[1].split(".")[:2]
    # No step is confined here; since 23.11 that can be said, before it some plugin has to be named.
    if (int(major), int(minor)) >= (23, 11):
        return "CgroupPlugin=disabled\n"
    return "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"


def _free_ports(count: int) -> list[int]:
    """Ports that nobody has now, below those that the system hands out by itself."""
    found: list[int] = []
    for port in random.sample(range(20000, 32000), 200):
        with socket.socket() as each:
            if each.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
        if len(found) == count:
            return found
    raise NodeFault("no free ports on this machine", code="INTERNAL")

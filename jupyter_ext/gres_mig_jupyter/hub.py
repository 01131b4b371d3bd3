"""JupyterHub on one machine: how much GPU memory the kernels of a server get; nothing is allocated here."""

from __future__ import annotations

import asyncio
import logging
import os
import reprlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jupyterhub.utils import maybe_future
from traitlets import Enum

from gres_mig import config
from gres_mig.client import Client
from gres_mig.errors import BadRequest
from gres_mig_jupyter.hub_choice import MEMORY, GpuChoice, Size, select

SHARE = "gpu_share"
_SHARES = {"kernel": "one for each notebook", "server": "one for all notebooks of this server"}
_SIZES_WAIT_S = 3.0
_RECONCILE_WAIT_S = 60.0
_BEGAN = "gpu_began"
_CONFIG, _NODE = "GRES_MIG_CONFIG", "GRES_MIG_NODE"


class MigSpawner(GpuChoice):
    """What is put before a spawner that starts servers on the Hub's own machine, as the user's own account."""

    gpu_share = Enum(tuple(_SHARES), "kernel", help="Whose the instance is: one for each kernel, or the server's.")

    gpu_options = (MEMORY, SHARE)

    _began = False
    """Whether a server was started that may have left something."""

    async def gpu_sizes(self) -> Sequence[Size]:
        """What the node service says: the sizes of this machine, and how many could be made now."""
        settings = config.load(os.environ.get(_CONFIG), node=os.environ.get(_NODE))
        sizes = await asyncio.to_thread(Client(settings, timeout_s=_SIZES_WAIT_S).sizes)
        return _by_memory(sizes)

    async def choose_gpu(self, options: Mapping[str, object]) -> None:
        """Also whose it is."""
        share = options.get(SHARE)
        if share is None or share == "":
            share = "kernel"
        if not isinstance(share, str) or share not in _SHARES:
            raise BadRequest(f"{SHARE} {reprlib.repr(share)}: it is neither kernel nor server")
        await super().choose_gpu(options)
        if share == "server" and not self.gpu_memory:
            raise BadRequest(f"{SHARE} server: no {MEMORY} was chosen to be shared", hint="choose both, or neither")
        self.gpu_share = share

    def gpu_fields(self, sizes: Sequence[Size]) -> str:
        """Both fields."""
        explanation = "Notebooks that share an instance share its memory as well, and keep it until the server stops."
        return super().gpu_fields(sizes) + select(SHARE, "GPU instances", [*_SHARES.items()], "kernel", explanation)

    def get_env(self) -> dict[str, str]:
        """What the server's extension and its kernels' provisioner read, and which node is meant."""
        env = super().get_env()
        if self.gpu_memory:
            env |= {"GRES_MIG_SERVER_MEMORY": str(self.gpu_memory), "GRES_MIG_SHARE": self.gpu_share}
        return env | {name: os.environ[name] for name in (_CONFIG, _NODE) if name in os.environ}

    def get_state(self) -> dict[str, Any]:
        """Also whose it is, and whether a server may have left something."""
        return {**super().get_state(), SHARE: self.gpu_share, _BEGAN: self._began}

    def load_state(self, state: dict[str, Any]) -> None:
        """After the Hub was restarted, it may find that a server ended meanwhile."""
        super().load_state(state)
        self.gpu_share = state.get(SHARE, self.gpu_share)
        self._began = bool(state.get(_BEGAN))

    async def start(self) -> Any:
        """Start the server; its instances are made when its kernels start."""
        self._began = True
        return await maybe_future(super().start())

    async def run_post_stop_hook(self) -> None:
        """The site's own, then give back what the server held, where the Hub may: sooner than the service's next pass.

        It is called also for a server that never started, and then has nothing to do: a refused choice costs little.
        """
        try:
            await maybe_future(super().run_post_stop_hook())
        finally:
            if self._began and os.geteuid() == 0:
                self._began = False
                await _reconcile(self.log)


class _Reconcile:
    """`gres-mig reconcile`, once for all who ask while one of them waits: servers are often stopped many at a time."""

    def __init__(self) -> None:
        self._running = asyncio.Lock()
        self._waited_for = False

    async def __call__(self, log: logging.Logger) -> None:
        if self._waited_for:
            return
        self._waited_for = True
        async with self._running:
            self._waited_for = False
            await _run(log)


_reconcile = _Reconcile()


async def _run(log: logging.Logger) -> None:
    named = (("--config", os.environ.get(_CONFIG)), ("--node", os.environ.get(_NODE)))
    node = [word for option, value in named if value for word in (option, value)]
    # The command, for an operation forks a child, which no process with threads and an event loop should do.
    command = [sys.executable, "-I", "-m", "gres_mig", *node, "reconcile"]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        _, said = await asyncio.wait_for(process.communicate(), _RECONCILE_WAIT_S)
    except asyncio.TimeoutError:
        process.kill()
        log.warning("gres-mig reconcile did not end within %g s; the node service goes on trying", _RECONCILE_WAIT_S)
        return
    if process.returncode:
        log.warning("gres-mig reconcile ended with %d: %s", process.returncode, said.decode(errors="replace").strip())


def _by_memory(sizes: Sequence[Mapping[str, Any]]) -> list[Size]:
    """One for each size: profiles of the same memory lie in the same slices, those of several models do not."""
    found: dict[int, dict[str, dict[str, int]]] = {}
    for each in sizes:
        models = found.setdefault(each["memory_mib"], {})
        models.setdefault(each["model"], {})[each["profile"]] = each["free"]
    return [
        Size(
            memory_mib,
            tuple(dict.fromkeys(name for profiles in models.values() for name in profiles)),
            sum(max(profiles.values()) for profiles in models.values()),
        )
        for memory_mib, models in sorted(found.items())
    ]

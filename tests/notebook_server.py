"""A simulated node with its service and real Jupyter servers on it, spoken to over HTTP and websockets."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from gres_mig import config, machine
from gres_mig.models import Record, Settings
from gres_mig.simulator.admin import Found, Node
from gres_mig.simulator.assembly import create
from gres_mig.simulator.program import command, environment
from gres_mig.state import Store
from gres_mig_jupyter.lab import PATIENCE_S, Server, acting_as, give, gpu_spec
from gres_mig_jupyter.lab_kernel import Kernel

__all__ = ["OTHER_USER", "USER", "Host", "Kernel", "Server", "gpu_spec", "in_parallel", "require_user", "until"]

USER, OTHER_USER = "games", "man"
"""Accounts that every Debian has, for servers that are not root's."""

FREED_S = 10.0
"""How soon after its end nothing of an owner may be left; the project's own bar."""


def require_user(name: str = USER) -> None:
    """Skip where a server cannot be run as that user; CI makes that a failure."""
    if os.geteuid() != 0:
        pytest.skip("only root runs a server as another user")
    words = [*acting_as(name), sys.executable, "-c", "import gres_mig"]
    done = subprocess.run(words, env={}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{name} cannot run {sys.executable}: {done.stderr.strip().splitlines()[-1]}")


def until(true: Callable[[], object], what: str, *, within: float = PATIENCE_S, log: Callable[[], str] = str) -> None:
    """Look until it is so; no event tells of what another process does. `log` is shown if it never is."""
    ends = time.monotonic() + within
    while not true():
        if time.monotonic() > ends:
            pytest.fail(f"not within {within:g} s: {what}\n{log()}")
        time.sleep(0.01)


def in_parallel(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Make calls at once, each in a thread of its own: their results, in order."""
    made = list(calls)
    with ThreadPoolExecutor(len(made)) as pool:
        return [each.result() for each in [pool.submit(call) for call in made]]


class Host(AbstractContextManager["Host"]):
    """A simulated node in a folder that everybody may enter, and its service if it is started; a context manager.

    `owner` is the account that made the node, so that its servers need no service; root without one.
    """

    def __init__(
        self, boards: Sequence[tuple[str, int]] = (("rtx-pro-6000", 1),), *, owner: str = "", conf: str = 'gpus = "*"\n'
    ) -> None:
        shared = "/dev/shm"
        base = tempfile.mkdtemp(prefix="gres-mig-", dir=shared if os.access(shared, os.W_OK) else None)
        self.base = Path(base)
        self.base.chmod(0o755)
        self.folder = self.base / "node"
        self.folder.mkdir(mode=0o755)
        create(self.folder, boards)
        (self.folder / "config.toml").write_text(conf)
        if owner:
            give(self.folder, owner)
        self.owner = owner
        self.gpus = Node(self.folder)
        self._services: list[subprocess.Popen[bytes]] = []
        self._servers: list[Server] = []

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        self.stop_service(signal.SIGKILL)
        shutil.rmtree(self.base)

    @property
    def settings(self) -> Settings:
        """As its config.toml has them now."""
        return config.load(node=self.folder)

    @property
    def socket(self) -> Path:
        """Where the service listens."""
        return Path(self.settings.run_dir) / "service.sock"

    def serve(self, *words: str, every_s: float = 0.5) -> subprocess.Popen[bytes]:
        """Start the node's service, as whom the node belongs to; over once it listens."""
        with (self.base / "service.log").open("ab") as log:
            process = subprocess.Popen(
                [
                    *acting_as(self.owner),
                    *command("--node", str(self.folder), "serve", "--every", str(every_s), *words),
                ],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._services.append(process)
        until(self._listens, "the service listens", log=self.log)
        return process

    def stop_service(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End the service, and wait for its end."""
        for process in self._services:
            process.send_signal(how)
            process.wait(PATIENCE_S)
        self._services.clear()

    def log(self) -> str:
        """What its services said."""
        file = self.base / "service.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def server(self, **how: Any) -> Server:
        """Start a Jupyter server on this node; it ends with the node. See `Server`."""
        folder = Path(tempfile.mkdtemp(prefix="server-", dir=self.base))
        folder.chmod(0o755)
        server = Server(folder, self.folder, **how)
        self._servers.append(server)
        server.start()
        return server

    def instances(self) -> list[Found]:
        """What is on the hardware."""
        return self.gpus.instances()

    def records(self) -> tuple[Record, ...]:
        """What is on record."""
        return Store(self.settings, machine.boot_id(self.settings.simulator)).read().records

    def record_of(self, kernel_id: str) -> Record | None:
        """The record of that kernel."""
        return next((r for r in self.records() if r.owner.name.endswith(f":{kernel_id}")), None)

    def log_calls(self) -> None:
        """From here on the node logs each driver call that changes a GPU."""
        self.gpus.configure(log="mutating")

    def changes(self) -> int:
        """How many driver calls changed a GPU, or were to, since `log_calls`."""
        return sum(call["mutating"] for call in self.gpus.calls())

    def until_free(self, left: int = 0, *, log: Callable[[], str] = str) -> None:
        """Until so many instances and records are left, as soon as the project promises it."""
        until(
            lambda: len(self.instances()) == len(self.records()) == left,
            f"{left} instance(s) left",
            within=FREED_S,
            log=lambda: f"{self.instances()}\n{self.records()}\n{self.log()}\n{log()}",
        )

    def _listens(self) -> bool:
        process = self._services[-1]
        assert process.poll() is None, f"the service ended with {process.returncode}\n{self.log()}"
        connection = http.client.HTTPConnection("localhost")
        with socket.socket(socket.AF_UNIX) as connection.sock:
            try:
                connection.sock.connect(str(self.socket))
                connection.request("GET", "/v1/service")
                return connection.getresponse().status == 200
            except (FileNotFoundError, ConnectionError):
                return False

"""The way of a server whose user may change the node's records: the same core, in processes of its own."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import gres_mig
from gres_mig import kernels, machine
from gres_mig.client import error_from
from gres_mig.errors import NodeFault, TimedOut
from gres_mig.models import Allocation, Settings
from gres_mig.service.shelf import shelf
from gres_mig.state import Store


class Direct:
    """What `gres_mig.client.Client` does, without a service; safe to use from several threads.

    An operation forks, which no process with threads should do, so it runs as the command. Records are read and
    reported on here: that is a file under a lock, and no driver is called.
    """

    def __init__(self, settings: Settings, words: Sequence[str], *, timeout_s: float = 60.0) -> None:
        """`words` name the node on a command line: `--config FILE` or `--node DIR`."""
        self._settings, self._words, self._timeout_s = settings, tuple(words), timeout_s
        self._uid, self._server = os.geteuid(), machine.this_process()

    def sizes(self) -> list[dict[str, Any]]:
        """The sizes of this node, and how many of each are free now."""
        # It publishes what it sees.
        self._run("status")
        there: list[dict[str, Any]] = shelf(self._settings)["sizes"]
        return there

    def why(self, memory: str) -> dict[str, Any]:
        """Whether a request for memory would find a place now, and if not, why."""
        # What a caller wrote is never an option.
        answer = self._run("why", "--", memory)
        return {"text": answer["verdict"], "fits": answer["fits"], "code": answer["code"]}

    def kernels(self) -> list[dict[str, Any]]:
        """What this user's kernels have."""
        store = self._store()
        return kernels.plain_kernels(store.read(), self._uid)

    def kernel(self, kernel_id: str) -> dict[str, Any] | None:
        """What one of them has; None where it has nothing."""
        return next((each for each in self.kernels() if each["kernel_id"] == kernel_id), None)

    def allocate(self, kernel_id: str, *, memory: str = "", profile: str = "") -> dict[str, Any]:
        """Get a kernel an instance, or the one it has."""
        owner = kernels.owner_of(self._uid, kernel_id)
        wanted = ["--profile", profile] if profile else ["--memory", memory]
        before = self.kernel(kernel_id)
        witness = ["--witness", str(self._server.pid)]
        # Twice where a kernel was reported before: while it restarts the server stands in for it.
        answer = self._run("allocate", "--owner", str(owner), *wanted, *witness, *(witness if before else ()))
        store = self._store()
        for record in store.read().of(owner):
            if isinstance(record, Allocation) and record.mig_uuid == answer["mig_uuid"]:
                return {**kernels.plain_kernel(record), "created": answer["created"]}
        raise NodeFault(f"{owner} was given {answer['mig_uuid']}, and it is gone already", code="INTERNAL")

    def report(self, kernel_id: str, pid: int) -> dict[str, Any]:
        """Say which process is the kernel: it lives by that one and by this server from here on."""
        store = self._store()
        return kernels.report(store, kernels.owner_of(self._uid, kernel_id), self._server, pid)

    def reclaim(self, kernel_id: str) -> list[dict[str, Any]]:
        """Give back what a kernel has; nothing there is success."""
        answer = self._run("reclaim", str(kernels.owner_of(self._uid, kernel_id)))
        reclaimed: list[dict[str, Any]] = answer["reclaimed"]
        return reclaimed

    def reconcile(self) -> list[dict[str, Any]]:
        """Settle what ended kernels and servers left; no service does it here."""
        reclaimed: list[dict[str, Any]] = self._run("reconcile")["reclaimed"]
        return reclaimed

    def _store(self) -> Store:
        return Store(self._settings, machine.boot_id(self._settings.simulator))

    def _run(self, *words: str) -> dict[str, Any]:
        command = [sys.executable, _isolated(), "-m", "gres_mig", *self._words, words[0], "--json", *words[1:]]
        process = subprocess.Popen(
            command,
            # Where no file of the user's passes for a module, and with nothing of the server's terminal: Ctrl-C there
            # ends no operation half way.
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        with process:
            try:
                out, said = process.communicate(timeout=self._timeout_s)
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise TimedOut(f"gres-mig {words[0]} did not end within {self._timeout_s:g} s") from error
        try:
            answer: dict[str, Any] = json.loads(out)
        except ValueError as error:
            last = said.decode(errors="replace").strip().rpartition("\n")[2]
            raise NodeFault(
                f"gres-mig {words[0]} ended with {process.returncode}: {last or 'without a word'}", code="INTERNAL"
            ) from error
        if "error" in answer:
            raise error_from(answer["error"])
        return answer


def _isolated() -> str:
    # -I leaves out the caller's environment and folder, and his own packages too: needed where this is one of them.
    own = site.getusersitepackages()
    return "-E" if os.path.abspath(gres_mig.__file__).startswith(own + os.sep) else "-I"

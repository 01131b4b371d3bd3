"""How this server gets instances: its job has one, the node service makes them, or it makes them itself."""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar

from gres_mig import config
from gres_mig.answers import delegated
from gres_mig.client import Client
from gres_mig.errors import BadRequest, Fault, GresMigError, NodeFault
from gres_mig.kernels import owner_of
from gres_mig.models import Settings
from gres_mig_jupyter import shared
from gres_mig_jupyter.direct import Direct
from gres_mig_jupyter.refused import Refused, sentence

__all__ = ["Node", "Refused", "Way", "this_server"]

T = TypeVar("T")
Way = Literal["job", "service", "direct", "none"]
Listener = Callable[[str, str, Mapping[str, Any]], None]

_VARIABLES = ("GRES_MIG_CONFIG", "GRES_MIG_NODE", "GRES_MIG_SERVER_MEMORY", "GRES_MIG_SHARE", "GRES_MIG_UUID")
_ASKS = 4
"""At once: the service takes eight connections of a user, and reports and ends must not wait behind asks."""
_MORE_S = 20.0
"""What an operation may take beyond its waits for locks and for hardware."""
_MOST_REFUSALS = 100


def this_server(config_file: str = "") -> Node:
    """The node of this server, decided once: from the environment the server has, or the file its configuration names.

    Never from a kernel spec or a client, who would choose the records that are written.
    """
    key = tuple(os.environ.get(name) for name in _VARIABLES)
    if key not in _servers:
        _servers[key] = Node(config_file)
    return _servers[key]


_servers: dict[tuple[str | None, ...], Node] = {}


class Node:
    """What this server's kernels have on this node, and the way to it; coroutines of any event loop may use it."""

    def __init__(self, config_file: str = "") -> None:
        self.way: Way
        self.reason = ""
        """Why there are no instances, where `way` is `none`."""
        self.share = "server" if os.environ.get("GRES_MIG_SHARE") == "server" else "kernel"
        self.shared: dict[str, Any] | None = None
        """The one instance that all kernels of this server share, where they do."""
        self.held: dict[str, dict[str, Any]] = {}
        """What this server's kernels have, by kernel id."""
        self.late: dict[str, int] = {}
        """Kernels whose pid the service was not there to hear."""
        self.starting: set[str] = set()
        """Kernels between their first ask and the end of their start."""
        self.refusals: dict[str, dict[str, Any]] = {}
        """Why the last kernels that were refused were."""
        self.listeners: list[Listener] = []
        self.notebooks: dict[str, str] = {}
        """Which notebook a kernel is for."""
        self._does: Client | Direct | None = None
        self._asks, self._sharing = threading.BoundedSemaphore(_ASKS), threading.Lock()
        self._asking: dict[str, Future[dict[str, Any]]] = {}
        self._decide(config_file)

    async def allocate(self, kernel_id: str, *, memory: str = "", profile: str = "") -> dict[str, Any]:
        """Get a kernel an instance, or the one it has: what it is, and the kernel's `environment`."""
        owner_of(os.geteuid(), kernel_id)
        if self.way == "job" or self.share == "server":
            common = shared.of_job() if self.way == "job" else await self.share_one()
            shared.refuse_more(common, memory, profile, "job" if self.way == "job" else "server")
            given = {**common, "kernel_id": kernel_id, "kernel": None, "created": False}
        else:
            does = self._need()
            given = await self._ask(kernel_id, lambda: does.allocate(kernel_id, memory=memory, profile=profile))
            if given["created"]:
                self._tell("allocate", kernel_id, given)
        self.held[kernel_id] = given
        return given

    async def report(self, kernel_id: str, pid: int, *, later: bool = False) -> None:
        """Say which process is the kernel: from then on it lives by that one, and by this server.

        `later`: if nobody hears it now, it is said again by `report_late`; by this server it lives meanwhile.
        """
        self.late.pop(kernel_id, None)
        if self._own(kernel_id):
            does = self._need()
            try:
                reported = await _in_thread(lambda: does.report(kernel_id, pid))
            except NodeFault as error:
                if not later or error.code != "STATE":
                    raise
                self.late[kernel_id] = pid
                reported = {"kernel": {"pid": pid}}
            self.held[kernel_id] = {**self.held.get(kernel_id, {}), **reported}
        else:
            self.held[kernel_id] = {**self.held[kernel_id], "kernel": {"pid": pid}}

    async def report_late(self) -> None:
        """Say what nobody heard before."""
        for kernel_id, pid in list(self.late.items()):
            try:
                await self.report(kernel_id, pid, later=True)
            except BadRequest:
                # It has ended meanwhile.
                continue

    async def reclaim(self, kernel_id: str) -> None:
        """Give back what a kernel has, after the ask for it that may be under way; nothing there is success."""
        if not self._own(kernel_id):
            self.forget(kernel_id)
            return
        does, asking = self._need(), self._asking.get(kernel_id)
        before = self.held.get(kernel_id, {})

        def give_back() -> list[dict[str, Any]]:
            if asking is not None and not asking.cancelled():
                wait([asking])
            outcomes = does.reclaim(kernel_id)
            self.forget(kernel_id)
            return outcomes

        for outcome in await _in_thread(give_back):
            self._tell("reclaim", kernel_id, {**before, "verdict": outcome["verdict"]})
        if self.shared is not None and self.shared["kernel_id"] == kernel_id:
            self.shared = None

    def forget(self, kernel_id: str) -> None:
        """That kernel has nothing, and nothing is under way for it."""
        self.starting.discard(kernel_id)
        for known in (self.held, self.late, self.notebooks, self._asking):
            known.pop(kernel_id, None)

    async def kernel(self, kernel_id: str) -> dict[str, Any] | None:
        """What is recorded for a kernel; None where that is nothing."""
        if not self._own(kernel_id):
            return self.held.get(kernel_id)
        does = self._need()
        return await _in_thread(lambda: does.kernel(kernel_id))

    async def mine(self) -> list[dict[str, Any]]:
        """What all kernels of this user have on this node, also those of other servers."""
        return await _in_thread(self._need().kernels)

    async def sizes(self) -> list[dict[str, Any]]:
        """The sizes of this node, and how many of each are free now."""
        return await _in_thread(self._need().sizes)

    async def why(self, memory: str) -> dict[str, Any]:
        """Whether a request for memory would find a place now, and if not, why."""
        does = self._need()
        return await _in_thread(lambda: does.why(memory))

    async def service(self) -> dict[str, Any] | None:
        """What the node service is; None where this server needs none."""
        return await _in_thread(self._does.service) if isinstance(self._does, Client) else None

    async def reconcile(self) -> None:
        """Settle what earlier servers left; where there is a service, that does it."""
        if isinstance(self._does, Direct):
            await _in_thread(self._does.reconcile)

    async def share_one(self) -> dict[str, Any]:
        """The instance that the kernels of this server share; it lives as long as the server."""
        does, memory = self._need(), os.environ.get("GRES_MIG_SERVER_MEMORY", "")
        if not memory:
            raise BadRequest("GRES_MIG_SHARE=server needs GRES_MIG_SERVER_MEMORY, the memory that kernels share")

        def get() -> tuple[dict[str, Any], bool]:
            with self._sharing:
                if self.shared is not None:
                    return self.shared, False
                kernel_id = str(uuid.uuid4())
                does.allocate(kernel_id, memory=memory)
                self.shared = self.held[kernel_id] = does.report(kernel_id, os.getpid())
                return self.shared, True

        common, made = await _in_thread(get)
        if made:
            self._tell("allocate", common["kernel_id"], common)
        return common

    async def refused(self, kernel_id: str, error: GresMigError, notebook: str = "") -> Refused:
        """The error as whoever started the kernel reads it."""
        others = [k for k, its in self.notebooks.items() if its == notebook and k != kernel_id and k in self.held]
        holds = self.held[others[0]]["profile"]["name"] if notebook and others else ""
        sizes: list[dict[str, Any]] = []
        if self._does is not None and error.code in {"NOCAP", "FRAG", "TOOBIG"}:
            try:
                sizes = await self.sizes()
            except GresMigError:
                # There is one error to tell already.
                sizes = []
        text = sentence(error, sizes, holds if error.fault is Fault.CAPACITY else "")
        while len(self.refusals) >= _MOST_REFUSALS:
            self.refusals.pop(next(iter(self.refusals)))
        self.refusals[kernel_id] = {"message": text, "fault": error.fault.value, "code": error.code}
        self._tell("refuse", kernel_id, {"code": error.code})
        return Refused(error, text)

    def _decide(self, config_file: str) -> None:
        if os.environ.get("SLURM_JOB_ID") and os.environ.get("GRES_MIG_UUID"):
            self.way, self.share = "job", "kernel"
            return
        file, folder = config_file or os.environ.get("GRES_MIG_CONFIG"), os.environ.get("GRES_MIG_NODE")
        try:
            settings = config.load(file or None, node=folder or None)
        except GresMigError as error:
            self.way, self.reason = "none", f"{error}; tell an admin; kernels without GPU memory start as ever"
            return
        if (share := os.environ.get("GRES_MIG_SHARE", "kernel")) not in ("kernel", "server"):
            self.way, self.reason = "none", f"GRES_MIG_SHARE is {share!r:.60}; write kernel or server"
            return
        client = Client(settings, timeout_s=settings.lock_wait_s + settings.hardware_timeout_s + _MORE_S)
        there = os.path.lexists(client.path)
        if not there and not os.path.lexists(settings.config_path):
            self.way = "none"
            self.reason = f"gres-mig is not set up on this machine: {settings.config_path} is missing"
        elif there or not _writable(settings):
            self.way, self._does = "service", client
        else:
            named = ["--node", folder] if folder else ["--config", settings.config_path] if file else []
            self.way, self._does = "direct", Direct(settings, named, timeout_s=client.timeout_s)

    def _need(self) -> Client | Direct:
        if self._does is None:
            raise NodeFault(self.reason or "this server is in a job, which has its instance", code="CONFIG")
        return self._does

    def _own(self, kernel_id: str) -> bool:
        """Whether that is the name of an owner, and not of one kernel among those that share."""
        alone = self.way != "job" and self.share != "server"
        return alone or (self.shared is not None and self.shared["kernel_id"] == kernel_id)

    async def _ask(self, kernel_id: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        future: Future[dict[str, Any]] = Future()
        self._asking[kernel_id] = future
        try:
            return await _in_thread(work, future, self._asks)
        finally:
            # One that nobody waits for any more goes on, and what it gets is given back after it.
            if future.done():
                self._asking.pop(kernel_id, None)

    def _tell(self, action: str, kernel_id: str, details: Mapping[str, Any]) -> None:
        for listener in self.listeners:
            listener(action, kernel_id, details)


async def _in_thread(
    work: Callable[[], T], future: Future[T] | None = None, turn: AbstractContextManager[Any] | None = None
) -> T:
    """What `work` returns, done in a thread of its own; given up before its turn, it is not begun.

    A daemon, not one of the event loop's pool: a server that ends does not wait for a node that hangs.
    """
    result: Future[T] = future or Future()

    def run() -> None:
        with turn or nullcontext():
            if not result.set_running_or_notify_cancel():
                return
            try:
                result.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
                result.set_exception(error)

    threading.Thread(target=run, daemon=True, name="gres-mig").start()
    return await asyncio.wrap_future(result)


def _writable(settings: Settings) -> bool:
    """Whether this user may change the node by himself."""
    if settings.simulator:
        return os.access(settings.simulator, os.W_OK)
    return os.geteuid() in {0, delegated(settings)}

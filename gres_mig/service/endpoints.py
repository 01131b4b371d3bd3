"""What the service answers to each verb and path: from files at once, or from a task in its user's turn."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from pydantic import BaseModel

from gres_mig import kernels, machine
from gres_mig.errors import BadRequest, GresMigError, NodeFault, NotPermitted, StateError
from gres_mig.models import Request, Settings, State
from gres_mig.presence import Presence
from gres_mig.service import shelf, wire
from gres_mig.service.limits import Line
from gres_mig.service.metrics import Metrics
from gres_mig.service.peer import Peer
from gres_mig.service.workshop import Workshop
from gres_mig.sizes import parse_memory
from gres_mig.state import Damaged, Store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gres_mig.service.loop import Service

_LONGEST_S = 300.0
"""A task that takes longer is ended: more than all waits for locks and deadlines of driver calls together."""

_FRESH_S = 1.0
"""A look at the hardware that is no older is not repeated for whoever asks."""

_STALE_S = 60.0
"""A pass, or a look that succeeded, that is older means that the service does not do its work."""


class Call(NamedTuple):
    """One request, as far as an endpoint needs it."""

    peer: Peer
    kernel_id: str
    query: dict[str, str]
    body: bytes
    at_ns: int
    """When it was read (`machine.now_ns`)."""


class Endpoint(NamedTuple):
    """One verb and path."""

    method: str
    path: str
    """As a pattern: `KERNEL` stands for a kernel's id."""
    summary: str
    answer: type[BaseModel]
    does: Callable[[Endpoints, Call], Awaitable[dict[str, Any]]]
    body: type[wire.Ask | wire.Report] | None = None
    owned: bool = False
    """Whether it is about the caller's own kernels: who owns nothing is refused."""
    query: tuple[str, ...] = ()


class Endpoints:
    """The node as its callers see it."""

    def __init__(self, service: Service, workshop: Workshop, metrics: Metrics) -> None:
        self._service, self._workshop, self._metrics = service, workshop, metrics
        self._hardware, self._desk = Line(at_once=16, of_one=4, roots=2), Line(at_once=8, of_one=2, roots=1)
        """For what may wait for a GPU, and for what only needs the records: that stands behind none of the others."""
        self._records: tuple[object, State] | None = None
        self._shelf: tuple[object, dict[str, Any]] | None = None
        self._look: tuple[float, dict[str, Any] | GresMigError] = (0.0, NodeFault("the node was not looked at yet"))
        self._looking: asyncio.Task[None] | None = None

    @property
    def settings(self) -> Settings:
        """The configuration in force."""
        return self._service.settings

    async def service(self, call: Call) -> dict[str, Any]:
        """Version, process, configuration in force."""
        return describe(self._service.presence, self.settings)

    async def sizes(self, call: Call) -> dict[str, Any]:
        """From what was last published."""
        there = await self.shelf()
        return {"looked": there["looked"], "sizes": there["sizes"]}

    async def why(self, call: Call) -> dict[str, Any]:
        """From what was last published, too."""
        memory = call.query.get("memory", "")
        request = Request(parse_memory(memory)) if memory else _named(call.query.get("profile", ""))
        return await self._task(self._desk, call, "why", request)

    async def kernels(self, call: Call) -> dict[str, Any]:
        """The caller's."""
        return {"kernels": kernels.plain_kernels(self._state(), call.peer.uid)}

    async def kernel(self, call: Call) -> dict[str, Any]:
        """One of the caller's."""
        owner = kernels.owner_of(call.peer.uid, call.kernel_id)
        for plain in kernels.plain_kernels(self._state(), call.peer.uid):
            if plain["owner"] == str(owner):
                return plain
        raise kernels.unknown(call.kernel_id)

    async def allocate(self, call: Call) -> dict[str, Any]:
        """Make it, or answer with what there is."""
        request: wire.Ask = wire.read(wire.Ask, call.body)
        # Before it waits in line, so that what can never be is told at once.
        kernels.owner_of(call.peer.uid, call.kernel_id)
        return await self._task(
            self._hardware, call, "allocate", call.peer, call.kernel_id, request.request(), call.at_ns
        )

    async def report(self, call: Call) -> dict[str, Any]:
        """Say which process the kernel is."""
        found: wire.Report = wire.read(wire.Report, call.body)
        kernels.owner_of(call.peer.uid, call.kernel_id)
        return await self._task(self._desk, call, "report", call.peer, call.kernel_id, found.pid, call.at_ns)

    async def reclaim(self, call: Call) -> dict[str, Any]:
        """Give it back."""
        kernels.owner_of(call.peer.uid, call.kernel_id)
        return await self._task(self._hardware, call, "reclaim", call.peer, call.kernel_id, call.at_ns)

    async def health(self, call: Call) -> dict[str, Any]:
        """A look at the node that is no older than some seconds."""
        await self.look(_FRESH_S)
        if self._service.since_pass_s() > _STALE_S + self._service.every_s:
            raise NodeFault(
                f"the last pass over this node is {self._service.since_pass_s():,.0f} s ago",
                hint="see: gres-mig doctor",
            )
        when, found = self._look
        if isinstance(found, GresMigError):
            raise found
        if time.time() - when > _STALE_S:
            raise NodeFault(
                f"the last look at this node is {time.time() - when:,.0f} s ago", hint="see: gres-mig doctor"
            )
        return {**found, "looked": when}

    async def look(self, fresh_s: float) -> None:
        """Look at the node, unless that was done so short a time ago; all who ask meanwhile wait for one look."""
        if 0 <= time.time() - self._look[0] < fresh_s:
            return
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look_now())
        await asyncio.shield(self._looking)

    async def shelf(self) -> dict[str, Any]:
        """What the node has, counted anew when something else was published."""
        if not self._look[0]:
            # Nothing may have been published on this node yet.
            await self.look(_FRESH_S)
        key = (self.settings, _signature(os.path.join(self.settings.run_dir, "public.json")))
        if self._shelf is None or self._shelf[0] != key:
            self._shelf = key, shelf.shelf(self.settings)
        return self._shelf[1]

    async def _look_now(self) -> None:
        # All whom it concerns wait for one look, so it is nobody's turn.
        within_s = self.settings.hardware_timeout_s + 10.0
        try:
            found: dict[str, Any] | GresMigError = await self._workshop.do(
                "health", self.settings, within_s=within_s, brief=True
            )
        except GresMigError as error:
            found = error
        self._look = time.time(), found

    async def _task(self, line: Line, call: Call, task: str, *arguments: Any) -> dict[str, Any]:
        async def work() -> dict[str, Any]:
            with self._metrics.timed(task):
                answer: dict[str, Any] = await self._workshop.do(task, self.settings, *arguments, within_s=_LONGEST_S)
            return answer

        return await line.do(call.peer.account, work)

    def _state(self) -> State:
        """The records, read again when the file is another one; nothing is waited for."""
        settings = self.settings
        boot_id = machine.boot_id(settings.simulator)
        key = (boot_id, _signature(os.path.join(settings.state_dir, "state.json")))
        if self._records is None or self._records[0] != key:
            try:
                self._records = key, Store(settings, boot_id).peek()
            except Damaged as error:
                raise StateError("the node's records are damaged", hint="tell an admin: gres-mig doctor") from error
        return self._records[1]


ENDPOINTS = (
    Endpoint("GET", "/v1/service", "The service: version, configuration in force, limits", wire.Service,
             Endpoints.service),
    Endpoint("GET", "/v1/sizes", "The sizes of this node, and how many of each are free", wire.Sizes, Endpoints.sizes),
    Endpoint("GET", "/v1/why", "Whether a request would find a place now, and what is in the way", wire.Why,
             Endpoints.why, query=("memory", "profile")),
    Endpoint("GET", "/v1/health", "Whether records and hardware can be read", wire.Health, Endpoints.health),
    Endpoint("GET", "/v1/kernels", "What the caller's kernels have", wire.Kernels, Endpoints.kernels, owned=True),
    Endpoint("GET", "/v1/kernels/KERNEL", "What one of them has", wire.Kernel, Endpoints.kernel, owned=True),
    Endpoint("PUT", "/v1/kernels/KERNEL", "Get a kernel an instance, or the one it has", wire.Kernel,
             Endpoints.allocate, body=wire.Ask, owned=True),
    Endpoint("DELETE", "/v1/kernels/KERNEL", "Give back what a kernel has", wire.Reclaimed, Endpoints.reclaim,
             owned=True),
    Endpoint("POST", "/v1/kernels/KERNEL/process", "Say which process a kernel is", wire.Kernel, Endpoints.report,
             body=wire.Report, owned=True),
)  # fmt: skip


def refuse_nobody(peer: Peer) -> None:
    """Who has no user of his own on this host has no kernels on it."""
    if not peer.owns:
        raise NotPermitted(
            f"uid {peer.uid} is no user of this host (unmapped, or an id of /etc/subuid): it can own nothing",
            hint="in a container, be the user who started it (root there)",
        )


def describe(presence: Presence, settings: Settings) -> dict[str, Any]:
    """The service, as it is told to its callers."""
    return {
        "version": presence.version,
        "pid": presence.pid,
        "started": presence.started,
        "config": {
            "path": presence.config,
            "sha256": presence.sha256 or None,
            "loaded": presence.loaded,
            "error": presence.error or None,
        },
        "limits": {
            "user_memory_mib": settings.serving.memory_mib,
            "user_instances": settings.serving.instances,
            "user_requests": settings.serving.requests,
            "user_connections": settings.serving.connections,
        },
    }


def _named(profile: str) -> Request:
    if not re.fullmatch(r"[!-~]{1,64}", profile):
        raise BadRequest("nothing was asked about", hint="such as: /v1/why?memory=8G")
    return Request(0, profile)


def _signature(path: str) -> object:
    """Another one whenever the file was replaced."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size

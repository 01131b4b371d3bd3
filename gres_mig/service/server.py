"""HTTP at the unix socket: one request a connection, each with a deadline, and every error as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging

from tornado.netutil import bind_sockets
from tornado.web import Application

from gres_mig import log
from gres_mig.answers import SCHEMA, plain_error
from gres_mig.errors import Fault, GresMigError
from gres_mig.service import handlers, place
from gres_mig.service.connections import Connections
from gres_mig.service.endpoints import Call, Endpoint, Endpoints, refuse_nobody
from gres_mig.service.limits import Gate
from gres_mig.service.metrics import Metrics
from gres_mig.service.peer import Anybody, Peer, Users
from gres_mig.service.workshop import Workshop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gres_mig.service.loop import Service

_FINISH_S = 10.0
"""Seconds that what is being answered has at the end."""

_LOOK_EVERY_S = 30.0

_STATUS_OF_CODE = {"NOPERM": 403, "NOTFOUND": 404, "TOOLARGE": 413}


class Server:
    """Answers at the node's socket, and shows its metrics on loopback where a port is configured."""

    def __init__(self, service: Service, workshop: Workshop) -> None:
        # What goes wrong with a client's connection is the client's; what goes wrong here is logged here.
        logging.getLogger("tornado").setLevel(logging.CRITICAL)
        self._service = service
        self._metrics, self._told = Metrics(), ""
        self._endpoints = Endpoints(service, workshop, self._metrics)
        self._gate = Gate(
            lambda: service.settings.serving.connections,
            lambda: service.settings.serving.requests,
            asyncio.get_running_loop().call_later,
        )
        self._connections = self._take(handlers.routes(self), Users())
        self._connections.listen_at(place.listen(service.settings.run_dir))
        self._loopback: tuple[int, Connections] | None = None
        self.reloaded()
        self._looks = asyncio.ensure_future(self._look_on())

    def reloaded(self) -> None:
        """Show the metrics where the configuration in force says."""
        port = self._service.settings.serving.metrics_port
        if self._loopback and self._loopback[0] == port:
            return
        if self._loopback:
            self._loopback[1].stop()
            self._loopback = None
        if port:
            listening = self._take(handlers.metrics_only(self), Anybody())
            try:
                listening.listen_at(*bind_sockets(port, "127.0.0.1"))
            except OSError as error:
                log.error("the metrics are not shown on 127.0.0.1:%d: %s", port, error.strerror)
                return
            self._loopback = port, listening

    def _take(self, routes: list[handlers.Route], users: Users | Anybody) -> Connections:
        application = Application(list(routes), log_function=lambda handler: None)
        return Connections(application, users, self._gate, self.refuse)

    async def close(self) -> None:
        """Take nothing new, and let what is being answered come to its end, within a limit.

        The path stays: the next service takes its place, and until then nobody takes this for a node without one.
        """
        self._looks.cancel()
        self._connections.stop()
        if self._loopback:
            self._loopback[1].stop()
        self._gate.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._connections.finish(), _FINISH_S)

    async def answer(self, endpoint: Endpoint, call: Call) -> tuple[int, bytes]:
        """Status and body for one request."""
        try:
            if endpoint.owned:
                refuse_nobody(call.peer)
            answer = await endpoint.does(self._endpoints, call)
            body = endpoint.answer.model_validate(answer).model_dump_json(by_alias=True).encode()
            self._metrics.answered(endpoint.method, "ok")
            return (201 if answer.get("created") else 200), body
        except GresMigError as error:
            return self.refuse(endpoint.method, error, call.peer)

    def refuse(self, method: str, error: GresMigError, peer: Peer | None = None) -> tuple[int, bytes]:
        """Status and body for an error; who is in the way is told to no one but himself."""
        self._metrics.answered(method, error.fault.value)
        if error.fault is Fault.NODE and str(error) != self._told:
            # Once, however many ask meanwhile.
            self._told = str(error)
            log.error("%s", error)
        plain = plain_error(error)
        mine = f"jupyter:{peer.uid}:" if peer and peer.owns else "\0"
        plain["blockers"] = [blocker for blocker in error.blockers if blocker.startswith(mine)]
        return status_of(error), json.dumps({"schema": SCHEMA, "error": plain}).encode()

    async def metrics(self) -> bytes:
        """All of them as text."""
        with contextlib.suppress(GresMigError):
            self._metrics.seen(await self._endpoints.shelf(), self._service.presence, self._service.since_pass_s())
        return self._metrics.text()

    async def _look_on(self) -> None:
        while True:
            await self._endpoints.look(_LOOK_EVERY_S / 2)
            await asyncio.sleep(_LOOK_EVERY_S)


def status_of(error: GresMigError) -> int:
    """The HTTP status; what a client goes by is the fault."""
    status = error.fault.http_status
    return _STATUS_OF_CODE.get(error.code, status) if error.fault is Fault.REQUEST else status

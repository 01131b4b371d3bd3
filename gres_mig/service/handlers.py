"""What tornado calls for each request: an endpoint, the metrics, or the one line that says why not."""

from __future__ import annotations

import asyncio
from typing import Any

from tornado.web import HTTPError, RequestHandler

from gres_mig import log, machine
from gres_mig.errors import BadRequest, GresMigError, NodeFault
from gres_mig.service import openapi
from gres_mig.service.endpoints import ENDPOINTS, Call, Endpoint
from gres_mig.service.metrics import CONTENT_TYPE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gres_mig.service.peer import Peer
    from gres_mig.service.server import Server

Route = tuple[str, type[RequestHandler], dict[str, Any]]

_PATHS = "see: GET /v1/openapi.json"


def routes(server: Server) -> list[Route]:
    """All paths of the socket."""
    by_path: dict[str, dict[str, Endpoint]] = {}
    for endpoint in ENDPOINTS:
        by_path.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    return [
        *(
            (path.replace("KERNEL", "([^/]+)"), _Endpoint, {"server": server, "endpoints": endpoints})
            for path, endpoints in by_path.items()
        ),
        ("/v1/openapi.json", _Description, {"server": server}),
        *metrics_only(server),
    ]


def metrics_only(server: Server) -> list[Route]:
    """What is shown on loopback, where nobody can tell who asks."""
    return [("/metrics", _Shown, {"server": server}), (".*", _Unknown, {"server": server})]


class _Handler(RequestHandler):
    """What all of them share: JSON, no cookies, no caching, no traceback."""

    server: Server
    _answering: asyncio.Task[tuple[int, bytes]] | None = None

    def prepare(self) -> None:
        """Who asks, and when."""
        self.at_ns = machine.now_ns()
        self.peer: Peer = self.request.connection.stream.peer  # type: ignore[union-attr]

    def set_default_headers(self) -> None:
        self.set_header("Content-Type", "application/json")
        self.set_header("Cache-Control", "no-store")
        self.clear_header("Server")

    def compute_etag(self) -> None:
        """None: every answer is of its moment."""

    def check_xsrf_cookie(self) -> None:
        """There are no cookies."""

    def on_connection_close(self) -> None:
        # What waits for its turn is not begun; what has begun goes on, and whoever asks again is given it.
        if self._answering is not None:
            self._answering.cancel()

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        raised = kwargs["exc_info"][1]
        if isinstance(raised, HTTPError):
            error: GresMigError = BadRequest(f"{self.request.method} {self.request.path}: {self._reason}", hint=_PATHS)
            if status_code == 404:
                error.code = "NOTFOUND"
        else:
            log.error("%s: %r", self.request.path, raised)
            error = NodeFault(f"internal error: {type(raised).__name__}", code="INTERNAL")
        status, body = self.server.refuse(str(self.request.method), error)
        self.set_status(405 if status_code == 405 else status)
        self.finish(body)

    def log_exception(self, *_: Any) -> None:
        """It is logged where it is answered."""


class _Endpoint(_Handler):
    """The endpoints of one path."""

    def initialize(self, server: Server, endpoints: dict[str, Endpoint]) -> None:
        self.server, self._endpoints = server, endpoints

    async def _answer(self, kernel_id: str = "") -> None:
        endpoint = self._endpoints.get(str(self.request.method))
        if endpoint is None:
            raise HTTPError(405)
        call = Call(
            peer=self.peer,
            kernel_id=kernel_id,
            query={name: self.get_query_argument(name) for name in endpoint.query if name in self.request.arguments},
            body=self.request.body,
            at_ns=self.at_ns,
        )
        self._answering = asyncio.ensure_future(self.server.answer(endpoint, call))
        try:
            status, body = await self._answering
        except asyncio.CancelledError:
            return
        self.set_status(status)
        self.finish(body)

    get = put = post = delete = _answer


class _Shown(_Handler):
    """Metrics."""

    def initialize(self, server: Server) -> None:
        self.server = server

    async def get(self) -> None:
        self.set_header("Content-Type", CONTENT_TYPE)
        self.finish(await self.server.metrics())


class _Description(_Handler):
    """The OpenAPI document."""

    def initialize(self, server: Server) -> None:
        self.server = server

    def get(self) -> None:
        self.finish(openapi.text())


class _Unknown(_Handler):
    """All other paths."""

    def initialize(self, server: Server) -> None:
        self.server = server

    def prepare(self) -> None:
        """Whatever the method is."""
        super().prepare()
        raise HTTPError(404)

"""The connections at the socket: who is who, how many of each user's are read, and what is too large to be read."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.httputil import (
    HTTPConnection,
    HTTPHeaders,
    HTTPMessageDelegate,
    HTTPServerConnectionDelegate,
    RequestStartLine,
    ResponseStartLine,
)
from tornado.iostream import IOStream

from gres_mig.errors import BadRequest, GresMigError
from gres_mig.service.limits import Gate, Ticket
from gres_mig.service.peer import Anybody, Users

LARGEST = 64 << 10
"""Bytes of a request's body."""

HEADERS = 16 << 10
READ_S = 5.0
"""Seconds in which a request has to be there."""

_AT_ONCE = 16
"""Connections that are taken before anything else has its turn: few, for an answer takes several turns."""

Refuse = Callable[[str, GresMigError], tuple[int, bytes]]
"""Status and body of an error, for a method."""


class Connections(HTTPServer):
    """One request each; who has too many of them waits or is closed, before anything is made of them."""

    def __init__(self, *_: Any) -> None:
        """Tornado has its servers made by `initialize`."""

    def initialize(  # type: ignore[override]
        self, application: HTTPServerConnectionDelegate, users: Users | Anybody, gate: Gate, refuse: Refuse
    ) -> None:
        """`refuse` says what is answered to a request that is too large."""
        super().initialize(
            application,
            no_keep_alive=True,
            idle_connection_timeout=READ_S,
            body_timeout=READ_S,
            max_header_size=HEADERS,
            max_body_size=LARGEST,
            max_buffer_size=2 * LARGEST,
        )
        self._users, self._gate, self._refuse = users, gate, refuse
        self._ended = asyncio.Event()
        self._listening: socket.socket | None = None

    def listen_at(self, listening: socket.socket) -> None:
        """Take connections there."""
        self._listening = listening
        asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def stop(self) -> None:
        """Take no more."""
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None

    async def finish(self) -> None:
        """Wait for what is being read or answered."""
        while self._connections:
            self._ended.clear()
            await self._ended.wait()

    def start_request(self, server_conn: object, request_conn: HTTPConnection) -> HTTPMessageDelegate:
        """Refuse what is too large before it is read."""
        return _Bounded(super().start_request(server_conn, request_conn), request_conn, self._refuse)

    def on_close(self, server_conn: object) -> None:
        """The next one of its user."""
        super().on_close(server_conn)
        self._gate.leave(server_conn.stream.peer.account)  # type: ignore[attr-defined]
        self._ended.set()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _address = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            connection.setblocking(False)
            account = self._users.account(connection)
            self._gate.enter(Ticket(account, self._reader(connection), connection.close))

    def _reader(self, connection: socket.socket) -> Callable[[], None]:
        def read() -> None:
            stream = IOStream(connection, max_buffer_size=self.max_buffer_size, read_chunk_size=self.read_chunk_size)
            stream.peer = self._users.peer(connection)  # type: ignore[attr-defined]
            self.handle_stream(stream, ("", 0))

        return read


class _Bounded(HTTPMessageDelegate):
    """Lets a request through whose body has a length, and not too much of it."""

    def __init__(self, through: HTTPMessageDelegate, connection: HTTPConnection, refuse: Refuse) -> None:
        self._through, self._connection, self._refuse = through, connection, refuse
        self._refused = False

    def headers_received(
        self, start_line: RequestStartLine | ResponseStartLine, headers: HTTPHeaders
    ) -> Awaitable[None] | None:
        length = headers.get("Content-Length", "0")
        if "Transfer-Encoding" not in headers and not (length.isdecimal() and int(length[:20]) > LARGEST):
            return self._through.headers_received(start_line, headers)
        self._refused = True
        message = f"a request's body has at most {LARGEST:,} bytes, and says before how many"
        method = start_line.method if isinstance(start_line, RequestStartLine) else ""
        status, body = self._refuse(method, BadRequest(message, code="TOOLARGE"))
        told = HTTPHeaders(
            {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
        )
        self._connection.write_headers(ResponseStartLine("HTTP/1.1", status, "Content Too Large"), told, body)
        self._connection.finish()
        return None

    def data_received(self, chunk: bytes) -> Awaitable[None] | None:
        return None if self._refused else self._through.data_received(chunk)

    def finish(self) -> None:
        if not self._refused:
            self._through.finish()

    def on_connection_close(self) -> None:
        if not self._refused:
            self._through.on_connection_close()

"""The node service's caller: each request is one HTTP exchange over its unix socket, and blocks."""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from urllib.parse import quote, urlencode

from gres_mig import errors
from gres_mig.errors import BadRequest, GresMigError, NoCapacity, NodeFault, NotFound
from gres_mig.machine import peer_of
from gres_mig.models import Settings
from gres_mig.presence import SOCKET

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_ANSWER_S = 3.0
"""How long a service may take for what needs no hardware; its loop never waits for anything."""
_RETURNS_S = 2.0
"""How long one that is not there may take to be back: an upgrade is a restart, and every request may be repeated."""
_PAUSE_S = 0.1
_MOST_BYTES = 1 << 22


class Client:
    """Asks the service of a node for what the caller's own kernels have; safe to use from several threads.

    The service must be root's, or on a simulated node its owner's: another listener there was planted.
    """

    def __init__(self, node: Settings | str, *, timeout_s: float = 60.0) -> None:
        """`node` is the node's settings or the path of the socket; `timeout_s` is for what works on hardware."""
        simulated = isinstance(node, Settings) and node.simulator
        self.path = os.path.join(node.run_dir, SOCKET) if isinstance(node, Settings) else node
        self._trusted = {0, os.geteuid()} if simulated else {0}
        self.timeout_s = timeout_s

    def service(self) -> dict[str, Any]:
        """What the service is: version, process, configuration in force, limits."""
        return self._asked("GET", "/v1/service")

    def sizes(self) -> list[dict[str, Any]]:
        """The sizes of this node, and how many of each are free now."""
        sizes: list[dict[str, Any]] = self._asked("GET", "/v1/sizes")["sizes"]
        return sizes

    def why(self, memory: str) -> dict[str, Any]:
        """Whether a request for memory would find a place now, and if not, why."""
        return self._asked("GET", f"/v1/why?{urlencode({'memory': memory})}")

    def kernels(self) -> list[dict[str, Any]]:
        """What the caller's kernels have."""
        kernels: list[dict[str, Any]] = self._asked("GET", "/v1/kernels")["kernels"]
        return kernels

    def kernel(self, kernel_id: str) -> dict[str, Any] | None:
        """What one of them has; None where it has nothing."""
        try:
            return self._asked("GET", _kernel(kernel_id))
        except NotFound:
            return None

    def allocate(self, kernel_id: str, *, memory: str = "", profile: str = "") -> dict[str, Any]:
        """Get a kernel an instance, or the one it has."""
        # One that is stopped in a debugger, or hangs, still has connections accepted for it by the kernel.
        self.service()
        wanted = {"profile": profile} if profile else {"memory": memory}
        return self._asked("PUT", _kernel(kernel_id), wanted, wait_s=self.timeout_s)

    def report(self, kernel_id: str, pid: int) -> dict[str, Any]:
        """Say which process is the kernel; until then it lives as long as the caller, and at most a minute."""
        # It needs no hardware, but a kernel that cannot be reported is ended: it has the patience of an ask.
        return self._asked("POST", f"{_kernel(kernel_id)}/process", {"pid": pid}, wait_s=self.timeout_s)

    def reclaim(self, kernel_id: str) -> list[dict[str, Any]]:
        """Give back what a kernel has; nothing there is success."""
        answer = self._asked("DELETE", _kernel(kernel_id), wait_s=self.timeout_s)
        reclaimed: list[dict[str, Any]] = answer["reclaimed"]
        return reclaimed

    def _asked(self, method: str, path: str, body: object = None, *, wait_s: float = _ANSWER_S) -> dict[str, Any]:
        patience = time.monotonic() + _RETURNS_S
        while True:
            try:
                return self._exchange(method, path, body, wait_s)
            except (ConnectionError, FileNotFoundError, BlockingIOError) as error:
                # The last: its queue is full, and with a time limit Python does not wait in it.
                if time.monotonic() + _PAUSE_S > patience:
                    raise self._silent(error.strerror or "it closed the connection") from error
                time.sleep(_PAUSE_S)
            except TimeoutError as error:
                raise self._silent(f"nothing came within {wait_s:g} s", code="TIMEOUT") from error
            except OSError as error:
                raise self._silent(error.strerror or str(error)) from error

    def _exchange(self, method: str, path: str, body: object, wait_s: float) -> dict[str, Any]:
        connection = http.client.HTTPConnection("localhost", timeout=wait_s)
        try:
            connection.sock = self._connected(wait_s)
            headers = {"Connection": "close", "Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return self._understood(answer.status, answer.read(_MOST_BYTES))
        except http.client.RemoteDisconnected:
            raise
        except http.client.HTTPException as error:
            raise self._nonsense(repr(error)) from error
        finally:
            connection.close()

    def _connected(self, wait_s: float) -> socket.socket:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            channel.settimeout(wait_s)
            channel.connect(self.path)
            _, uid = peer_of(channel)
            if uid not in self._trusted:
                raise NodeFault(
                    f"{self.path} is not the node service's: uid {uid} listens there, not root",
                    hint="tell an admin of this machine",
                    code="NOPERM",
                )
        except BaseException:
            channel.close()
            raise
        return channel

    def _understood(self, status: int, content: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(content)
            if status < 300 and isinstance(answer, dict):
                return answer
            error = error_from(answer["error"])
        except (ValueError, KeyError, TypeError) as unreadable:
            raise self._nonsense(f"status {status}") from unreadable
        raise error

    def _silent(self, why: str, code: str = "STATE") -> NodeFault:
        return NodeFault(
            f"the node service of this node does not answer ({self.path}): {why}",
            hint="tell an admin; kernels without GPU memory start as ever",
            code=code,
        )

    def _nonsense(self, what: str) -> NodeFault:
        hint = "is it of another version? ask: gres-mig doctor"
        return NodeFault(f"the node service of this node answers what is no answer ({self.path}): {what}", hint=hint)


def error_from(plain: Mapping[str, Any]) -> GresMigError:
    """The error that was written as JSON; ValueError, KeyError or TypeError where it is none."""
    fault, code = errors.Fault(plain["fault"]), str(plain["code"])
    kind = _KINDS.get((fault, code), _PLAIN[fault])
    return kind(str(plain["message"]), hint=str(plain["hint"]), blockers=plain["blockers"], code=code)


_PLAIN: dict[errors.Fault, type[GresMigError]] = {
    errors.Fault.REQUEST: BadRequest,
    errors.Fault.CAPACITY: NoCapacity,
    errors.Fault.NODE: NodeFault,
}
_KINDS: dict[tuple[errors.Fault, str], type[GresMigError]] = {
    (kind.fault, kind.code): kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, GresMigError)
}


def _kernel(kernel_id: str) -> str:
    return f"/v1/kernels/{quote(kernel_id, safe='')}"

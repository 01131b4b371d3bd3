"""What a server answers about GPU memory under /gres-mig/api/v1: read only, and never activity of its user."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from typing import Any, TypeVar

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from tornado import web

from gres_mig.errors import GresMigError
from gres_mig_jupyter.node import Node

T = TypeVar("T")


class _Handler(APIHandler):
    """One that asks the node; an error of ours is answered with its sentence, fault and code."""

    auth_resource = "gres-mig"
    # Lab's polling must keep neither a kernel nor a server from being culled.
    _track_activity = False

    def initialize(self, node: Node) -> None:
        self._node = node

    async def _asked(self, answer: Awaitable[T]) -> T:
        try:
            return await answer
        except GresMigError as error:
            self.set_status(error.fault.http_status)
            plain = {"message": str(error), "reason": None, "fault": error.fault.value, "code": error.code}
            self.finish(json.dumps(plain))
            raise web.Finish from error


class StatusHandler(_Handler):
    """How this server gets instances, and what it holds."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        node = self._node
        told: dict[str, Any] = {"way": node.way, "reason": node.reason, "share": node.share, "service": None}
        try:
            told["service"] = await node.service()
        except GresMigError as error:
            # This is for who wants to know just that.
            told["reason"] = str(error)
        self.finish(json.dumps({**told, "allocations": list(node.held.values())}))


class ProfilesHandler(_Handler):
    """The sizes of this node, and how many of each are free now."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        self.finish(json.dumps({"profiles": await self._asked(self._node.sizes())}))


class KernelHandler(_Handler):
    """What one kernel of this server has, or why it was refused."""

    @web.authenticated
    @authorized
    async def get(self, kernel_id: str) -> None:
        allocation, error = self._node.held.get(kernel_id), self._node.refusals.get(kernel_id)
        if allocation is None and error is None:
            raise web.HTTPError(404, f"this server holds no instance for kernel {kernel_id}")
        self.finish(json.dumps({"kernel_id": kernel_id, "allocation": allocation, "error": error}))


class WhyHandler(_Handler):
    """Whether a request would find a place now, and if not, why."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        self.finish(json.dumps(await self._asked(self._node.why(self.get_argument("memory")))))


def handlers(node: Node) -> list[tuple[str, type[APIHandler], dict[str, Node]]]:
    """Paths below the server's base URL, with their handlers."""
    paths: dict[str, type[APIHandler]] = {
        "status": StatusHandler,
        "profiles": ProfilesHandler,
        r"kernels/([0-9a-f-]{36})": KernelHandler,
        "why": WhyHandler,
    }
    return [(f"/gres-mig/api/v1/{path}", handler, {"node": node}) for path, handler in paths.items()]

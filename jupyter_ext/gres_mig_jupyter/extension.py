"""The server extension: settles what earlier servers left, answers about GPU memory, and lets a server end cleanly."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Awaitable
from typing import Any

from jupyter_server.extension.application import ExtensionApp
from jupyter_server.serverapp import ServerApp
from tornado.ioloop import PeriodicCallback
from traitlets import Unicode

from gres_mig import machine
from gres_mig.errors import Fault, GresMigError
from gres_mig_jupyter.events import Events
from gres_mig_jupyter.handlers import handlers
from gres_mig_jupyter.node import Node, Refused, this_server

_EVERY_S = 5.0
_UNDONE_S = 5.0
"""How long a server that ends waits for the starts that it cancelled to give back what they got."""


class GresMig(ExtensionApp):
    """GPU memory for kernels: one MIG instance for each kernel that asks for it."""

    name = "gres_mig"
    node_config = Unicode(
        "", help="The node's config.toml, where it is not /etc/gres-mig/config.toml; GRES_MIG_CONFIG says the same."
    ).tag(config=True)

    _node: Node | None = None
    """None where loading failed; a server has to end cleanly all the same."""
    _beginning: asyncio.Task[None] | None = None
    _looking: PeriodicCallback | None = None
    _said = ""

    def initialize_handlers(self) -> None:
        """What the server answers under /gres-mig/api/v1."""
        self._node = this_server(self.node_config)
        self.handlers.extend(handlers(self._node))

    def initialize(self) -> None:  # type: ignore[override]
        """Before the first request: settle what earlier servers left, and get what this one's kernels share."""
        super().initialize()  # type: ignore[no-untyped-call]
        assert self._node is not None
        assert self._server.event_logger is not None
        self._node.listeners.append(Events(self._server.event_logger))
        self._server.log.addFilter(_without_traces)
        if self._node.way == "none":
            self.log.warning("no GPU memory for kernels: %s", self._node.reason)
            return
        loop = self._server.io_loop.asyncio_loop  # type: ignore[attr-defined]
        if loop.is_running():
            # A server that a program started in a loop of its own: requests may come first.
            self._beginning = loop.create_task(self._begin(self._node))
        else:
            loop.run_until_complete(self._begin(self._node))

    async def _start_jupyter_server_extension(self, serverapp: ServerApp) -> None:
        _hear_signals(serverapp)
        self._looking = PeriodicCallback(self._look_after, _EVERY_S * 1000)
        self._looking.start()

    async def stop_extension(self) -> None:
        """Called while the kernels still run: see that nothing keeps the server from ending them."""
        if self._looking is not None:
            self._looking.stop()
        kernels: Any = self._server.kernel_manager
        await _forget_failed(kernels, ending=True)
        if self._node is not None and self._node.shared is not None:
            # What is in use cannot be given back, so they have to be gone first. One that does not go is left to the
            # server, which tries again.
            ended = (kernels.shutdown_kernel(kernel_id) for kernel_id in kernels.list_kernel_ids())
            await asyncio.gather(*ended, return_exceptions=True)
            await self._told(self._node.reclaim(self._node.shared["kernel_id"]))

    @property
    def _server(self) -> ServerApp:
        assert self.serverapp is not None
        return self.serverapp

    async def _begin(self, node: Node) -> None:
        await self._told(_settle_what_is_left(node, sure=True))
        if node.share == "server":
            await self._told(node.share_one())

    async def _look_after(self) -> None:
        await _forget_failed(self._server.kernel_manager)
        if self._node is not None and self._node.way != "none":
            await self._told(self._node.report_late())
            await self._told(self._give_back_what_is_over(self._node))
            await self._told(_settle_what_is_left(self._node))

    async def _give_back_what_is_over(self, node: Node) -> None:
        known = {*self._server.kernel_manager.list_kernel_ids(), *node.starting}
        for kernel_id, held in list(node.held.items()):
            # One that something else in this server started, as nbclient would, is known by its process alone.
            if kernel_id not in known and held is not node.shared and not _runs(held["kernel"]):
                self.log.warning("kernel %s is over; giving back its instance", kernel_id)
                await node.reclaim(kernel_id)

    async def _told(self, work: Awaitable[object]) -> None:
        """Do it; what goes wrong with it is said once in the log, and stops nothing else."""
        try:
            await work
        except GresMigError as error:
            if str(error) != self._said:
                self.log.warning("%s", error)
            self._said = str(error)


def _without_traces(record: logging.LogRecord) -> bool:
    """Where nothing is wrong, such as on a full GPU, the sentence says it all; Jupyter logs 40 lines with it, twice."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, Refused) and error.error.fault is not Fault.NODE:
        record.exc_info = record.exc_text = None
    return True


async def _settle_what_is_left(node: Node, *, sure: bool = False) -> None:
    """What ended servers of this user left, and what was stuck; where there is a service, it does that.

    A process that only has the pid of one that ended passes for it here, unless it is to be `sure`.
    """
    if node.way == "direct":
        others = [each for each in await node.mine() if each["kernel_id"] not in node.held]
        if any(sure or each["state"] != "allocated" or not _lives(each) for each in others):
            await node.reconcile()


def _hear_signals(server: ServerApp) -> None:
    """Give kernels and instances back also where nobody would: at SIGINT without a terminal, and when one closes.

    jupyter_server (2.21) handles SIGINT only where its standard input is a terminal, and JupyterHub ends servers with
    SIGINT where it is none.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    ending: list[int] = []

    def end(number: int, frame: object) -> None:
        # Once: a second stop would run into the first one's cleaning up.
        if not ending:
            ending.append(number)
            server.stop(from_signal=True)

    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == default:
            signal.signal(number, end)


async def _forget_failed(kernels: Any, *, ending: bool = False) -> None:
    """Forget starts that failed, and with `ending` those under way, which are cancelled.

    jupyter_client (8.10) keeps the id of a failed start among the pending ones; ending it as a kernel is a 404, which
    ends the server's cleaning up before its loop is stopped: it closes its port and hangs.
    """
    pending: dict[str, asyncio.Task[None]] = getattr(kernels, "_pending_kernels", {})
    failed = {each: task for each, task in pending.items() if each not in kernels and (ending or task.done())}
    under_way = [task for task in failed.values() if task.cancel()]
    if under_way:
        await asyncio.wait(under_way, timeout=_UNDONE_S)
    for kernel_id in failed:
        pending.pop(kernel_id, None)


def _lives(held: dict[str, Any]) -> bool:
    """Whether the server or the kernel of an instance runs, as far as a pid can tell."""
    return _runs(held["server"]) or _runs(held["kernel"])


def _runs(process: dict[str, int] | None) -> bool:
    return process is not None and machine.process(process["pid"]) is not None

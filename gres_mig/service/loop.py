"""The service's life: its passes, its socket, its configuration, and its end; none of it waits for the hardware."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable

from gres_mig import __version__, log, machine, presence
from gres_mig.errors import ConfigError, GresMigError, NodeFault
from gres_mig.models import Settings
from gres_mig.mounts import refuse_a_network_file_system
from gres_mig.presence import Presence
from gres_mig.service import place
from gres_mig.service.systemd import notify
from gres_mig.service.workshop import Tasks, Workshop, run
from gres_mig.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from gres_mig.rooms import Held
    from gres_mig.service.server import Server

EVERY_S = 10.0
"""From the begin of one pass to that of the next."""

_LONGEST_PASS_S = 300.0
"""A pass that takes longer is ended: more than all deadlines of its driver calls and commands together."""

_HEARTBEAT_S = 10.0

_FIXED = ("state_dir", "run_dir", "simulator")
"""What a running service does not change: its lock, its socket and its records are there."""


class Service:
    """Does `work` every `every_s` seconds and answers at its socket, until it is told to end.

    This process imports no driver library and makes no driver call: what hangs or crashes is a child. `load` reads
    the configuration, at the start and at each SIGHUP; a wrong one is told and the last good one stays in force.
    `held` are places kept free for their owners.
    """

    def __init__(
        self,
        load: Callable[[], Settings],
        work: Callable[[Settings], None],
        *,
        every_s: float = EVERY_S,
        socket: bool = False,
        held: Callable[[Settings], Sequence[Held]] = lambda settings: (),
    ) -> None:
        self._load, self._work, self._socket, self._held = load, work, socket, held
        self.every_s = every_s
        self.settings, self._sha256 = self._read()

    def run(self) -> None:
        """Until SIGTERM or SIGINT; `Busy` when another one runs on this node."""
        refuse_a_network_file_system(self.settings.state_dir)
        lock = place.only_one(self.settings.run_dir)
        try:
            asyncio.run(self._live())
        finally:
            os.close(lock)

    def once(self) -> None:
        """One pass, beside a service or without; `NodeFault` when it failed."""
        if run(lambda: self._work(self.settings)):
            raise NodeFault("the pass over this node failed; its reason is above", hint="see: gres-mig doctor")

    async def _live(self) -> None:
        loop = asyncio.get_running_loop()
        ending = asyncio.Event()
        self._workshop = workshop = Workshop(self._tasks)
        self._last_pass = time.monotonic()
        for number, heard in (
            (signal.SIGTERM, ending.set),
            (signal.SIGINT, ending.set),
            (signal.SIGHUP, self._reload),
            (signal.SIGCHLD, workshop.look_after),
        ):
            loop.add_signal_handler(number, heard)
        # Before there is a socket, so that no child has it.
        await workshop.start()
        self._server = server = self._open(workshop)
        self._presence = self._introduce(server)
        presence.tell(self.settings.run_dir, self._presence)
        passes = asyncio.create_task(self._passes())
        notify("READY=1")
        try:
            await ending.wait()
            notify("STOPPING=1")
        finally:
            passes.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await passes
            if server is not None:
                await server.close()
            # The foreman ends now: its signal would come while the loop that hears it is being closed.
            loop.remove_signal_handler(signal.SIGCHLD)
            workshop.close()

    def _tasks(self) -> Tasks:
        """What can be done in processes of their own; this is called in the one they are forked from."""
        tasks: dict[str, Callable[..., object]] = {"pass": self._work}
        if self._socket:
            from gres_mig.service import desk

            tasks.update(desk.tasks(self._held))
        return tasks

    def _open(self, workshop: Workshop) -> Server | None:
        if not self._socket:
            return None
        try:
            from gres_mig.service.server import Server
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] not in ("tornado", "prometheus_client"):
                raise
            log.warning(
                "the socket is off: %s is not installed; run in a clone of gres-mig: pip install '.[service]'",
                error.name,
            )
            self._socket = False
            return None
        return Server(self, workshop)

    async def _passes(self) -> None:
        while True:
            began = time.monotonic()
            work = asyncio.ensure_future(self._workshop.do("pass", self.settings, within_s=_LONGEST_PASS_S, brief=True))
            try:
                while not (await asyncio.wait({work}, timeout=_HEARTBEAT_S))[0]:
                    notify("WATCHDOG=1")
                work.result()
                self._last_pass = time.monotonic()
            except GresMigError as error:
                log.error("%s", error)
            finally:
                work.cancel()
            notify("WATCHDOG=1")
            while (left := began + self.every_s - time.monotonic()) > 0:
                await asyncio.sleep(min(left, _HEARTBEAT_S))
                notify("WATCHDOG=1")

    def since_pass_s(self) -> float:
        """How long ago the last pass succeeded, or the service started."""
        return time.monotonic() - self._last_pass

    @property
    def presence(self) -> Presence:
        """What it says of itself."""
        return self._presence

    def _introduce(self, server: Server | None) -> Presence:
        me = machine.this_process()
        return Presence(
            version=__version__,
            pid=me.pid,
            start=me.start,
            started=time.time(),
            socket="" if server is None else os.path.join(self.settings.run_dir, presence.SOCKET),
            config=self.settings.config_path,
            sha256=self._sha256,
            loaded=time.time(),
        )

    def _reload(self) -> None:
        notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        tried = replace(self._presence, tries=self._presence.tries + 1, error="")
        try:
            settings, sha256 = self._read()
            for name in _FIXED:
                if getattr(settings, name) != getattr(self.settings, name):
                    raise ConfigError(
                        f"{settings.config_path}: {name} cannot change while the service runs",
                        hint="run: systemctl restart gres-mig.service",
                    )
            self.settings, self._sha256 = settings, sha256
            if self._server is not None:
                self._server.reloaded()
            tried = replace(tried, sha256=sha256, loaded=time.time())
            log.info("the configuration was read again")
        except GresMigError as error:
            tried = replace(tried, error=str(error))
            log.error("the configuration stays as it was: %s", error)
        self._presence = tried
        try:
            presence.tell(self.settings.run_dir, tried)
        except GresMigError as error:
            log.error("%s", error)
        notify("READY=1")

    def _read(self) -> tuple[Settings, str]:
        """The settings, and the digest of the very text that they are made from."""
        while True:
            settings = self._load()
            before = presence.digest(settings.config_path)
            again = self._load()
            if settings == again and before == presence.digest(again.config_path):
                return settings, before or ""

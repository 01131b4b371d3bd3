"""The node's service: a loop that does its work in children of its own, and may end at any moment without harm."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

from gres_mig import log
from gres_mig.errors import Busy, GresMigError, NodeFault, StateError
from gres_mig.files import make_folder
from gres_mig.models import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

EVERY_S = 10.0
"""From the begin of one pass to that of the next."""

_LONGEST_PASS_S = 300.0
"""A pass that takes longer is ended: more than all deadlines of its driver calls and commands together."""

_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD})

_UNIT = """\
# Written by: gres-mig setup
[Unit]
Description=gres-mig: give back what crashes and ended jobs left, wake jobs that wait for a place
After=local-fs.target gres-mig-boot.service munge.service
# Only an order: allocating and giving back work without this service, and it works without slurmd.
Before=slurmd.service

[Service]
Type=notify
ExecStart={command}
ExecReload=/bin/kill -HUP $MAINPID
# What is in a driver call is not killed with the service; it is left to end by itself.
KillMode=process
Restart=always
RestartSec=5
TimeoutStartSec=60
WatchdogSec=120

[Install]
WantedBy=multi-user.target
"""


def unit(command: str) -> str:
    """The text of gres-mig.service; `command` is a command line as systemd reads it."""
    return _UNIT.format(command=command)


class Service:
    """Runs `work` in a child every `every_s` seconds until it is told to end.

    This process imports no driver library and makes no driver call: what hangs or crashes is the child. `load` reads
    the configuration, at the start and at each SIGHUP; a wrong one is told and the last good one stays in force.
    """

    def __init__(
        self, load: Callable[[], Settings], work: Callable[[Settings], None], *, every_s: float = EVERY_S
    ) -> None:
        self._load, self._work, self._every_s = load, work, every_s
        self._settings = load()
        self._ending = False

    def run(self) -> None:
        """Until SIGTERM or SIGINT; `Busy` when another one runs on this node."""
        lock = _only_one(self._settings)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            notify("READY=1")
            while not self._ending:
                began = time.monotonic()
                self._one_pass()
                self._rest(began + self._every_s)
            notify("STOPPING=1")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(lock)

    def once(self) -> None:
        """One pass, beside a service or without; `NodeFault` when it failed."""
        child = _start(lambda: self._work(self._settings))
        if _reap(child):
            raise NodeFault("the pass over this node failed; its reason is above", hint="see: gres-mig doctor")

    def _one_pass(self) -> None:
        child = _start(lambda: self._work(self._settings))
        deadline = time.monotonic() + _LONGEST_PASS_S
        while not _is_over(child):
            if self._ending or time.monotonic() >= deadline:
                # Wherever it is, what it leaves the next pass settles.
                os.kill(child, signal.SIGKILL)
                _reap(child)
                return
            self._hear(min(deadline, time.monotonic() + 1.0))
            # The service is well as long as it watches its child; the child has a limit of its own.
            notify("WATCHDOG=1")
        notify("WATCHDOG=1")

    def _rest(self, until: float) -> None:
        while not self._ending and time.monotonic() < until:
            self._hear(until)

    def _hear(self, until: float) -> None:
        """Wait for a signal, at most until then, and do what it asks for."""
        found = signal.sigtimedwait(_SIGNALS, max(0.0, until - time.monotonic()))
        if found is None or found.si_signo == signal.SIGCHLD:
            return
        if found.si_signo == signal.SIGHUP:
            self._reload()
        else:
            self._ending = True

    def _reload(self) -> None:
        notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            self._settings = self._load()
            log.info("the configuration was read again")
        except GresMigError as error:
            log.error("the configuration stays as it was: %s", error)
        notify("READY=1")


def notify(*lines: str) -> None:
    """Tell systemd, if it started this process, how it is (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        try:
            channel.sendto("\n".join(lines).encode(), address.replace("@", "\0", 1))
        except OSError as error:
            log.warning("systemd does not hear %s: %s", lines[0], error.strerror)


def _only_one(settings: Settings) -> int:
    path = os.path.join(settings.run_dir, "service.lock")
    try:
        make_folder(settings.run_dir)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Who can open it for reading can hold a lock on it, and so keep the service from starting.
        os.fchmod(descriptor, 0o600)
    except OSError as error:
        raise StateError(f"locking {path}: {error.strerror}") from error
    try:
        # A record lock, which children do not inherit: one that hangs in a driver call must not keep the next
        # service from starting.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        raise Busy(f"the service of this node runs already (pid {holder})", hint="see: gres-mig status") from error
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _start(work: Callable[[], None]) -> int:
    # Nothing buffered may be written twice.
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _be_child(work)
    return child


def _be_child(work: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        # The service tells systemd how it is, not a child.
        os.environ.pop("NOTIFY_SOCKET", None)
        work()
        code = 0
    except GresMigError as error:
        log.error("%s", error)
    except Exception:  # noqa: BLE001 - the edge of a process: a fault of ours is told, not lost
        import traceback

        log.error("%s", traceback.format_exc())
    finally:
        os._exit(code)


def _is_over(child: int) -> bool:
    return os.waitpid(child, os.WNOHANG)[0] == child


def _reap(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

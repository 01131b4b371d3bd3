"""Tasks in processes of their own, forked from one that has loaded what they need and makes no driver call itself.

The loop stays free of the driver's library; a task starts in milliseconds, for nothing has to be imported for it; and
none inherits the loop's connections, which a call that hangs would keep open.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from gres_mig import log
from gres_mig.errors import GresMigError, NodeFault

Tasks = Mapping[str, Callable[..., Any]]

_READY = "ready"
"""The task that does nothing."""

_FOREMAN = "the process that starts the service's work"

_LARGEST = 1 << 20
"""More than one message may have; the kernel refuses what is longer than its own limit."""

_RESET = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE)


class Workshop:
    """`load` says what tasks there are; it is called in the foreman, the process from which they are forked."""

    def __init__(self, load: Callable[[], Tasks]) -> None:
        self._load = load
        self._channel: socket.socket | None = None
        self._foreman = 0
        self._numbers = 0
        self._open: dict[int, asyncio.Future[Any]] = {}

    async def do(self, task: str, *arguments: Any, within_s: float, brief: bool = False) -> Any:
        """What the task returns, or raises; one that takes longer than `within_s` is killed.

        A `brief` one is killed with the service too: whatever it leaves, the next one settles.
        """
        channel = self._channel or self._start()
        self._numbers += 1
        number = self._numbers
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            channel.send(pickle.dumps(("do", number, task, arguments, brief)))
            return await asyncio.wait_for(answer, within_s)
        except asyncio.TimeoutError as error:
            self._end(number)
            raise NodeFault(f"{task} took longer than {within_s:g} s and was ended", code="INTERNAL") from error
        except OSError as error:
            # It is not that there is too much of it: what is asked of it at once has a bound, and far less than fits.
            raise NodeFault(
                f"{_FOREMAN} does not answer: {error.strerror}", hint="ask again", code="INTERNAL"
            ) from error
        except asyncio.CancelledError:
            if brief:
                self._end(number)
            raise
        finally:
            self._open.pop(number, None)

    async def start(self) -> None:
        """Load what the tasks need; `NodeFault` where that fails."""
        await self.do(_READY, within_s=60.0)

    def look_after(self) -> None:
        """To be called when a child has ended: a foreman that was killed is replaced at the next task."""
        # Its end of the channel does not tell: what it started may still hold it, in a call that hangs.
        if self._channel is not None and os.waitpid(self._foreman, os.WNOHANG)[0]:
            self._foreman_is_gone()

    def close(self) -> None:
        """Ends the foreman and the brief tasks; others go on to their end without the service."""
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
            self._channel = None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._foreman = _fork(lambda: _be_foreman(theirs, self._load))
        theirs.close()
        asyncio.get_running_loop().add_reader(ours, self._hear)
        self._channel = ours
        return ours

    def _end(self, number: int) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.send(pickle.dumps(("end", number, "", (), False)))

    def _hear(self) -> None:
        assert self._channel is not None
        try:
            data = self._channel.recv(_LARGEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # It ends by itself at no time; that it did, its signal tells.
            asyncio.get_running_loop().remove_reader(self._channel)
            return
        number, good, value = pickle.loads(data)
        answer = self._open.get(number)
        if answer is not None and not answer.done():
            if good:
                answer.set_result(value)
            else:
                answer.set_exception(value)

    def _foreman_is_gone(self) -> None:
        self.close()
        gone = NodeFault(f"{_FOREMAN} has ended", hint="ask again", code="INTERNAL")
        log.error("%s", gone.message)
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(gone)


def run(work: Callable[[], None]) -> int:
    """The exit code of a process of its own that does it; it logs what it raises."""
    return os.waitstatus_to_exitcode(os.waitpid(_fork(work), 0)[1])


def _fork(work: Callable[[], None]) -> int:
    # Nothing buffered may be written twice.
    sys.stdout.flush()
    sys.stderr.flush()
    # Until the child has handlers of its own, a signal to it would be taken for one to the loop.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _RESET)
    child = os.fork()
    if child == 0:
        _be_child(work)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return child


def _be_child(work: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in _RESET:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _RESET)
        # The service tells systemd how it is, not a child.
        os.environ.pop("NOTIFY_SOCKET", None)
        work()
        code = 0
    except GresMigError as error:
        log.error("%s", error)
    except Exception:  # noqa: BLE001 - the edge of a process: a fault of ours is told, not lost
        log.error("%s", _traceback())
    finally:
        os._exit(code)


def _be_foreman(channel: socket.socket, load: Callable[[], Tasks]) -> None:
    # A session of its own: Ctrl-C in a terminal is for the service alone.
    os.setsid()
    _let_go_of_all_but(channel.fileno())
    tasks = {_READY: lambda: None, **load()}
    gc.freeze()
    heard, waker = socket.socketpair()
    for end in (heard, waker):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    working: dict[int, tuple[int, bool]] = {}
    while True:
        ready = select.select([channel, heard], [], [])[0]
        if heard in ready:
            heard.recv(4096)
            _reap(channel, working)
        if channel not in ready:
            continue
        data = channel.recv(_LARGEST)
        if not data:
            break
        word, number, task, arguments, brief = pickle.loads(data)
        if word == "do":
            work = _worker(channel, number, tasks[task], arguments)
            working[_fork(work)] = (number, brief)
        else:
            _kill(pid for pid, (wanted, _) in working.items() if wanted == number)
    _kill(pid for pid, (_, brief) in working.items() if brief)


def _worker(
    channel: socket.socket, number: int, task: Callable[..., Any], arguments: tuple[Any, ...]
) -> Callable[[], None]:
    def work() -> None:
        try:
            good, value = True, task(*arguments)
        except GresMigError as error:
            good, value = False, error
        except Exception as error:  # noqa: BLE001 - the edge of a process: a fault of ours is told, not lost
            log.error("%s", _traceback())
            good, value = False, NodeFault(f"internal error: {type(error).__name__}", code="INTERNAL")
        # Whoever asked may be gone: what is done is done, and recorded.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            channel.send(pickle.dumps((number, good, value)))

    return work


def _reap(channel: socket.socket, working: dict[int, tuple[int, bool]]) -> None:
    for pid in list(working):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            number, _ = working.pop(pid)
            # For those that could not say how it went; to the others nobody listens any more.
            ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {status >> 8}"
            fault = NodeFault(f"the process that did the work ended by itself ({ended})", hint="ask again")
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                channel.send(pickle.dumps((number, False, fault)))


def _kill(pids: Any) -> None:
    for pid in list(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _let_go_of_all_but(kept: int) -> None:
    """Put /dev/null in the place of what the loop has open: not closed, for objects that still know the numbers would
    close what gets them next."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in (kept, null):
            with contextlib.suppress(OSError):
                os.fstat(descriptor)
                os.dup2(null, descriptor, inheritable=False)


def _traceback() -> str:
    import traceback

    return traceback.format_exc()

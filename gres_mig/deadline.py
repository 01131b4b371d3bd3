"""Runs one operation in a child of its own, so that a driver call that never returns takes only the child along."""

from __future__ import annotations

import fcntl
import os
import pickle
import select
import signal
import struct
import time
from collections.abc import Callable

from gres_mig import log, machine
from gres_mig.allocator import Allocator
from gres_mig.errors import GresMigError, NodeFault, TimedOut
from gres_mig.models import Fence, Intent, Settings
from gres_mig.settle import as_release
from gres_mig.state import Store
from gres_mig.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn, TypeVar

    T = TypeVar("T")

_HEAD = struct.Struct("!cI")
_WATCH, _LOG, _DONE, _FAILED = b"w", b"l", b"d", b"f"


def operate(settings: Settings, operation: Callable[[Allocator], T], **hooks: Any) -> T:
    """What `operation` returns on this node's allocator; `TimedOut` when the hardware took longer than it may.

    The process inside the driver call is the one that holds the GPU's lock, so giving up never frees the GPU: it is
    fenced, what was begun becomes a release, and whoever gets the lock next settles it. `hooks` go to `Allocator`.
    """
    boot_id = machine.boot_id(settings.simulator)
    store = Store(settings, boot_id)
    parent = os.getpid()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        # A caller without standard descriptors, as a daemon may be, has got the pipe at one of their numbers.
        writing = fcntl.fcntl(writing, fcntl.F_DUPFD_CLOEXEC, 3)

        def work() -> T:
            return operation(
                Allocator(
                    settings,
                    store,
                    boot_id,
                    wanted=lambda: os.getppid() == parent and not _broken(writing),
                    watch=lambda gpu_uuid: _send(writing, _WATCH, gpu_uuid),
                    **hooks,
                )
            )

        _be_child(writing, work)
    os.close(writing)
    try:
        result: T = _wait(reading, child, settings, store)
        return result
    finally:
        os.close(reading)


def _be_child(writing: int, work: Callable[[], object]) -> NoReturn:
    # A session of its own and nothing of the caller's open: whoever waits for the caller's output or its process
    # group does not wait for a driver call that hangs.
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    log.send_to(lambda level, line: _send(writing, _LOG, (level, line)))
    try:
        try:
            message, value = _DONE, work()
        except GresMigError as error:
            message, value = _FAILED, error
        except Exception as error:  # noqa: BLE001 - the edge of a process: a fault of ours is told, not lost
            import traceback

            log.error("%s", traceback.format_exc())
            fault = NodeFault(f"internal error: {type(error).__name__}: {error}", code="INTERNAL")
            message, value = _FAILED, fault
        _send(writing, message, value)
    finally:
        os._exit(0)


def _send(writing: int, message: bytes, value: object) -> None:
    data = pickle.dumps(value)
    try:
        view = memoryview(_HEAD.pack(message, len(data)) + data)
        while view:
            view = view[os.write(writing, view) :]
    except BrokenPipeError:
        # The caller has given up; what is under way is undone at the commit, where `wanted` says so.
        return


def _broken(writing: int) -> bool:
    # A caller that has given up has closed its end; a service lives on, so that its being there says nothing.
    poll = select.poll()
    poll.register(writing, 0)
    return bool(poll.poll(0))


def _wait(reading: int, child: int, settings: Settings, store: Store) -> Any:
    where, deadline = "", 0.0
    while True:
        limit = max(0.0, deadline - time.monotonic()) if where else None
        if not select.select([reading], [], [], limit)[0]:
            _give_up(child, where, settings, store)
        head = _receive(reading, _HEAD.size)
        if head is None:
            _, status = os.waitpid(child, 0)
            raise NodeFault(
                f"the process that worked on the hardware ended by itself ({_ending(status)})",
                hint="what it left is settled by the next operation; see: gres-mig status",
                code="INTERNAL",
            )
        message, length = _HEAD.unpack(head)
        value = pickle.loads(_receive(reading, length) or b"")
        if message == _WATCH:
            where, deadline = value, time.monotonic() + settings.hardware_timeout_s
            continue
        if message == _LOG:
            log.relay(*value)
            continue
        os.waitpid(child, 0)
        if message == _FAILED:
            raise value
        return value


def _give_up(child: int, where: str, settings: Settings, store: Store) -> NoReturn:
    reason = f"a driver call did not return within {settings.hardware_timeout_s:g} s"
    fenced = where.startswith("GPU-")
    with store.transaction() as node:
        state = node.state
        for record in state.records:
            # As a release it cannot be committed to somebody who was told that there is nothing.
            if isinstance(record, Intent) and record.maker.pid == child:
                state = state.put(as_release(record))
        if fenced:
            state = replace(state, fences={**state.fences, where: Fence(f"{reason} (pid {child})", time.time())})
        node.save(state, giving_back=True)
    raise TimedOut(
        f"{where}: {reason}" + ("; it is fenced" if fenced else ""),
        hint=f"when the GPU answers again, run: gres-mig unfence {where}" if fenced else "see: gres-mig doctor",
    )


def _receive(reading: int, length: int) -> bytes | None:
    data = b""
    while len(data) < length:
        part = os.read(reading, length - len(data))
        if not part:
            return None
        data += part
    return data


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"

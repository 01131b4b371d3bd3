"""A program that runs operations of the allocator, in processes that can be killed or stopped midway.

`python steps.py [--breakage NAME]` reads one JSON request a line and answers each with one line; tests/driver.py
talks to it. It forks, so that such a process costs milliseconds; what nobody disturbs runs in the program itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import breakages
from points import Points

from gres_mig import machine, simulator
from gres_mig.allocator import Allocator, environment_only
from gres_mig.errors import GresMigError, NodeFault
from gres_mig.models import Gpu, Instance, Owner, Process, Record, Request, Settings
from gres_mig.state import Store
from gres_mig.witnesses import witnesses_alive


def settings_of(folder: Path, lock_wait_s: float = 30.0) -> Settings:
    """A node of these tests: everything managed, and no time in which anything counts as young."""
    return Settings(
        state_dir=str(folder / "state"),
        run_dir=str(folder / "run"),
        simulator=str(folder / "node"),
        managed=("*",),
        bare_grace_s=0.0,
        young_s=0.0,
        in_use_wait_s=0.0,
        lock_wait_s=lock_wait_s,
        # Below a folder whose files are watched.
        dcgm_mapping=str(folder / "run" / "mapping"),
    )


class Child:
    """One operation's process, seen through its pipe and `waitpid`."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.events, writing = os.pipe()
        self.buffer = b""
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.events)
            _work(request, writing)
        os.close(writing)
        self.status: int | None = None
        self.said: dict[str, Any] = {"pid": self.pid, "answer": None}

    def next(self) -> dict[str, Any]:
        """What it told so far and what became of it: `waiting` for a lock, `stopped`, `killed` or `ended`."""
        while True:
            while b"\n" not in self.buffer:
                part = os.read(self.events, 1 << 16)
                if not part:
                    return {**self.said, "state": "killed" if self._end() < 0 else "ended"}
                self.buffer += part
            line, _, self.buffer = self.buffer.partition(b"\n")
            event = json.loads(line)
            kind = event.pop("event")
            self.said.update(event)
            if kind == "waiting":
                return {**self.said, "state": "waiting"}
            if kind == "signalled" and self._is_stopped():
                return {**self.said, "state": "stopped"}

    def _is_stopped(self) -> bool:
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            return True
        self.status = status
        return False

    def _end(self) -> int:
        os.close(self.events)
        if self.status is None:
            _, self.status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(self.status)


def _undisturbed(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return _answer(Path(request["folder"]), request, machine.now_ns())
    finally:
        # The next node may stand in the same folder.
        simulator.uninstall()


def _work(request: dict[str, Any], writing: int) -> None:
    # When the asking hook began; what runs before the first step is no step.
    begin = machine.now_ns()
    folder = Path(request["folder"])

    def tell(event: dict[str, Any]) -> None:
        os.write(writing, json.dumps(event).encode() + b"\n")

    points = Points(
        folder,
        tell,
        at=request["at"],
        signal_number=request["signal"],
        trace=request["trace"],
        then_kill=request["then_kill"],
    )
    try:
        points.install()
        answer = _answer(folder, request, begin)
        points.around("the answer", lambda: tell({"event": "answered", "answer": answer}))
        tell({"event": "traced", "reached": points.reached, "past": points.past})
    finally:
        os._exit(0)


def _answer(folder: Path, request: dict[str, Any], begin: int) -> dict[str, Any]:
    settings = settings_of(folder, request["lock_wait_s"])
    boot_id = machine.boot_id(settings.simulator)

    def alive(record: Record) -> bool | None:
        return False if str(record.owner) in request["dead"] else witnesses_alive(record)

    guard = _refuse if request["refusing_guard"] else environment_only
    allocator = Allocator(settings, Store(settings, boot_id), boot_id, alive=alive, guard=guard)
    try:
        return {"value": _OPERATIONS[request["operation"]](allocator, request, begin)}
    except GresMigError as error:
        return {"fault": error.fault.value, "code": error.code, "message": str(error)}
    except Exception:  # noqa: BLE001 - the edge of the process: the test says what it was
        return {"fault": "crash", "code": "", "message": traceback.format_exc()}


def _refuse(gpu: Gpu, instance: Instance) -> str:
    raise NodeFault(f"no device node of GPU instance {instance.id} of {gpu.uuid} can be locked", code="GUARD")


def _allocate(allocator: Allocator, request: dict[str, Any], begin: int) -> dict[str, Any]:
    witnesses = tuple(Process(*process) for process in request["witnesses"])
    wanted = Request(request["memory_mib"])
    grant = allocator.allocate(Owner(request["owner"]), wanted, begin=begin, witnesses=witnesses)
    return {**_plain(grant.allocation), "created": grant.created}


def _adopt(allocator: Allocator, request: dict[str, Any], begin: int) -> dict[str, Any]:
    return _plain(allocator.adopt(Owner(request["owner"]), *request["instance"]))


def _reclaim(allocator: Allocator, request: dict[str, Any], begin: int) -> list[list[str]]:
    outcomes = allocator.reclaim(Owner(request["owner"]), begin=begin)
    return [[str(outcome.record.owner), outcome.verdict] for outcome in outcomes]


def _reconcile(allocator: Allocator, request: dict[str, Any], begin: int) -> list[list[str]]:
    return [[str(outcome.record.owner), outcome.verdict] for outcome in allocator.reconcile()]


def _reclaim_foreign(allocator: Allocator, request: dict[str, Any], begin: int) -> int:
    return allocator.reclaim_foreign(*request["instance"]).id


_OPERATIONS: dict[str, Callable[[Allocator, dict[str, Any], int], Any]] = {
    "allocate": _allocate,
    "adopt": _adopt,
    "reclaim": _reclaim,
    "reconcile": _reconcile,
    "reclaim_foreign": _reclaim_foreign,
}


def _plain(allocation: Any) -> dict[str, Any]:
    return {
        "gpu_uuid": allocation.gpu_uuid,
        "gi_id": allocation.gi_id,
        "profile_id": allocation.profile_id,
        "start": allocation.placement.start,
        "mig_uuid": allocation.mig_uuid,
    }


def main() -> None:
    """Serve until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--breakage", choices=["", *breakages.BREAKAGES], default="")
    name = parser.parse_args().breakage
    if name:
        breakages.BREAKAGES[name]()
    logging.getLogger("gres_mig").addHandler(logging.NullHandler())
    _load_everything()
    # Children share what is here until they write to it, and a collection writes to all of it.
    gc.freeze()
    children: dict[int, Child] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "run":
            print(json.dumps({"pid": os.getpid(), "state": "ended", "answer": _undisturbed(request)}), flush=True)
            continue
        if request["do"] == "start":
            child = Child(request)
            children[child.pid] = child
        else:
            child = children[request["pid"]]
        if request["do"] == "continue":
            os.kill(child.pid, signal.SIGCONT)
        said = child.next()
        if said["state"] in ("ended", "killed"):
            del children[child.pid]
        print(json.dumps(said), flush=True)


def _load_everything() -> None:
    # What every process would load for itself, each time anew.
    with tempfile.TemporaryDirectory() as folder:
        simulator.create(Path(folder, "node"), [("rtx-pro-6000", 1), ("a100-40", 1)])
        settings = settings_of(Path(folder))
        allocator = Allocator(settings, Store(settings, "boot"), "boot")
        owner = Owner("manual:first")
        allocator.allocate(owner, Request(1))
        allocator.reclaim(owner)
        simulator.uninstall()


if __name__ == "__main__":
    main()

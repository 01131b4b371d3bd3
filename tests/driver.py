"""The other end of tests/steps.py: starts operations, stops, continues and ends them, and hears what they answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CAPACITY = "capacity"


@dataclass(frozen=True)
class Operation:
    """What one process of the product is asked to do."""

    name: str
    owner: str = ""
    memory_mib: int = 0
    instance: tuple[str, int] = ("", -1)
    """The GPU and the GPU instance that an admin names."""
    witnesses: tuple[tuple[int, int], ...] = ()
    refusing_guard: bool = False

    def __str__(self) -> str:
        return f"{self.name}({self.owner})" if self.owner else self.name


@dataclass(frozen=True)
class Point:
    """A place between two effects: its label, the locks held there, and what tells apart what a crash there leaves."""

    label: str
    held: tuple[str, ...]
    core: str
    """Of the hardware and the files in which things are kept, without those that are being written."""
    files: str
    """Of all files."""


@dataclass(frozen=True)
class Told:
    """What is known of a process: `ended`, `killed`, `stopped` or `waiting`, and its answer if it gave one."""

    pid: int
    state: str
    answer: dict[str, Any] | None = None
    label: str = ""
    """Where it was signalled."""
    held: tuple[str, ...] = ()
    lock: str = ""
    """What it waits for."""
    reached: tuple[Point, ...] = ()
    past: tuple[str, ...] = ()
    """Changes of files that no point saw."""

    @property
    def value(self) -> Any:
        """The answer, where it is no error."""
        return self.answer.get("value") if self.answer else None

    @property
    def code(self) -> str:
        """The code of the error that was answered."""
        return self.answer.get("code", "") if self.answer else ""

    @property
    def fault(self) -> str:
        """Whose fault the error is."""
        return self.answer.get("fault", "") if self.answer else ""


@dataclass
class Driver:
    """The driver program, with or without the design broken on purpose."""

    breakage: str = ""
    lock_wait_s: float = 0.005
    """Short, for whoever finds a lock taken by a process that is stopped waits this long for nothing."""
    _forks: subprocess.Popen[str] = field(init=False)
    """Starts a process an operation, and runs nothing itself: each begins as the one before it did."""
    _runs: subprocess.Popen[str] = field(init=False)
    """Runs operations itself, as the node's service does."""

    def __enter__(self) -> Driver:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        self._forks, self._runs = self._program(), self._program()
        return self

    def __exit__(self, *_: object) -> None:
        self._forks.communicate()
        self._runs.communicate()

    def run(self, folder: Path, operation: Operation, *, dead: tuple[str, ...] = ()) -> Told:
        """Run it, undisturbed, with those owners known to be dead."""
        return self._ask("run", folder, operation, dead=dead)

    def start(self, folder: Path, operation: Operation) -> Told:
        """Run it in a process of its own, and hear from it when it ended or waits."""
        return self._ask("start", folder, operation)

    def trace(self, folder: Path, operation: Operation) -> Told:
        """Run it in a process of its own and hear of all its points."""
        return self._ask("start", folder, operation, trace=True)

    def kill(self, folder: Path, operation: Operation, at: int) -> Told:
        """Run it in a process of its own, which kills itself at that point."""
        return self._ask("start", folder, operation, at=at, signal_number=signal.SIGKILL)

    def stop(self, folder: Path, operation: Operation, at: int, *, then_kill: bool = False) -> Told:
        """Run it until it stops at that point; with `then_kill` it dies at the next change of the hardware."""
        return self._ask("start", folder, operation, at=at, signal_number=signal.SIGSTOP, then_kill=then_kill)

    def go_on(self, stopped: Told) -> Told:
        """Continue one that is stopped."""
        return self._tell({"do": "continue", "pid": stopped.pid})

    def finish(self, running: Told) -> Told:
        """Hear from one that runs or waits, until it ended or was killed."""
        while running.state not in {"ended", "killed"}:
            running = self._tell({"do": "hear", "pid": running.pid})
        return running

    def _ask(
        self,
        how: str,
        folder: Path,
        operation: Operation,
        *,
        at: int = -1,
        signal_number: int = 0,
        trace: bool = False,
        then_kill: bool = False,
        dead: tuple[str, ...] = (),
    ) -> Told:
        return self._tell(
            {
                "do": how,
                "folder": str(folder),
                "operation": operation.name,
                "owner": operation.owner,
                "memory_mib": operation.memory_mib,
                "instance": operation.instance,
                "witnesses": operation.witnesses,
                "refusing_guard": operation.refusing_guard,
                "at": at,
                "signal": int(signal_number),
                "trace": trace,
                "then_kill": then_kill,
                "dead": dead,
                "lock_wait_s": self.lock_wait_s,
            }
        )

    def _program(self) -> subprocess.Popen[str]:
        command = [sys.executable, str(ROOT / "tests" / "steps.py"), f"--breakage={self.breakage}"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def _tell(self, request: dict[str, Any]) -> Told:
        program = self._runs if request["do"] == "run" else self._forks
        assert program.stdin
        assert program.stdout
        print(json.dumps(request), file=program.stdin, flush=True)
        said = json.loads(program.stdout.readline())
        points = tuple(Point(p["label"], tuple(p["held"]), p["core"], p["files"]) for p in said.pop("reached", ()))
        said["held"], said["past"] = tuple(said.get("held", ())), tuple(said.get("past", ()))
        return Told(**said, reached=points)

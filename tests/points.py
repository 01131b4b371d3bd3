"""Where a process meets the driver and the file system: before and after every such call it can be killed or stopped.

Nothing in here names a step of the workflow. A point is any call through pynvml and any call of `os` or `fcntl` that
changes a file below the watched folders or locks it, so a new step is a new point by itself.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pynvml

from gres_mig.simulator.library import Library

_BY_PATH = (
    "open", "replace", "rename", "unlink", "remove", "rmdir", "mkdir", "link", "symlink", "truncate", "chmod", "chown",
)  # fmt: skip
_BY_DESCRIPTOR = ("write", "pwrite", "close", "fsync", "fdatasync", "ftruncate", "fchmod", "posix_fallocate")
_LOCKS = ("flock", "lockf")
_CHANGES = frozenset(
    {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Points:
    """Counts the points of one process; `at` one of them it signals itself."""

    def __init__(
        self,
        folder: Path,
        tell: Callable[[dict[str, Any]], None],
        *,
        at: int = -1,
        signal_number: int = 0,
        trace: bool = False,
        then_kill: bool = False,
    ) -> None:
        self.reached: list[dict[str, Any]] = []
        self.past: list[str] = []
        """Changes of watched files that no point saw; there must be none."""
        self._state, self._hardware, self._tell = folder / "state", folder / "node" / "hardware.json", tell
        self._folders = (self._state, folder / "run")
        self._watched = tuple(f"{watched}{os.sep}" for watched in self._folders)
        self._at, self._signal, self._trace, self._then_kill = at, signal_number, trace, then_kill
        self._count = self._depth = 0
        self._files: dict[int, str] = {}
        self._held: set[str] = set()
        self._kill_when_not: str | None = None

    def install(self) -> None:
        """Put points around every such call of this process, for as long as it lives."""
        for module, names, wrapper in (
            (os, _BY_PATH, self._by_path),
            (os, _BY_DESCRIPTOR, self._by_descriptor),
            (fcntl, _LOCKS, self._lock),
        ):
            for name in names:
                setattr(module, name, wrapper(name, getattr(module, name)))
        pynvml.nvmlLib = _Library(self._hardware.parent, self)
        pynvml._nvmlGetFunctionPointer_cache.clear()
        if self._trace:
            sys.addaudithook(self._audit)

    def around(self, name: str, call: Callable[[], Any]) -> Any:
        """What `call` returns, with a point before and after it; calls inside it have none."""
        if self._depth:
            return call()
        self._reach(f"before {name}")
        self._depth += 1
        try:
            return call()
        finally:
            self._depth -= 1
            self._reach(f"after {name}")

    def _reach(self, label: str) -> None:
        number, self._count = self._count, self._count + 1
        if self._trace:
            self.reached.append({"label": label, "held": sorted(self._held), **self._fingerprints()})
        if self._kill_when_not is not None and _signature([self._hardware]) != self._kill_when_not:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == self._at:
            self._tell({"event": "signalled", "label": label, "held": sorted(self._held)})
            os.kill(os.getpid(), self._signal)
            if self._then_kill:
                self._kill_when_not = _signature([self._hardware])

    def _fingerprints(self) -> dict[str, str]:
        kept = _signature(path for path in self._state.glob("*") if path.suffix != ".new")
        everything = _signature(path for folder in self._folders for path in folder.glob("*"))
        hardware = _signature([self._hardware])
        return {"core": hardware + kept, "files": hardware + everything}

    def _is_watched(self, path: object) -> bool:
        return isinstance(path, (str, bytes, os.PathLike)) and os.path.abspath(os.fsdecode(path)).startswith(
            self._watched
        )

    def _by_path(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any, *arguments: Any, **named: Any) -> Any:
            if not self._is_watched(path):
                return call(path, *arguments, **named)
            found = self.around(f"{name} {os.path.basename(path)}", lambda: call(path, *arguments, **named))
            if name == "open":
                self._files[found] = os.path.basename(path)
            return found

        return wrapped

    def _by_descriptor(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(descriptor: Any, *arguments: Any, **named: Any) -> Any:
            if descriptor not in self._files:
                return call(descriptor, *arguments, **named)

            def calling() -> Any:
                result = call(descriptor, *arguments, **named)
                if name == "close":
                    self._held.discard(self._files.pop(descriptor))
                return result

            return self.around(f"{name} {self._files[descriptor]}", calling)

        return wrapped

    def _lock(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(descriptor: Any, operation: int, *arguments: Any) -> Any:
            if descriptor not in self._files:
                return call(descriptor, operation, *arguments)

            def calling() -> Any:
                if not operation & fcntl.LOCK_NB:
                    try:
                        call(descriptor, operation | fcntl.LOCK_NB, *arguments)
                    except BlockingIOError:
                        self._tell({"event": "waiting", "lock": self._files[descriptor]})
                result = call(descriptor, operation, *arguments)
                self._held.add(self._files[descriptor])
                return result

            return self.around(f"{name} {self._files[descriptor]}", calling)

        return wrapped

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._depth:
            return
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING
        if (writes or event in _CHANGES) and any(self._is_watched(path) for path in arguments[:2]):
            self.past.append(f"{event} {arguments[0]}")


class _Library(Library):
    """The simulator's library with a point before and after every call."""

    def __init__(self, folder: Path, points: Points) -> None:
        super().__init__(folder)
        self._points = points

    def __getattr__(self, name: str) -> Any:
        return _Symbol(super().__getattr__(name), name, self._points)


class _Symbol:
    restype: Any = None

    def __init__(self, symbol: Callable[..., Any], name: str, points: Points) -> None:
        self._symbol, self._name, self._points = symbol, name, points

    def __call__(self, *arguments: Any) -> Any:
        return self._points.around(self._name, lambda: self._symbol(*arguments))


def _signature(paths: Iterable[Path]) -> str:
    """What is another text once one of these files was changed or replaced: each is replaced whole, or grows."""
    found = ((path.name, path.stat()) for path in sorted(paths))
    return "".join(f"{name} {status.st_ino} {status.st_size} {status.st_mtime_ns};" for name, status in found)

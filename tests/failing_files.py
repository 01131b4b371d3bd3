"""Fails calls of the operating system on files below some folders; for a process that ends afterwards."""

from __future__ import annotations

import builtins
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Files:
    """Stands between this process and the files below `folders`, and counts what is done to them.

    The `nth` call that opens, writes, syncs, links or replaces one of them fails with `code`. On a `full` disk
    nothing grows until the file `spare` is removed.
    """

    def __init__(self, *folders: str, nth: int = 0, code: int = 0, full: bool = False) -> None:
        self._folders = tuple(f"{os.path.abspath(folder)}{os.sep}" for folder in folders)
        self._nth, self._code, self._full = nth, code, full
        self._opened: dict[int, str] = {}
        self.count = 0
        for name in ("open", "link", "replace", "unlink"):
            setattr(os, name, self._by_path(getattr(os, name)))
        for name in ("write", "fsync", "fchmod", "posix_fallocate"):
            setattr(os, name, self._by_descriptor(name, getattr(os, name)))
        builtins.open = self._by_path(builtins.open)
        self._close = os.close
        setattr(os, "close", self._forget)  # noqa: B010 - as the others above

    def _by_path(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **named: Any) -> Any:
            mine = isinstance(path, (str, Path)) and f"{os.path.abspath(path)}{os.sep}".startswith(self._folders)
            if mine:
                self._step(str(path))
            result = real(path, *arguments, **named)
            if mine and type(result) is int:
                self._opened[result] = str(path)
            if mine and real.__name__ == "unlink" and str(path).endswith("spare"):
                self._full = False
            return result

        return call

    def _by_descriptor(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: int, *arguments: Any) -> Any:
            if descriptor in self._opened:
                self._step(self._opened[descriptor])
                if self._full and name in ("write", "posix_fallocate"):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, *arguments)

        return call

    def _step(self, path: str) -> None:
        self.count += 1
        if self.count == self._nth:
            raise OSError(self._code, os.strerror(self._code), path)

    def _forget(self, descriptor: int) -> None:
        self._opened.pop(descriptor, None)
        self._close(descriptor)

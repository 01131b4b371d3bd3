"""Stands in for libnvidia-ml.so.1 below the unmodified pynvml: its symbols, and how each call is served."""

from __future__ import annotations

import json
import os
import time

from . import codes, compute, devices, faults, instances, limits, memory, usage
from .codes import Refused
from .hardware import Store
from .session import COMPUTE_INSTANCE, DEAD, GPU_INSTANCE, Function, Session, handle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from .schema import Fault

_SYMBOLS: dict[str, Function] = {
    **devices.SYMBOLS,
    **usage.SYMBOLS,
    **instances.SYMBOLS,
    **compute.SYMBOLS,
    **limits.SYMBOLS,
}

_HANDLE_MADE = {
    "nvmlDeviceCreateGpuInstance": GPU_INSTANCE,
    "nvmlDeviceCreateGpuInstanceWithPlacement": GPU_INSTANCE,
    "nvmlGpuInstanceCreateComputeInstance": COMPUTE_INSTANCE,
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement": COMPUTE_INSTANCE,
}

MUTATING = frozenset(
    {
        *_HANDLE_MADE,
        "nvmlDeviceSetMigMode",
        "nvmlDeviceSetMemoryLimits_v1",
        "nvmlGpuInstanceDestroy",
        "nvmlComputeInstanceDestroy",
    }
)
"""What changes how a GPU is divided."""

_COUNT_ARGUMENT = {
    "nvmlDeviceGetGpuInstances": 3,
    "nvmlGpuInstanceGetComputeInstances": 3,
    "nvmlDeviceGetGpuInstancePossiblePlacements_v2": 3,
    "nvmlGpuInstanceGetComputeInstancePossiblePlacements": 3,
    "nvmlDeviceGetComputeRunningProcesses_v3": 1,
    "nvmlDeviceGetCount_v2": 0,
}

_NO_HANDLE = ("nvmlSystem", "nvmlDeviceGetHandleBy", "nvmlDeviceGetCount", "nvmlInit", "nvmlShutdown")


class Library:
    """What pynvml takes for the shared library: an attribute is a symbol; what is not simulated is missing."""

    def __init__(self, folder: Path | str) -> None:
        self.store = Store(folder)
        self.session = Session(self.store)

    def __getattr__(self, name: str) -> Symbol:
        driver = self.store.read()["driver"]
        if name.startswith("__") or name in driver["missing"]:
            raise AttributeError(name)
        if name in limits.SYMBOLS and int(driver["driver"].partition(".")[0]) < limits.FIRST_DRIVER:
            raise AttributeError(name)
        if name in ("nvmlInitWithFlags", "nvmlInit_v2"):
            found = Symbol(self.session, name, lambda session, *flags: session.begin(), checked=False)
        elif name == "nvmlShutdown":
            found = Symbol(self.session, name, lambda session: session.end(), checked=False)
        elif name == "nvmlErrorString":
            found = ErrorString(self.session, name, lambda session: None, checked=False)
        elif name in _SYMBOLS:
            found = Symbol(self.session, name, _SYMBOLS[name], checked=True)
        else:
            raise AttributeError(name)
        return found


class Symbol:
    """A callable object with settable attributes, as a ctypes function pointer is: pynvml sets `restype`."""

    restype: Any = None

    def __init__(self, session: Session, name: str, function: Function, *, checked: bool) -> None:
        self._session = session
        self._name = name
        self._function = function
        self._checked = checked

    def __call__(self, *arguments: Any) -> Any:
        hardware = self._session.look()
        if hardware["faults"] or hardware["settings"]["log"] != "off":
            return self._watched(arguments)
        return self._serve(arguments)

    def _serve(self, arguments: tuple[Any, ...]) -> int:
        try:
            if self._checked:
                self._session.check()
            self._function(self._session, *arguments)
        except Refused as refused:
            return refused.code
        return codes.SUCCESS

    def _watched(self, arguments: tuple[Any, ...]) -> int:
        store, hardware = self._session.store, self._session.hardware
        gpu = "" if self._name.startswith(_NO_HANDLE) else self._session.gpu_of(arguments[0])
        fault = faults.hit(store, hardware, self._name, gpu) if hardware["faults"] else None
        code = self._with_fault(fault, arguments) if fault else self._serve(arguments)
        level = hardware["settings"]["log"]
        if level == "all" or (level == "mutating" and self._name in MUTATING):
            self._log(gpu, code)
        if fault and fault["after"]:
            faults.suffer(store, fault)
        return code

    def _with_fault(self, fault: Fault, arguments: tuple[Any, ...]) -> int:
        if not fault["after"]:
            faults.suffer(self._session.store, fault)
        self._session.look()
        if fault["action"] == "lies":
            return self._lie(arguments)
        if fault["action"] != "returns":
            return self._serve(arguments)
        if fault["after"]:
            self._serve(arguments)
        return fault["code"]

    def _lie(self, arguments: tuple[Any, ...]) -> int:
        if self._name in _HANDLE_MADE:
            index = self._session.index_of(arguments[0])
            memory.put_handle(arguments[-1], handle(_HANDLE_MADE[self._name], index, DEAD))
        elif self._name in _COUNT_ARGUMENT:
            memory.put(arguments[_COUNT_ARGUMENT[self._name]], 0)
        return codes.SUCCESS

    def _log(self, gpu: str, code: int) -> None:
        call = {
            "at_ns": time.monotonic_ns(),
            "pid": os.getpid(),
            "function": self._name,
            "gpu": gpu,
            "mutating": self._name in MUTATING,
            "code": code,
        }
        fd = os.open(log_path(self._session.store), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(fd, json.dumps(call).encode() + b"\n")
        finally:
            os.close(fd)


class ErrorString(Symbol):
    """The one function that answers with text."""

    def __call__(self, *arguments: Any) -> Any:
        return codes.STRINGS.get(memory.number(arguments[0]), "Unknown Error").encode()


def install(folder: Path | str) -> None:
    """Put the node in that folder below pynvml, before `nvmlInit`; asking again for the same folder changes nothing."""
    import pynvml

    current = pynvml.nvmlLib
    if isinstance(current, Library):
        if current.store.folder == os.path.abspath(folder):
            return
        current.session.close()
    # pynvml loads the C library only while this is None.
    pynvml.nvmlLib = Library(folder)
    pynvml._nvmlGetFunctionPointer_cache.clear()


def uninstall() -> None:
    """Take the simulator away again; pynvml then loads the real library at the next `nvmlInit`."""
    import pynvml

    if isinstance(pynvml.nvmlLib, Library):
        pynvml.nvmlLib.session.close()
        pynvml.nvmlLib = None
        pynvml._nvmlGetFunctionPointer_cache.clear()


def log_path(store: Store) -> str:
    """The call log, one JSON object a line."""
    return os.path.join(store.folder, "calls.jsonl")

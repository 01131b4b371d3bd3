"""The ctypes edge: reads a caller's arguments and writes into a caller's memory, as the C library would."""

from __future__ import annotations

import ctypes

from . import codes
from .codes import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def number(value: Any) -> int:
    """An integer argument, which pynvml passes as an int or as a ctypes integer."""
    return value if isinstance(value, int) else int(value.value)


def target(reference: Any) -> Any:
    """What `byref(x)` or `pointer(x)` refers to; NULL is an invalid argument.

    A structure by value crashes a process in the real library (seen with placements); here it raises TypeError.
    """
    if reference is None:
        raise Refused(codes.INVALID_ARGUMENT)
    inner = getattr(reference, "_obj", None)
    if inner is not None:
        return inner
    if isinstance(reference, ctypes.Structure):
        raise TypeError(f"{type(reference).__name__} passed by value: the real library crashes here, pass byref()")
    if not reference:
        raise Refused(codes.INVALID_ARGUMENT)
    return reference.contents


def address(handle: Any) -> int:
    """The number in a handle; 0 for NULL."""
    if isinstance(handle, ctypes._Pointer):
        return ctypes.c_void_p.from_buffer(handle).value or 0
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def versioned(reference: Any, version: int) -> Any:
    """The structure referred to, which must say it is of that version."""
    into = target(reference)
    if into.version != version:
        # Not ARGUMENT_VERSION_MISMATCH, which only newer functions know (seen on an H200, 580.159.04).
        raise Refused(codes.INVALID_ARGUMENT)
    return into


def put(reference: Any, value: int) -> None:
    """`*reference = value`."""
    target(reference).value = value


def put_handle(reference: Any, handle: int) -> None:
    """`*reference = handle`, for a pointer to an opaque pointer."""
    ctypes.c_void_p.from_buffer(target(reference)).value = handle


def put_structure(into: Any, filled: Any) -> None:
    """Overwrite a caller's structure whole, as the library does."""
    ctypes.memmove(ctypes.byref(into), ctypes.byref(filled), ctypes.sizeof(filled))


def pointer(like: Any, handle: int) -> Any:
    """A handle of the same pointer type as `like`, to be set in a structure."""
    return ctypes.cast(handle, type(like))


def put_text(buffer: Any, size: Any, text: str) -> None:
    """`strcpy(buffer, text)` where it has room for it."""
    if buffer is None:
        raise Refused(codes.INVALID_ARGUMENT)
    data = text.encode()
    if number(size) <= len(data):
        raise Refused(codes.INSUFFICIENT_SIZE)
    buffer.value = data


def put_handles(array: Any, count: Any, handles: list[int], room: int) -> None:
    """Fill a caller's array that must have `room` places, for the library looks at no length, and set the count."""
    slots = target(count)
    if array is None:
        raise Refused(codes.INVALID_ARGUMENT)
    if _length(array, room) < room:
        raise Refused(codes.INSUFFICIENT_SIZE)
    places = ctypes.cast(_array(array), ctypes.POINTER(ctypes.c_void_p))
    for index, handle in enumerate(handles):
        places[index] = handle
    slots.value = len(handles)


def put_places(array: Any, count: Any, places: list[tuple[int, int]]) -> None:
    """Placements into a caller's array; without an array only their number."""
    room = target(count)
    if array is not None:
        # Stricter than nvml.h, which never reads the count: an array too short would be overrun.
        if min(number(room), _length(array, len(places))) < len(places):
            raise Refused(codes.INSUFFICIENT_SIZE)
        slots = _array(array)
        for index, (start, size) in enumerate(places):
            slots[index].start, slots[index].size = start, size
    room.value = len(places)


def _array(array: Any) -> Any:
    return getattr(array, "_obj", array)


def _length(array: Any, unknown: int) -> int:
    inner = _array(array)
    return len(inner) if isinstance(inner, ctypes.Array) else unknown

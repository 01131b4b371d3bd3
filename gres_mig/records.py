"""The record file's bytes: JSON, versioned, with the fields a newer version wrote kept as they were."""

from __future__ import annotations

import json
from binascii import crc32
from collections.abc import Callable, Mapping

from gres_mig.errors import StateError
from gres_mig.models import (
    Allocation,
    Fence,
    Intent,
    Owner,
    Placement,
    Process,
    Record,
    Release,
    Request,
    State,
    Stuck,
    Tombstone,
)
from gres_mig.values import Value, fields_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FORMAT = 1
"""Raised when an older gres-mig could misread the file; a newer file is refused without writing."""

_KINDS: dict[str, type[Record]] = {"intent": Intent, "allocation": Allocation, "release": Release}
_NESTED: dict[str, type[Value]] = {
    kind.__name__: kind for kind in (Fence, Owner, Placement, Process, Request, Stuck, Tombstone)
}
_PLAIN: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (float, int), "bool": (bool,)}
_READERS: dict[str, Callable[[Any], Any]] = {}
_FIELDS: dict[type[Value], dict[str, Callable[[Any], Any]]] = {}
_MOST_SLICES = 1024
_CHECKSUM = b'{"crc32": "'


def encode(state: State) -> bytes:
    """The file's bytes: JSON that begins with a checksum of the rest; what a newer version wrote is kept as it was."""
    plain: dict[str, Any] = {
        **state.extra,
        "format": FORMAT,
        "boot_id": state.boot_id,
        "generation": state.generation,
        "distrusted": state.distrusted,
        "records": [{"kind": kind_of(r), **r.extra, **plain_of(r)} for r in state.records],
        "tombstones": [plain_of(t) for t in state.tombstones],
        "fences": {uuid: plain_of(fence) for uuid, fence in state.fences.items()},
    }
    # On one line: with an indent, json encodes in Python, several times slower.
    body = json.dumps(plain).encode()
    return _head(body) + body[1:]


def decode(data: bytes) -> State:
    """The state in those bytes; ValueError, KeyError, TypeError or AttributeError where they are damaged.

    A file of a newer format is a `StateError`: it is whole, only not ours to read or write.
    """
    plain = json.loads(data)
    whole = data.startswith(_head(b"{" + data[len(_head(b"")) :]))
    if not whole and data.startswith(_CHECKSUM):
        # First of all: a changed bit can turn one format into another, or an owner that lives into one that is gone.
        raise ValueError("its checksum is not that of its content")
    if _reader("int")(plain["format"]) > FORMAT:
        raise StateError(
            f"the records were written by a newer gres-mig (format {plain['format']}, this one reads {FORMAT})",
            hint="upgrade gres-mig; nothing was changed",
        )
    if not whole:
        raise ValueError("it has no checksum")
    known = {"crc32", "format", "boot_id", "generation", "distrusted", "records", "tombstones", "fences"}
    records = tuple(_record(entry) for entry in _list(plain["records"]))
    if len({record.nonce for record in records}) != len(records):
        raise ValueError("two records have one nonce")
    fence = _reader("Fence")
    return State(
        boot_id=_text(plain["boot_id"]),
        records=records,
        tombstones=_reader("tuple[Tombstone, ...]")(plain["tombstones"]),
        fences={uuid: fence(entry) for uuid, entry in plain["fences"].items()},
        generation=_reader("int")(plain["generation"]),
        distrusted=_reader("bool")(plain["distrusted"]),
        extra={key: value for key, value in plain.items() if key not in known},
    )


def _head(body: bytes) -> bytes:
    return b'%s%08x", ' % (_CHECKSUM, crc32(body))


def _record(plain: Mapping[str, Any]) -> Record:
    kind = _KINDS[plain["kind"]]
    known = _fields(kind, plain)
    for name in ("nonce", "boot_id", "gpu_uuid"):
        _text(known[name])
    place: Placement = known["placement"]
    if not (place.start >= 0 and place.size > 0 and place.start + place.size <= _MOST_SLICES):
        raise ValueError(f"no GPU has a place {place}")
    return kind(**known, extra={key: value for key, value in plain.items() if key not in known and key != "kind"})


def _fields(kind: type[Value], plain: Mapping[str, Any]) -> dict[str, Any]:
    readers = _FIELDS.get(kind)
    if readers is None:
        types = {
            name: type_ for c in reversed(kind.__mro__) for name, type_ in getattr(c, "__annotations__", {}).items()
        }
        readers = _FIELDS[kind] = {name: _reader(types[name]) for name in kind.field_names() if name != "extra"}
    return {name: read(plain[name]) for name, read in readers.items() if name in plain}


def _reader(kind: str) -> Callable[[Any], Any]:
    """Reads from JSON what a field of that type holds, as it was written; TypeError where it is something else."""
    if kind not in _READERS:
        _READERS[kind] = _new_reader(kind)
    return _READERS[kind]


def _new_reader(kind: str) -> Callable[[Any], Any]:
    if kind.endswith(" | None"):
        some = _reader(kind.removesuffix(" | None"))
        return lambda plain: None if plain is None else some(plain)
    if kind.startswith("tuple["):
        one = _reader(kind.removeprefix("tuple[").removesuffix(", ...]"))
        return lambda plain: tuple(map(one, _list(plain)))
    if kind in _NESTED:
        nested = _NESTED[kind]
        return lambda plain: nested(**_fields(nested, plain))
    return lambda plain: _exactly(_PLAIN[kind], plain)


def _exactly(types: tuple[type, ...], plain: Any) -> Any:
    # Not isinstance: to Python true is an int, to this file it is not.
    if type(plain) not in types:
        raise TypeError(f"expected {types[0].__name__}, found {plain!r}")
    return plain


def _list(plain: Any) -> list[Any]:
    found: list[Any] = _exactly((list,), plain)
    return found


def kind_of(record: Record) -> str:
    """`intent`, `allocation` or `release`."""
    return next(name for name, kind in _KINDS.items() if type(record) is kind)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected text, found {value!r}")
    return value


def plain_of(value: Any) -> Any:
    """A frozen value as JSON holds it, without driver handles."""
    if isinstance(value, Value):
        aside = ("extra", "handle", "users")
        return {name: plain_of(held) for name, held in fields_of(value).items() if name not in aside}
    if isinstance(value, (tuple, frozenset)):
        return [plain_of(item) for item in value]
    return value

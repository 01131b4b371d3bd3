"""Frozen values that cost next to nothing to define.

`dataclasses` compiles up to six functions a class and imports `inspect`; for the values of this package that was
four times the start of a bare interpreter, and a hook pays it at every job.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar, TypeVar

    from typing_extensions import dataclass_transform

    V = TypeVar("V", bound="Value")
else:

    def dataclass_transform(**_: object) -> Any:
        """What type checkers read; nothing at run time (typing has it from Python 3.11 on)."""
        return lambda kind: kind


@dataclass_transform(frozen_default=True)
class Value:
    """A frozen value: its annotated names are its fields, compared, hashed and shown in that order.

    A name in `_aside` is a field that is neither compared nor shown.
    """

    _fields: ClassVar[tuple[str, ...]] = ()
    _defaults: ClassVar[dict[str, Any]] = {}
    _aside: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        # The class's own, as text: every module here has annotations that are not evaluated.
        annotations = cls.__dict__.get("__annotations__", {})  # noqa: RUF063 - inspect is what this file avoids
        own = [name for name, kind in annotations.items() if not kind.startswith("ClassVar")]
        cls._fields = (*cls._fields, *(name for name in own if name not in cls._fields))
        cls._defaults = {**cls._defaults, **{name: cls.__dict__[name] for name in own if name in cls.__dict__}}

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """The fields, inherited ones first."""
        return cls._fields

    def __init__(self, *positional: Any, **named: Any) -> None:
        values = {**self._defaults, **dict(zip(self._fields, positional, strict=False)), **named}
        if (
            len(values) != len(self._fields)
            or len(positional) > len(self._fields)
            or not named.keys().isdisjoint(self._fields[: len(positional)])
        ):
            missing = [name for name in self._fields if name not in values]
            surplus = [name for name in values if name not in self._fields]
            raise TypeError(f"{type(self).__name__}: missing {missing}, not a field or given twice {surplus}")
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen; make another with replace()")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._seen() == other._seen()

    def __hash__(self) -> int:
        return hash(self._seen())

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._fields if name not in self._aside)
        return f"{type(self).__name__}({shown})"

    def _seen(self) -> tuple[Any, ...]:
        values = self.__dict__
        return tuple(values[name] for name in self._fields if name not in self._aside)


def replace(value: V, **changes: Any) -> V:
    """That value with some fields changed."""
    return type(value)(**{**fields_of(value), **changes})


def fields_of(value: Value) -> dict[str, Any]:
    """The fields and what they hold, one level deep."""
    return {name: value.__dict__[name] for name in value._fields}

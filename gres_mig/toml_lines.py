"""Which line of a TOML text says what; parsers keep no line numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from gres_mig.values import Value

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Path = tuple[str, ...]


class _Statement(Value):
    """Lines `first .. last` (from 1), and the keys they bring, as paths from the top."""

    first: int
    last: int
    paths: tuple[Path, ...]


class Lines:
    """The lines of a text that is TOML as a whole."""

    def __init__(self, text: str) -> None:
        self._lines = text.replace("\r\n", "\n").split("\n")
        self._places: dict[Path, _Statement] = {}
        for statement in _statements(self._lines):
            for path in statement.paths:
                self._places.setdefault(path, statement)

    def find(self, path: Path, written: str = "") -> int:
        """The line of a key, or in a value over several lines, the one that has `written` in it."""
        statement = self._places[path]
        numbers = range(statement.first, statement.last + 1)
        return next((n for n in numbers if written and written in self._lines[n - 1]), statement.first)


def _statements(lines: list[str]) -> Iterator[_Statement]:
    """Each statement is TOML on its own, and no part of one is: so lines are gathered until a parser accepts them."""
    table: Path = ()
    first = 0
    for last in range(len(lines)):
        chunk = "\n".join(lines[first : last + 1])
        try:
            document = tomllib.loads(chunk)
        except ValueError:
            continue
        paths = tuple(_paths(document))
        if chunk.lstrip().startswith("["):
            table = max(paths, key=len)
            yield _Statement(first + 1, last + 1, paths)
        elif paths:
            yield _Statement(first + 1, last + 1, tuple(table + path for path in paths))
        first = last + 1


def _paths(document: object) -> Iterator[Path]:
    """The path of every key, outer ones first; `[[table]]` is a list of one table here."""
    if isinstance(document, list) and len(document) == 1:
        document = document[0]
    if isinstance(document, dict):
        for key, value in document.items():
            yield (key,)
            yield from ((key, *path) for path in _paths(value))

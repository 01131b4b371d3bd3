"""slurm.conf and gres.conf as lines: what they say, and their text with one value changed and all else as it was."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from gres_mig.errors import ConfigError
from gres_mig.values import Value

PATHS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
"""Where slurm.conf is, and where slurmd keeps what a controller sent to a node without one."""

# As the daemons of 22.05.8 read a line, asked what they made of each of these; Slurm's manual says less.
_PAIR = re.compile(r'([A-Za-z0-9_.]+)[ \t]*[-+*/]?=[ \t]*("[^"]*"|[^\s"]\S*)')
_COMMENT = re.compile(r"(?<!\\)((?:\\\\)*)#.*")
"""A comment ends with its row, whatever the row ends with: no backslash in it continues anything."""
_CONTINUED = re.compile(r"(?<!\\)((?:\\\\)*)\\\s*$")
_ESCAPE = re.compile(r"\\(.)")
_INCLUDE = re.compile(r"(?i)\s*include\s+(\S+)")
_VALUE = r'"[^"]*"|(?:\\[ \t]*\n(?=\S)|(?!\\[ \t]*\n)\S)+'
"""As it is written, over the end of a row where it goes on in the next."""


class Line(Value):
    """One line, with those that a backslash at its end adds to it."""

    file: str
    number: int
    """Of its first line, from 1."""
    raw: str
    """As it is written, without the last newline."""
    pairs: tuple[tuple[str, str], ...]
    """KEY and VALUE of all that it sets, keys in lower case."""

    def get(self, key: str) -> str | None:
        """The value of that key; None where the line does not set it."""
        return next((value for name, value in reversed(self.pairs) if name == key.lower()), None)

    @property
    def kind(self) -> str:
        """Its first key: `nodename` where it describes nodes."""
        return self.pairs[0][0] if self.pairs else ""

    @property
    def where(self) -> str:
        """`/etc/slurm/slurm.conf:12`."""
        return f"{self.file}:{self.number}"

    def with_value(self, key: str, value: str) -> str:
        """As it is written, but with that value; the key is added where the line has it not."""
        found = _COMMENT.search(self.raw)
        body, comment = (self.raw[: found.end(1)], self.raw[found.end(1) :]) if found else (self.raw, "")
        pattern = re.compile(rf"(?i)(?<![\w.])({re.escape(key)}[ \t]*[-+*/]?=[ \t]*)(?:{_VALUE})")
        changed, number = pattern.subn(lambda match: match[1] + value, body)
        if number:
            return changed + comment
        return f"{body.rstrip()} {key}={value}" + (f"  {comment}" if comment else "")


class Conf(Value):
    """A file with all that it includes."""

    path: str
    texts: Mapping[str, str]
    """The text of each file."""
    lines: tuple[Line, ...]

    def setting(self, key: str) -> Line | None:
        """The line whose value of that key counts: the last one, as Slurm has it."""
        return next((line for line in reversed(self.lines) if line.kind == key.lower()), None)

    def value(self, key: str, default: str = "") -> str:
        """What it says of that key."""
        line = self.setting(key)
        return (line.get(key) or "") if line else default

    def of_kind(self, key: str) -> tuple[Line, ...]:
        """The lines that begin with that key."""
        return tuple(line for line in self.lines if line.kind == key.lower())


def find() -> str:
    """Where this machine's slurm.conf is, or would be."""
    return os.environ.get("SLURM_CONF") or next(filter(os.path.exists, PATHS), PATHS[0])


def read(path: str, *, lenient: bool = False) -> Conf:
    """The file at that path and what it includes; one that is not there is empty.

    `lenient`: so is every other that cannot be read, for who has to go on whatever is wrong with it.
    """
    texts: dict[str, str] = {}
    lines: list[Line] = []
    _read((path,), texts, lines, lenient=lenient)
    return Conf(path, texts, tuple(lines))


def changed(conf: Conf, changes: Mapping[Line, str]) -> dict[str, str]:
    """The text of every file of it, with those lines written so."""
    texts = {}
    for file, text in conf.texts.items():
        rows = text.splitlines(keepends=True)
        for line in sorted((each for each in changes if each.file == file), key=lambda each: -each.number):
            first = line.number - 1
            rows[first : first + line.raw.count("\n") + 1] = [f"{changes[line]}\n"]
        texts[file] = "".join(rows)
    return texts


def hosts(expression: str) -> tuple[str, ...]:
    """The names of a host list such as `n[1-3,07],gpu1`."""
    return tuple(name for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", expression) for name in _names(part))


def nodes_of(conf: Conf, host: str) -> tuple[str, ...]:
    """The nodes that a host is; `NodeHostname` names hosts, in the order of the nodes, where their names differ."""
    found = []
    short = host.partition(".")[0]
    for line in conf.of_kind("NodeName"):
        names = hosts(line.get("NodeName") or "")
        machines = hosts(line.get("NodeHostname") or "") or names
        if len(machines) == 1:
            machines *= len(names)
        found += [name for name, machine in zip(names, machines, strict=False) if machine.partition(".")[0] == short]
    return tuple(found)


def line_of(conf: Conf, node: str) -> Line | None:
    """The line that describes a node."""
    return next((line for line in conf.of_kind("NodeName") if node in hosts(line.get("NodeName") or "")), None)


def _names(part: str) -> Iterator[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    ranges, _, after = rest.partition("]")
    for each in ranges.split(","):
        first, dash, last = each.partition("-")
        if not dash or not (first.isdigit() and last.isdigit()):
            yield from (f"{before}{first}{end}" for end in _names(after))
            continue
        for number in range(int(first), int(last) + 1):
            yield from (f"{before}{number:0{len(first)}d}{end}" for end in _names(after))


def _read(files: tuple[str, ...], texts: dict[str, str], lines: list[Line], *, lenient: bool) -> None:
    """Add the lines of the last of those files, each of which includes the next, and of what it includes itself."""
    path = files[-1]
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            texts[path] = file.read()
    except FileNotFoundError:
        if len(files) > 1 and not lenient:
            raise ConfigError(f"reading {path}: it is included, but not there") from None
        return
    except OSError as error:
        if not lenient:
            raise ConfigError(f"reading {path}: {error.strerror}") from error
        return
    for number, raw, text in _joined(texts[path]):
        if include := _INCLUDE.match(text):
            included = os.path.join(os.path.dirname(path), include[1].replace("%c", _cluster(lines)))
            # One that is included again is read again; only what includes itself has no end.
            if included not in files:
                _read((*files, included), texts, lines, lenient=lenient)
        elif pairs := tuple((match[1].lower(), match[2].strip('"')) for match in _PAIR.finditer(text)):
            lines.append(Line(path, number, raw, pairs))


def _joined(text: str) -> Iterator[tuple[int, str, str]]:
    """Each line: its first row's number, its rows as they are written, and what they say together."""
    rows = iter(enumerate(text.splitlines(), 1))
    for number, row in rows:
        raw, said = row, _COMMENT.sub(r"\1", row)
        while _CONTINUED.search(said):
            said = _CONTINUED.sub(r"\1", said)
            if following := next(rows, None):
                raw += f"\n{following[1]}"
                said += _COMMENT.sub(r"\1", following[1])
        yield number, raw, _ESCAPE.sub(r"\1", said)


def _cluster(lines: list[Line]) -> str:
    """What `%c` in the name of an included file is: the name of the cluster, as it was said before."""
    return next((line.get("ClusterName") or "" for line in reversed(lines) if line.kind == "clustername"), "").lower()

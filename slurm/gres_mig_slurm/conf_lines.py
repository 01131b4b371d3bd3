"""slurm.conf and gres.conf as lines: what they say, and their text with one value changed and all else as it was."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from gres_mig.errors import ConfigError
from gres_mig.values import Value

PATHS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
"""Where slurm.conf is, and where slurmd keeps what a controller sent to a node without one."""

_PAIR = re.compile(r'([A-Za-z0-9_.]+)[ \t]*[-+*/]?=[ \t]*("[^"]*"|[^\s"]\S*)')
"""As Slurm's own parse_config.c reads a line."""
_COMMENT = re.compile(r"(?<!\\)#")
_MOST_FILES = 64


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
        body, comment = (self.raw[: found.start()], self.raw[found.start() :]) if found else (self.raw, "")
        pattern = re.compile(rf"(?i)(?<![\w.])({re.escape(key)}[ \t]*[-+*/]?=[ \t]*)(?:\"[^\"]*\"|\S+)")
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


def read(path: str) -> Conf:
    """The file at that path and what it includes; one that is not there is empty."""
    texts: dict[str, str] = {}
    return Conf(path, texts, tuple(_lines(path, texts, needed=False)))


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


def _lines(path: str, texts: dict[str, str], *, needed: bool) -> Iterator[Line]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            texts[path] = file.read()
    except FileNotFoundError:
        if needed:
            raise ConfigError(f"reading {path}: it is included, but not there") from None
        return
    except OSError as error:
        raise ConfigError(f"reading {path}: {error.strerror}") from error
    rows = iter(enumerate(texts[path].splitlines(), 1))
    for number, row in rows:
        raw = row
        while raw.endswith("\\") and (following := next(rows, None)):
            raw += f"\n{following[1]}"
        text = _COMMENT.split(raw.replace("\\\n", ""), maxsplit=1)[0].strip()
        word, _, rest = text.partition(" ")
        if word.lower() == "include":
            included = os.path.join(os.path.dirname(path), rest.strip())
            if included not in texts and len(texts) < _MOST_FILES:
                yield from _lines(included, texts, needed=True)
            continue
        pairs = tuple((match[1].lower(), match[2].strip('"')) for match in _PAIR.finditer(text))
        if pairs:
            yield Line(path, number, raw, pairs)

"""Pure: what slurm.conf has to say for gates: the features of nodes, and placeholders that stand for closed ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gres_mig.values import Value, replace
from gres_mig_slurm import conf_lines, openings, wanted
from gres_mig_slurm.conf_lines import Conf, Line
from gres_mig_slurm.profiles import NodeType

NAME = "migmem-full-"
"""How placeholders are called: whose job waits for a place reads it in squeue as the reason."""

USUAL = 4
"""How many there are of a type, where slurm.conf has none yet: a job of more nodes has no gate."""

_ADDRESS = "NodeAddr=127.0.0.1 Port=1"
"""Nobody listens there; slurmctld looks for them once in a while, and must not wait for an answer."""

_STATE = 'State=DOWN Reason="gres-mig: jobs wait for it while no node has a place"'
_CORES = ("Boards", "SocketsPerBoard", "Sockets", "CoresPerSocket", "ThreadsPerCore")
_AMOUNTS = ("RealMemory", "TmpDisk")


class GateLines(Value):
    """What is written anew, what is added, what is left to a person."""

    changes: Mapping[Line, str]
    added: tuple[str, ...]
    decide: tuple[str, ...]


def features(kind: NodeType) -> tuple[str, ...]:
    """All features of ours that nodes of that type have."""
    names = [openings.feature(mib) for mib in kind.sizes_mib]
    return tuple(feature for name in names for feature in (name, f"{name}{openings.TRY}"))


def node_features(value: str, kind: NodeType) -> str:
    """A node's Feature with those of its sizes, and with no other of ours."""
    site = dict.fromkeys(word for word in value.split(",") if word and not word.startswith(openings.PREFIX))
    return ",".join([*site, *features(kind)])


def is_placeholder(node: str) -> bool:
    """Whether that is no machine."""
    return node.startswith(NAME)


def placeholders(conf: Conf) -> int:
    """How many nodes a job may have and still wait behind a gate, whichever type of node it waits for."""
    lines = [conf_lines.hosts(line.get("NodeName") or "") for line in conf.of_kind("NodeName")]
    return min((len(names) for names in lines if names and is_placeholder(names[0])), default=0)


def plan(conf: Conf, nodes: Sequence[str], kind: NodeType, changes: Mapping[Line, str]) -> GateLines:
    """What these nodes, all of one type, need beside the changes that are planned."""
    new, added, decide = dict(changes), [], []
    found = [line for line in conf.of_kind("NodeName") if _names(line) & set(nodes)]
    for line in found:
        # Of one that is of others too, what is planned for it says so.
        if _names(line) <= set(nodes):
            _set_features(new, conf, line, kind)
    if not found:
        return GateLines(new, (), ())
    name = f"{NAME}{nodes[0]}-[1-{USUAL}]"
    old = _placeholder(conf, nodes)
    if old is None:
        added.append(_as_placeholder(conf, found, name, kind))
    else:
        name = old.get("NodeName") or name
        count = wanted.node_gres(old.get("Gres") or "", kind.count_mib)
        if not wanted.is_same(old.get("Gres") or "", count):
            new[old] = old.with_value("Gres", count)
        _set_features(new, conf, old, kind, _features(conf, found))
    all_of_them = conf_lines.hosts(name)
    for line in conf.of_kind("PartitionName"):
        there = set(conf_lines.hosts(line.get("Nodes") or ""))
        missing = [each for each in all_of_them if each not in there]
        if there & set(nodes) and missing:
            more = name if len(missing) == len(all_of_them) else ",".join(missing)
            new[line] = line.with_value("Nodes", f"{line.get('Nodes')},{more}")
        elif there and there <= _node_sets(conf):
            decide.append(
                f"{line.where} names its nodes by NodeSet: if {','.join(nodes)} are in it, {name} has to be, too"
            )
    return GateLines(new, tuple(added), tuple(decide))


def _set_features(changes: dict[Line, str], conf: Conf, line: Line, kind: NodeType, more: str = "") -> None:
    now = _said(conf, line, "Feature", "Features")
    value = node_features(f"{now},{more}", kind)
    if not wanted.is_same(now, value):
        key = "Features" if line.get("Features") is not None else "Feature"
        changes[line] = replace(line, raw=changes.get(line, line.raw)).with_value(key, value)


def _said(conf: Conf, line: Line, *keys: str) -> str:
    """What a node's line says of one of these keys, or the line NodeName=DEFAULT before it."""
    found = ""
    for each in conf.of_kind("NodeName"):
        if each == line or each.get("NodeName") == "DEFAULT":
            found = next((value for key in keys if (value := each.get(key))), found)
        if each == line:
            break
    return found


def _names(line: Line) -> set[str]:
    return set(conf_lines.hosts(line.get("NodeName") or ""))


def _placeholder(conf: Conf, nodes: Sequence[str]) -> Line | None:
    """The placeholders of these nodes: they are called after one of them."""
    for line in conf.of_kind("NodeName"):
        name = next(iter(conf_lines.hosts(line.get("NodeName") or "")), "")
        if is_placeholder(name) and name.removeprefix(NAME).rpartition("-")[0] in nodes:
            return line
    return None


def _as_placeholder(conf: Conf, lines: Sequence[Line], name: str, kind: NodeType) -> str:
    """With all that any node of these lines has, or Slurm would refuse at submit what fits only that one."""
    largest = max(lines, key=lambda line: _cpus(conf, line))
    copied = {key: _said(conf, largest, key) for key in ("CPUs", *_CORES)}
    copied |= {key: max((_said(conf, line, key) for line in lines), key=_whole) for key in _AMOUNTS}
    words = [f"{key}={value}" for key, value in copied.items() if value]
    gres = wanted.node_gres(_said(conf, largest, "Gres"), kind.count_mib)
    feature = node_features(_features(conf, lines), kind)
    return " ".join([f"NodeName={name}", _ADDRESS, *words, f"Gres={gres}", f"Feature={feature}", _STATE])


def _features(conf: Conf, lines: Sequence[Line]) -> str:
    return ",".join(_said(conf, line, "Feature", "Features") for line in lines)


def _cpus(conf: Conf, line: Line) -> int:
    return _whole(_said(conf, line, "CPUs")) or math.prod(_whole(_said(conf, line, key)) or 1 for key in _CORES)


def _whole(value: str) -> int:
    return int(value) if value.isdecimal() else 0


def _node_sets(conf: Conf) -> set[str]:
    return {line.get("NodeSet") or "" for line in conf.of_kind("NodeSet")}

"""The file that tells job_submit.lua what migmem may be asked for, as text and back."""

from __future__ import annotations

import re

from gres_mig.errors import ConfigError
from gres_mig.values import replace
from gres_mig_slurm import conf_lines
from gres_mig_slurm.profiles import Board, NodeType, Priced, Sizes

FILE_NAME = "gres-mig-sizes.conf"
"""Beside slurm.conf, where job_submit.lua lies too."""

_HEADER = """\
# What may be asked of migmem on each type of node, and what it counts; job_submit.lua reads this at every submit.
# gres-mig slurm profiles writes it. One line is for the admin to change: "exclusive refuse" or "exclusive allow" jobs
# that ask for migmem together with --exclusive, which takes all migmem of a node for one instance.
"""
_EXCLUSIVE = ("refuse", "allow")
_USE = {"size": True, "name": False}


def render(sizes: Sizes) -> str:
    """The file's text: one thing a line, so that nothing in it has to be run to be read."""
    lines = [f"{_HEADER}format 1", f"exclusive {sizes.exclusive}"]
    if sizes.placeholders and any(node.admission == "gates" for node in sizes.types):
        lines.append(f"placeholders {sizes.placeholders}")
    for node in sizes.types:
        lines += ["", f"# Gres=migmem:{node.count_mib}", f"type {node.name}"]
        if node.nodes:
            lines.append(f"nodes {node.nodes}")
        if node.admission != "count":
            lines.append(f"admission {node.admission}")
            if node.nodes:
                lines.append(f"machines {len(conf_lines.hosts(node.nodes))}")
        for board in node.boards:
            lines.append(f"board {board.gpus} {board.whole_mib} {board.model}")
            if board.slice_overhead_mib >= 0:
                lines.append(f"slices {board.slice_overhead_mib}")
            for p in board.profiles:
                lines.append(f"profile {p.name} {p.memory_mib} {p.price_mib} {'size' if p.by_size else 'name'}")
    return "\n".join(lines) + "\n"


def parse(text: str, file: str = FILE_NAME) -> Sizes:
    """What `render` wrote; anything else is an error that names its line."""
    sizes, known = Sizes(()), False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#") or not line.strip():
            continue
        if line == "format 1":
            known = True
            continue
        further = _with(sizes, line)
        if further is None:
            hint = "on a node of each type run: gres-mig slurm profiles --write"
            raise ConfigError(f"{file}:{number}: {line[:80]!r} is not understood", hint=hint)
        sizes = further
    if not known:
        raise ConfigError(f"{file} has no line: format 1", hint="another version of gres-mig wrote it")
    return sizes


def merged(sizes: Sizes, node: NodeType) -> Sizes:
    """`sizes` with that type in place of the one of its name, or added; which nodes are of it is kept."""
    before = next((each for each in sizes.types if each.name == node.name), node)
    others = [each for each in sizes.types if each.name != node.name]
    types = (*others, replace(node, nodes=node.nodes or before.nodes))
    return replace(sizes, types=tuple(sorted(types, key=lambda each: each.name)))


def _with(sizes: Sizes, line: str) -> Sizes | None:
    """`sizes` and what that line says; None where it says nothing that is understood."""
    word, _, rest = line.partition(" ")
    node = sizes.types[-1] if sizes.types else None
    if word == "exclusive" and rest in _EXCLUSIVE:
        return replace(sizes, exclusive=rest)
    if word == "placeholders" and re.fullmatch(r"[1-9][0-9]{0,4}", rest):
        return replace(sizes, placeholders=int(rest))
    if word == "type" and rest:
        return replace(sizes, types=(*sizes.types, NodeType(rest, ())))
    if node is None:
        return None
    if word == "nodes" and rest:
        node = replace(node, nodes=rest)
    elif word == "admission" and rest == "gates":
        node = replace(node, admission=rest)
    elif word == "machines" and node.nodes and rest.isdecimal():
        # How many that are.
        pass
    elif word == "board" and (found := re.fullmatch(r"([1-9][0-9]{0,5}) ([1-9][0-9]{0,11})(?: (.*))?", rest)):
        node = replace(node, boards=(*node.boards, Board(found[3] or "", int(found[1]), int(found[2]), ())))
    elif word == "profile" and node.boards and (priced := _priced(rest)):
        node = _with_board(node, profiles=(*node.boards[-1].profiles, priced))
    elif word == "slices" and node.boards and re.fullmatch(r"[0-9]{1,12}", rest):
        node = _with_board(node, slice_overhead_mib=int(rest))
    else:
        return None
    return replace(sizes, types=(*sizes.types[:-1], node))


def _with_board(node: NodeType, **more: object) -> NodeType:
    return replace(node, boards=(*node.boards[:-1], replace(node.boards[-1], **more)))


def _priced(text: str) -> Priced | None:
    found = re.fullmatch(r"([!-~]+) ([1-9][0-9]{0,11}) ([1-9][0-9]{0,11}) (size|name)", text)
    return Priced(found[1], int(found[2]), int(found[3]), _USE[found[4]]) if found else None

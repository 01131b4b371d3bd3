"""What becomes of slurm.conf and gres.conf: which lines are written anew, which are added, what is left to a person."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from gres_mig_slurm import conf_lines, gate_lines, wanted
from gres_mig_slurm.conf_lines import Conf, Line
from gres_mig_slurm.profiles import NodeType

_BEGIN, _END = "# BEGIN gres-mig: written by gres-mig slurm setup", "# END gres-mig"
_SITE = "# The site's own: "
"""For nodes that see slurm.conf only when its Prolog is ours already."""


def slurm_conf(conf: Conf, hooks: str, nodes: Sequence[str], kind: NodeType | None) -> tuple[dict[str, str], list[str]]:
    """The text of slurm.conf and of each file it includes, and what is left to a person; `hooks` is their folder."""
    changes: dict[Line, str] = {}
    added: list[str] = []
    chained = False
    settings = {"GresTypes": wanted.gres_types(conf.value("GresTypes"))}
    for key, name in wanted.HOOKS.items():
        site, ours = sites_own(conf, hooks, key), os.path.join(hooks, name)
        chained |= bool(site)
        settings[key] = ours
        if site and site == conf.value(key):
            added.append(f"{_SITE}{key}={site}")
        # Slurm 24.05 and later run what each line names, and ours once is enough; 22.05 runs the last alone.
        for other in conf.of_kind(key)[:-1]:
            if other.get(key) == ours:
                changes[other] = "# " + other.raw.replace("\n", "\n# ")
    settings["PrologFlags"] = wanted.prolog_flags(conf.value("PrologFlags"))
    settings["PrologEpilogTimeout"] = wanted.hook_timeout(conf.value("PrologEpilogTimeout"), chained=chained)
    settings["BatchStartTimeout"] = wanted.start_timeout(conf.value("BatchStartTimeout"))
    settings["JobSubmitPlugins"] = wanted.submit_plugins(conf.value("JobSubmitPlugins"))
    settings["SchedulerParameters"] = wanted.scheduler_parameters(conf.value("SchedulerParameters"))
    for key, value in settings.items():
        line = conf.setting(key)
        if line is None:
            added.append(f"{key}={value}")
        elif not wanted.is_same(line.get(key) or "", value):
            changes[line] = line.with_value(key, value)
    more, decide = _node_lines(conf, nodes, kind) if kind else ({}, [])
    if kind and kind.admission == "gates":
        gates = gate_lines.plan(conf, nodes, kind, more)
        more, added, decide = dict(gates.changes), [*added, *gates.added], [*decide, *gates.decide]
    texts = conf_lines.changed(conf, {**changes, **more})
    texts[conf.path] = _with_block(texts[conf.path], added)
    return texts, decide


def gres_conf(conf: Conf) -> tuple[str, list[str]]:
    """The text of gres.conf, and what is left to a person."""
    text = conf.texts.get(conf.path, "")
    decide = [
        f"{line.where} has AutoDetect={value}: it finds MIG instances and counts them as gres/gpu; "
        "on nodes with migmem it has to be off"
        for line in conf.lines
        if (value := line.get("AutoDetect")) and value.lower() != "off"
    ]
    if any((line.get("Name") or "").lower() == "migmem" for line in conf.lines):
        return text, decide
    return _with_block(text, [wanted.COUNT_ONLY]), decide


def sites_own(conf: Conf, hooks: str, key: str) -> str:
    """The hook of that key that is not ours, as slurm.conf has it, or had it before setup changed it."""
    value = conf.value(key)
    if value and value != os.path.join(hooks, wanted.HOOKS[key]):
        return value
    found = re.search(rf"^{_SITE}{key}=(\S+)", conf.texts.get(conf.path, ""), re.MULTILINE)
    return found[1] if found else ""


def others_write(text: str) -> bool:
    """Whether a file says that a program hands it out, which would undo a change made here."""
    words = r"ansible|puppet|chef|salt|cfengine|managed by|do not edit"
    return re.search(rf"^\s*#.*\b(?:{words})\b", text, re.IGNORECASE | re.MULTILINE) is not None


def _node_lines(conf: Conf, nodes: Sequence[str], kind: NodeType) -> tuple[dict[Line, str], list[str]]:
    changes: dict[Line, str] = {}
    decide = []
    missing, usual = set(nodes), ""
    for line in conf.of_kind("NodeName"):
        names = conf_lines.hosts(line.get("NodeName") or "")
        gres = line.get("Gres")
        if names == ("DEFAULT",):
            usual = gres or usual
            continue
        mine = missing & set(names)
        missing -= mine
        new = wanted.node_gres(gres if gres is not None else usual, kind.count_mib)
        if not mine or wanted.is_same(gres or "", new):
            continue
        if len(mine) < len(names):
            others = ",".join(name for name in names if name not in mine)
            decide.append(
                f"{line.where} is of {others} too: put what is not like {','.join(sorted(mine))} in a line of its own, "
                f"or name them all with --nodes; then: Gres={new}"
            )
            continue
        changes[line] = line.with_value("Gres", new)
    if missing:
        named = ",".join(sorted(missing))
        decide.append(f"{conf.path} has no NodeName={named}: there it has to say: Gres=migmem:{kind.count_mib}")
    return changes, decide


def _with_block(text: str, lines: Sequence[str]) -> str:
    """The text with those lines in the block that is ours."""
    if not lines:
        return text
    whole = "".join(f"{line}\n" for line in lines)
    if f"{_END}\n" in text:
        return text.replace(f"{_END}\n", f"{whole}{_END}\n", 1)
    if text and not text.endswith("\n"):
        text += "\n"
    return f"{text}{_BEGIN}\n{whole}{_END}\n"

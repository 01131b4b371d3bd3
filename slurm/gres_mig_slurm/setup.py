"""What a node and its controller need for migmem: planned as files first, so that it can be shown instead."""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

import gres_mig
from gres_mig.errors import ConfigError
from gres_mig.values import Value, replace
from gres_mig_slurm import conf_changes, conf_lines, gate_lines, sizes_file, trust, wanted
from gres_mig_slurm.conf_lines import Conf
from gres_mig_slurm.files import File, planned
from gres_mig_slurm.profiles import NodeType, Sizes

LUA, SITE_LUA, GATES_LUA = "job_submit.lua", "job_submit.site.lua", "job_submit.gates.lua"
ANY_PYTHON = "ANY_PYTHON"
"""In gres-mig.env of a rehearsal: whoever may change its Python is of no account."""

_CHAINS = {"Prolog": "PROLOG_CHAIN", "Epilog": "EPILOG_CHAIN", "TaskProlog": "TASK_PROLOG_CHAIN"}
_SOURCE = os.path.join(os.path.dirname(__file__), "hooks")
_USUAL_BIN = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")

# A folder of scripts given as a pattern; Slurm runs what it matches in reverse alphabetical order.
_ALL_OF = """\
#!/bin/sh
# Written by: gres-mig slurm setup
# The site's own scripts, in the order in which Slurm ran them.
set --
for program in {pattern}; do set -- "$program" "$@"; done
for program; do "$program" || exit; done
"""


class Place(Value):
    """Where things are on this machine."""

    conf: str
    """slurm.conf."""
    python: str
    config: str
    """gres-mig's own configuration."""
    state: str
    handover: str
    scontrol: str = ""
    """Where it was found."""
    any_python: bool = False
    """A rehearsal: others than root may change what the hooks run."""

    @property
    def is_sent(self) -> bool:
        """Whether slurm.conf is where slurmd puts what the controller sends to a node without one."""
        return self.conf == conf_lines.PATHS[1]

    @property
    def etc(self) -> str:
        """The folder in which slurm.conf is kept, here or on the controller."""
        return os.path.dirname(conf_lines.PATHS[0] if self.is_sent else self.conf)

    @property
    def hooks(self) -> str:
        """The folder of the hooks."""
        return os.path.join(self.etc, wanted.FOLDER)


class Plan(Value):
    """All that is to be written, and what a person has to decide."""

    files: tuple[File, ...]
    decide: tuple[str, ...] = ()


def for_node(place: Place, conf: Conf, units: Mapping[str, str]) -> Plan:
    """What every node needs, one without GPUs too: slurm.conf names its hooks for all of them."""
    files = list(_hooks(place, conf))
    files += [planned(path, text, mode=0o644) for path, text in units.items()]
    flaws = [] if place.any_python else list(trust.flaws(*_run_by(place)))
    flaws += [flaw for _, flaw in _flaws_of_chains(place, conf)]
    return Plan(tuple(files), tuple(f"{flaw.text}; {flaw.todo}" for flaw in flaws))


def refuse_what_others_can_change(place: Place, conf: Conf) -> None:
    """Raise where somebody else than root could change what the hooks of that plan run."""
    if not place.any_python:
        trust.require(*_run_by(place))
    for program, flaw in _flaws_of_chains(place, conf):
        raise ConfigError(f"the hooks would run the site's own {program}, but {flaw.text}", hint=flaw.todo)


def for_controller(place: Place, conf: Conf, nodes: Sequence[str], kind: NodeType | None, *, edit: bool) -> Plan:
    """What the controller needs; `kind` is what these nodes are, where that is known.

    Without `edit` slurm.conf and gres.conf are only shown as they would be; where slurm.conf was sent, all is.
    """
    if not conf.texts:
        raise ConfigError(f"there is no {conf.path}", hint="name it with --slurm-conf")
    if place.is_sent and edit:
        hint = "here run: gres-mig slurm setup --write --node, and all else on the controller"
        raise ConfigError(f"{conf.path} was sent by the controller: a change here would not last", hint=hint)
    texts, decide = conf_changes.slurm_conf(conf, place.hooks, nodes, kind)
    gres = os.path.join(place.etc, "gres.conf")
    texts[gres], more = conf_changes.gres_conf(conf_lines.read(gres))
    files = [planned(file, text, edit=edit and not conf_changes.others_write(text)) for file, text in texts.items()]
    files += _submit(place)
    if kind is not None:
        path = os.path.join(place.etc, sizes_file.FILE_NAME)
        known = known_sizes(path)
        # Of a type that is new to this file there are as many as are written for it.
        known = replace(known, placeholders=gate_lines.placeholders(conf) or gate_lines.USUAL)
        known = sizes_file.merged(known, with_known_nodes(kind, known))
        files.append(planned(path, sizes_file.render(known), mode=0o644))
        if any(each.admission == "gates" for each in known.types):
            files.append(planned(os.path.join(place.etc, GATES_LUA), packaged(GATES_LUA), mode=0o644))
    else:
        more.append("no GPU is managed here: on a node of each type run gres-mig slurm profiles, for its Gres= as well")
        more.append("once several types are known here, this is run for each, with its --nodes")
    if place.is_sent:
        files = [replace(file, edit=False) for file in files]
    return Plan(tuple(files), (*decide, *more))


def known_sizes(path: str) -> Sizes:
    """The sizes file at that path; without one, nothing is known yet."""
    try:
        with open(path, encoding="utf-8") as file:
            return sizes_file.parse(file.read(), path)
    except FileNotFoundError:
        return Sizes(())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reading {path}: {error}") from error


def with_known_nodes(kind: NodeType, known: Sizes) -> NodeType:
    """That type of node, of the nodes too that are known to be of it."""
    nodes = next((each.nodes for each in known.types if each.name == kind.name), "")
    if not nodes or set(conf_lines.hosts(nodes)) <= set(conf_lines.hosts(kind.nodes)):
        return kind
    more = set(conf_lines.hosts(kind.nodes)) <= set(conf_lines.hosts(nodes))
    return replace(kind, nodes=nodes if more else f"{nodes},{kind.nodes}")


def assigned(path: str) -> dict[str, str]:
    """What gres-mig.env assigns; nothing where there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            words = shlex.split(file.read(), comments=True)
    except (FileNotFoundError, ValueError):
        return {}
    except OSError as error:
        raise ConfigError(f"reading {path}: {error.strerror}") from error
    return dict(word.split("=", 1) for word in words if "=" in word)


def packaged(name: str) -> str:
    """The text of one of the hooks, as this version has it."""
    with open(os.path.join(_SOURCE, name), encoding="utf-8") as file:
        return file.read()


def _run_by(place: Place) -> tuple[str, ...]:
    # Not resolved: whoever can change a link on the way has the hooks run another Python.
    return place.python, gres_mig.__file__, __file__


def _sites_own(place: Place, conf: Conf) -> dict[str, str]:
    """The site's own hooks, each a program, or a pattern that names several."""
    before = assigned(os.path.join(place.hooks, wanted.ENV))
    return {
        chain: conf_changes.sites_own(conf, place.hooks, key) or before.get(chain, "") for key, chain in _CHAINS.items()
    }


def _flaws_of_chains(place: Place, conf: Conf) -> Iterator[tuple[str, trust.Flaw]]:
    # One that is not there is a matter of `slurm check`.
    for site in _sites_own(place, conf).values():
        for program in sorted(glob.glob(site)):
            yield from ((program, flaw) for flaw in trust.flaws(program, sticky=True))


def _hooks(place: Place, conf: Conf) -> Iterator[File]:
    for name in wanted.HOOKS.values():
        yield planned(os.path.join(place.hooks, name), packaged(name), mode=0o755)
    path = os.path.join(place.hooks, wanted.ENV)
    before = assigned(path)
    values = {"PYTHON": place.python, "CONFIG": place.config, "STATE": place.state, "HANDOVER": place.handover}
    if place.any_python:
        values[ANY_PYTHON] = "yes"
    folder = os.path.dirname(place.scontrol)
    values["SLURM_BIN"] = folder if folder and folder not in _USUAL_BIN else before.get("SLURM_BIN", "")
    sites = _sites_own(place, conf)
    for key, chain in _CHAINS.items():
        site = sites[chain]
        if re.search(r"[*?\[]", site):
            script = os.path.join(place.hooks, f"site_{wanted.HOOKS[key]}")
            yield planned(script, _ALL_OF.format(pattern=site), mode=0o755)
            site = script
        values[chain] = site
    lines = "".join(f"{key}={shlex.quote(value)}\n" for key, value in values.items() if value)
    yield planned(path, f"# Written by: gres-mig slurm setup\n{lines}", mode=0o644)


def _submit(place: Place) -> Iterator[File]:
    path, site = os.path.join(place.etc, LUA), os.path.join(place.etc, SITE_LUA)
    file = planned(path, packaged(LUA), mode=0o644)
    if file.before is not None and not is_ours(file.before):
        moved = planned(site, file.before, mode=0o644)
        if moved.before not in (None, file.before):
            hint = "put what is still needed into the second, and remove the first"
            raise ConfigError(f"{path} and {site} are both the site's own", hint=hint)
        yield moved
    yield file


def is_ours(script: str) -> bool:
    """Whether that is a job_submit.lua of gres-mig's, of whatever version."""
    return "gres-mig:1:" in script

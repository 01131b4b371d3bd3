"""Pure: what slurm.conf has to say for migmem, from what it says; `setup` writes that, `check` asks for it."""

from __future__ import annotations

import re

HOOKS = {"Prolog": "prolog.sh", "Epilog": "epilog.sh", "TaskProlog": "task_prolog.sh"}
"""The hooks' files in their folder, by their key in slurm.conf."""

FOLDER = "gres-mig"
"""The hooks' folder, beside slurm.conf."""

ENV = "gres-mig.env"
"""Beside the hooks: which Python and which configuration they use."""

BUDGET_S = 45
"""Within this a hook of ours is over, whatever hangs: `hook.WORK_S` and the time limits of what it asks Slurm."""

TIMEOUT_S = 60
CHAINED_TIMEOUT_S = 300
"""PrologEpilogTimeout where there is none: of ours alone, and with a site's own hook after it, which had no limit."""

COUNT_ONLY = "Name=migmem Flags=CountOnly"
"""gres.conf's line: nothing but a count, so that no plugin gres_migmem.so is looked for."""

UNLIMITED = 65534
"""Slurm's way to say that there is none."""

_MIGMEM = re.compile(r"migmem(?::.*)?", re.IGNORECASE)


def gres_types(value: str) -> str:
    """GresTypes with migmem."""
    return _with(value, "migmem")


def prolog_flags(value: str) -> str:
    """PrologFlags with what the hooks need.

    Contain: a step daemon for the whole of a job on each of its nodes, which says that it lives, and prologs on all of
    them at its start. DeferBatch: no batch script before all of them are over, or one that has to be started again for
    want of a place on its second node has begun to run on its first. NoHold is not to be had together with Contain.
    """
    kept = ",".join(flag for flag in _words(value) if flag.lower() != "nohold")
    return _with(kept, "Contain", "DeferBatch")


def submit_plugins(value: str) -> str:
    """JobSubmitPlugins with lua."""
    return _with(value, "lua")


def scheduler_parameters(value: str) -> str:
    """SchedulerParameters so that a job whose prolog failed for a fault of its node is tried elsewhere, not held."""
    return _with(value, "nohold_on_prolog_fail")


def hook_timeout(value: str, *, chained: bool = False) -> str:
    """PrologEpilogTimeout: long enough for ours, and not for ever."""
    seconds = _seconds(value)
    if seconds is None or seconds == UNLIMITED:
        return str(CHAINED_TIMEOUT_S if chained else TIMEOUT_S)
    return value if seconds >= TIMEOUT_S else str(TIMEOUT_S)


def start_timeout(value: str) -> str:
    """BatchStartTimeout: with Slurm's 10 s a job would be taken for lost, and started again, while its prolog waits."""
    seconds = _seconds(value)
    return value if seconds is not None and seconds >= TIMEOUT_S else str(TIMEOUT_S)


def node_gres(value: str, count_mib: int) -> str:
    """A node's Gres with so much migmem."""
    others = [each for each in _words(value) if not _MIGMEM.fullmatch(each)]
    return ",".join([*others, f"migmem:{count_mib}"])


def counted_mib(value: str) -> int | None:
    """How much migmem a node's Gres has, as slurm.conf or `scontrol show node` writes it; None without."""
    for each in _words(value):
        found = re.fullmatch(r"migmem:(\d+)([kKmMgG]?)(?:\(.*\))?", each)
        if found:
            mib: int = int(found[1]) << 10 * " KMG".index(found[2].upper() or " ")
            return mib
    return None


def is_same(value: str, other: str) -> bool:
    """Whether two lists of words say the same."""
    return {word.lower() for word in _words(value)} == {word.lower() for word in _words(other)}


def _with(value: str, *needed: str) -> str:
    words = _words(value)
    there = {word.lower() for word in words}
    return ",".join([*words, *(word for word in needed if word.lower() not in there)])


def _words(value: str) -> list[str]:
    # Not at a comma in brackets: gpu:a100:2(S:0,1).
    words = [word.strip() for word in re.split(r",(?![^(]*\))", value)]
    return [word for word in words if word and word.lower() not in ("(null)", "none", "n/a")]


def _seconds(value: str) -> int | None:
    found = re.match(r"\d+", value)
    return int(found[0]) if found else None

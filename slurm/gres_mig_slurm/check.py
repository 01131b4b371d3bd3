"""A running cluster against what migmem needs: each thing that is wrong, with the line to change."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from gres_mig.doctor import Finding
from gres_mig.errors import BadRequest, GresMigError
from gres_mig.models import Settings
from gres_mig_slurm import check_chain, check_counts, check_files, conf_lines, gate_lines, running, wanted
from gres_mig_slurm.running import Cluster


def findings(conf_path: str, settings: Settings, node: str = "") -> Iterator[Finding]:
    """All checks that can be made on this machine; `node` is its name, where that is not its host's."""
    try:
        cluster = running.look(conf_path, node)
    except GresMigError as error:
        yield Finding("slurmctld", "problem", error.message, "when slurmctld answers, run: gres-mig slurm check")
        return
    machines = [name for name in cluster.nodes if not gate_lines.is_placeholder(name)]
    if node and node not in machines:
        raise BadRequest(f"this cluster has no node {node}", hint=f"its nodes: {', '.join(machines)}")
    gres = conf_lines.read(os.path.join(cluster.etc, "gres.conf"))
    yield from _flags(cluster)
    yield from _timeouts(cluster)
    yield from _lists(cluster)
    yield from _requeue(cluster)
    yield from check_files.hooks(cluster)
    yield from check_files.submit_script(cluster)
    yield from check_chain.submit_script(cluster)
    yield from check_files.gres_conf(gres)
    yield from check_counts.counts(cluster)
    yield from check_counts.this_node(cluster, gres, settings)


def _flags(cluster: Cluster) -> Iterator[Finding]:
    now = cluster.value("PrologFlags")
    flags = {flag.lower() for flag in now.split(",")}
    todo = cluster.todo("PrologFlags", wanted.prolog_flags)
    wrong = []
    if "contain" not in flags:
        wrong.append("without Contain nothing says that an idle allocation lives")
    if "deferbatch" not in flags:
        wrong.append("without DeferBatch a script begins on its first node before the second has a place")
    if "nohold" in flags:
        wrong.append("NoHold cannot be had together with Contain")
    for text in wrong:
        yield Finding("PrologFlags", "problem", f"{now or 'none'}: {text}", todo)
    if "serial" in flags:
        text = "Serial lets an epilog wait for another job's prolog, and its instance with it"
        yield Finding("PrologFlags", "warning", text, "leave it out if nothing else needs it")
    if not wrong:
        yield Finding("PrologFlags", "ok", now)


def _timeouts(cluster: Cluster) -> Iterator[Finding]:
    found = False
    for key in ("PrologEpilogTimeout", "PrologTimeout", "EpilogTimeout"):
        # The last two are of Slurm 24.11 and newer.
        now = cluster.value(key)
        seconds = _seconds(now)
        if seconds is None:
            continue
        if seconds < wanted.BUDGET_S:
            text = f"{seconds} s: a hook may take {wanted.BUDGET_S} s, and one that is cut off drains the node"
            found = True
            yield Finding("timeouts", "problem", f"{key} is {text}", cluster.todo(key, wanted.hook_timeout))
        elif key == "PrologEpilogTimeout" and seconds == wanted.UNLIMITED:
            text = f"{key} is not set: a hook that hangs holds its node for ever"
            found = True
            yield Finding("timeouts", "warning", text, cluster.todo(key, wanted.hook_timeout))
    # Slurm adds as much for its own messages.
    start = _seconds(cluster.value("BatchStartTimeout")) or 0
    patience = start + min(10, _seconds(cluster.value("MessageTimeout")) or 10)
    if patience < wanted.BUDGET_S:
        text = f"BatchStartTimeout is {start} s: a job is taken for lost after {patience} s, while its prolog may wait"
        found = True
        todo = cluster.todo("BatchStartTimeout", wanted.start_timeout)
        yield Finding("timeouts", "problem", text, todo)
    if not found:
        yield Finding("timeouts", "ok", f"longer than the {wanted.BUDGET_S} s that a hook may take")


def _lists(cluster: Cluster) -> Iterator[Finding]:
    for key, needed, what in (
        ("GresTypes", wanted.gres_types, "migmem is unknown to this cluster"),
        ("JobSubmitPlugins", wanted.submit_plugins, "nothing rounds requests up to what they count"),
    ):
        now = cluster.value(key)
        if wanted.is_same(now, needed(now)):
            yield Finding(key, "ok", now)
        else:
            yield Finding(key, "problem", f"{now or 'none'}: {what}", cluster.todo(key, needed))


def _requeue(cluster: Cluster) -> Iterator[Finding]:
    now = cluster.value("SchedulerParameters")
    if wanted.is_same(now, wanted.scheduler_parameters(now)):
        yield Finding("requeue", "ok", "no job is held for a fault of its node")
        return
    text = "a job whose prolog fails for a fault of its node is held until somebody releases it"
    yield Finding("requeue", "warning", text, cluster.todo("SchedulerParameters", wanted.scheduler_parameters))


def _seconds(value: str) -> int | None:
    found = re.match(r"\d+", value)
    return int(found[0]) if found else None

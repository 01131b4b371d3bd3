"""Checks of the site's own programs that run after our hooks, and of its own submit script."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterator

from gres_mig.doctor import Finding
from gres_mig_slurm import setup, trust
from gres_mig_slurm.running import Cluster

_KEYS = ("PROLOG_CHAIN", "EPILOG_CHAIN", "TASK_PROLOG_CHAIN")
_PATTERN = re.compile(r"^for program in (.+?); do ", re.MULTILINE)
"""In what `setup` writes where slurm.conf named a site's hooks by a pattern."""


def programs(env: str) -> Iterator[Finding]:
    """Of those that the hooks' settings name: root runs the first two, and every job's user the third."""
    for key, program in setup.assigned(env).items():
        if key not in _KEYS or not program:
            continue
        if not os.access(program, os.X_OK):
            text = f"{key} in {env} is no program: {program}"
            yield Finding("chain", "problem", text, f"correct it, or take the line out of {env}")
            continue
        for path in (program, *_named_by_pattern(program)):
            for flaw in trust.flaws(path, sticky=True):
                yield Finding("chain", "problem", f"{key} runs {path}, but {flaw.text}", flaw.todo)


def submit_script(cluster: Cluster) -> Iterator[Finding]:
    """Of the site's job_submit script, which slurmctld runs as SlurmUser: it is root's, or that user's own."""
    path = os.path.join(cluster.etc, setup.SITE_LUA)
    try:
        status = os.stat(path)
    except OSError:
        return
    # `SlurmUser               = slurm(64030)`
    slurm_user = re.search(r"\((\d+)\)", cluster.value("SlurmUser"))
    if status.st_uid not in (0, int(slurm_user[1]) if slurm_user else 0):
        text = f"slurmctld runs {path}, which belongs to uid {status.st_uid}"
        yield Finding("chain", "problem", text, f"run: chown root:root {path}")
    if status.st_mode & 0o022:
        text = f"slurmctld runs {path}, which others can write (mode {stat.S_IMODE(status.st_mode):04o})"
        yield Finding("chain", "problem", text, f"run: chmod go-w {path}")


def _named_by_pattern(program: str) -> list[str]:
    try:
        with open(program, encoding="utf-8", errors="replace") as file:
            found = _PATTERN.search(file.read())
    except OSError:
        return []
    return sorted(glob.glob(found[1])) if found else []

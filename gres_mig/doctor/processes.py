"""The processes of a node by the name of their program, those in containers too, as /proc shows them."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from gres_mig.values import Value


class Running(Value):
    """A process that runs one of the wanted programs."""

    pid: int
    program: str
    arguments: tuple[str, ...]
    folder: Path
    """Of it in /proc."""

    def is_of_root(self) -> bool:
        """Whether root runs it, and not for a job: there its user decides."""
        for line in _text(self.folder / "status").splitlines():
            if line.startswith("Uid:"):
                return line.split()[1] == "0" and "slurmstepd" not in _text(self.folder / "cgroup")
        return False

    def environment(self) -> dict[str, str]:
        """Its variables when it was started, where they may be read."""
        pairs = (pair.partition("=") for pair in _text(self.folder / "environ").split("\0"))
        return {name: value for name, sign, value in pairs if sign}


def running(proc: Path, programs: Collection[str]) -> list[Running]:
    """Those of them that run, by pid."""
    found = []
    for folder in proc.glob("[0-9]*"):
        words = tuple(_text(folder / "cmdline").split("\0"))
        # The first two: a script's name comes after its interpreter's.
        program = next((name for name in map(os.path.basename, words[:2]) if name in programs), "")
        if program:
            found.append(Running(int(folder.name), program, words[1:], folder))
    return sorted(found, key=lambda process: process.pid)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

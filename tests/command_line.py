"""Runs the command line: in a process of its own, or in this one where only its answer matters."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from gres_mig.__main__ import main
from gres_mig.simulator import uninstall
from gres_mig.simulator.program import command, environment


class Answer(NamedTuple):
    """What a command line answered."""

    code: int
    out: str
    err: str

    @property
    def plain(self) -> dict[str, Any]:
        """Its JSON."""
        answer: dict[str, Any] = json.loads(self.out)
        return answer

    @property
    def flat(self) -> str:
        """Its text in one line, however wide the terminal is."""
        return " ".join(self.out.split())


def run(*words: object, **variables: str) -> Answer:
    """In a process of its own; `variables` are added to its environment."""
    done = subprocess.run(
        command(*map(str, words)), env=environment(**variables), capture_output=True, text=True, check=False
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def start(*words: object) -> subprocess.Popen[str]:
    """In a process of its own that is not waited for."""
    return subprocess.Popen(
        command(*map(str, words)), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def here(*words: object) -> Answer:
    """In this process, which takes a quarter of the time."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(word) for word in words])
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            uninstall()
    return Answer(code, *(stream.detach().getvalue().decode() for stream in (out, err)))


def until(true: Callable[[], object], wait_s: float = 20.0) -> None:
    """Look until it is so; no event tells of what another process does."""
    ends = time.monotonic() + wait_s
    while not true():
        assert time.monotonic() < ends, "it never came to be"
        time.sleep(0.002)


def state_of(pid: int) -> str:
    """The letter in /proc/PID/stat: `T` is stopped, `Z` a zombie, nothing gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""

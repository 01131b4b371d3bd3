"""One GPU that a bench shares by slices, with records of its own, and the programs in them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gres_mig.answers import added
from gres_mig.simulator.program import command, environment

PATIENCE_S = 180.0
"""PyTorch's first start on a cold disk takes a minute; that of its workers as long again."""
_WORKER = Path(__file__).with_name("slice_worker.py")


class Gone(Exception):
    """A program ended, or a command failed, where it should not have; the text says how."""


class Use(NamedTuple):
    """What the police say of one slice."""

    used_mib: int
    given_mib: int
    pids: tuple[int, ...]
    measure: str


class Node:
    """gres-mig that shares this one GPU and knows no other; its records and its run folder are in `folder`."""

    def __init__(
        self, folder: Path, gpu: str = "", library: str = "", keep_umask: str = "", *, simulated: str = ""
    ) -> None:
        self.folder, self.gpu, self.simulated = folder, gpu, simulated
        keys: dict[str, Any] = {
            "slices": [gpu] if gpu else "",
            "hami_core": library,
            "keep_umask": keep_umask,
            "simulator": simulated,
        }
        places = f'[node.bench]\nstate_dir = "{folder}/state"\nrun_dir = "{folder}/run"\n'
        for over_grant in ("warn", "end"):
            keys.update(over_grant=over_grant, over_grant_after=0)
            lines = [f"{key} = {json.dumps(value)}\n" for key, value in keys.items() if value != ""]
            (folder / f"{over_grant}.toml").write_text("".join(lines) + places)

    def run(self, *words: str, over_grant: str = "warn") -> dict[str, Any]:
        """What a command answers; `Gone` with its own line where it fails."""
        return answered("--config", str(self.folder / f"{over_grant}.toml"), "--name", "bench", *words, "--json")

    def police(self, over_grant: str = "warn") -> tuple[dict[str, Use], tuple[int, ...]]:
        """What each slice uses, by the name of its owner, and the pids of no slice; they act as they are told to."""
        said = self.run("police", "--once", over_grant=over_grant)
        uses = {
            each["owner"].partition(":")[2]: Use(
                each["used_mib"], each["given_mib"], tuple(each["pids"]), each["measure"] or ""
            )
            for each in said["slices"]
        }
        return uses, tuple(each["pid"] for each in said["foreign"])

    def variables(self, name: str) -> dict[str, str]:
        """What processes of that slice are told."""
        told: dict[str, str] = self.run("env", f"manual:{name}")["environment"]
        return told

    def holds(self, name: str) -> bool:
        """Whether that owner has anything."""
        gpus = self.run("status")["gpus"]
        return any(holding["owner"] == f"manual:{name}" for gpu in gpus for holding in gpu["holdings"])

    def start(self, kind: str, variables: Mapping[str, str]) -> Program:
        """A program with those variables besides this process's own."""
        return Program([kind, self.simulated], added(variables, environment()), self.folder)


class Program:
    """A running slice_worker.py; its umask is 027, as its user set it."""

    def __init__(self, words: list[str], variables: Mapping[str, str], folder: Path) -> None:
        self._said = (folder / f"{time.monotonic_ns()}.stderr").open("w+")
        # A session of its own, so that its workers end with it.
        self.process = subprocess.Popen(
            [sys.executable, str(_WORKER), *words], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._said, text=True, umask=0o027, start_new_session=True,
        )  # fmt: skip

    def ask(self, *words: object) -> dict[str, Any]:
        """What it answers; `Gone` where it ends instead, or takes too long."""
        assert self.process.stdin
        assert self.process.stdout
        late = threading.Timer(PATIENCE_S, self._kill)
        late.start()
        try:
            self.process.stdin.write(" ".join(map(str, words)) + "\n")
            self.process.stdin.flush()
            # What else is preloaded may say something too.
            line = next((line for line in self.process.stdout if line.startswith("{")), "")
        except BrokenPipeError:
            line = ""
        finally:
            late.cancel()
        if not line:
            raise Gone(f"the program ended with {self.process.wait()} when told to {words[0]}: {self._last_line()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """End it, however it is, and its workers."""
        self._kill()
        self.process.communicate()
        self._said.close()

    def _kill(self) -> None:
        # Once it was waited for, its number may be another's; and then its end was seen by that of its workers.
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def _last_line(self) -> str:
        self._said.seek(0)
        return (self._said.read().strip().splitlines() or ["it said nothing"])[-1]


def answered(*words: str) -> dict[str, Any]:
    """The JSON that a command of gres-mig prints; `Gone` with its own line where it fails."""
    done = subprocess.run(command(*words), env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise Gone(
            (done.stderr.strip().splitlines() or [f"gres-mig {' '.join(words)} ended with {done.returncode}"])[-1]
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def until(true: Callable[[], bool], wait_s: float) -> bool:
    """Whether it came to be so in that time; no event tells of what the driver does."""
    ends = time.monotonic() + wait_s
    while not (done := true()) and time.monotonic() < ends:
        time.sleep(0.2)
    return done

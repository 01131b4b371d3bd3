"""Starts `gres-mig` in processes of its own, and a stand-in for a job's program that is watched while it counts."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from gres_mig.errors import NodeFault

_PATIENCE_S = 15.0
_CODE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def command(*words: str) -> list[str]:
    """The command line of this very code, to be run in a process of its own."""
    return [sys.executable, "-m", "gres_mig", *words]


def environment(**more: str) -> dict[str, str]:
    """This process's environment, in which `command` finds the code that runs here."""
    path = os.pathsep.join(filter(None, (_CODE, os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, **more}


class Program:
    """A job's program in a process of its own, counting on the MIG device that its environment names."""

    def __init__(self, folder: str, variables: dict[str, str]) -> None:
        words = command("simulate", "work", folder)
        self._process = subprocess.Popen(words, env=environment(**variables), stdout=subprocess.PIPE, bufsize=0)
        assert self._process.stdout is not None
        self._pipe, self._left = self._process.stdout.fileno(), b""
        self.pid, self.count, self.longest_pause_s = self._process.pid, 0, 0.0
        self._last_s = 0.0
        self._expect(self._line().startswith(b"opened "), "did not open its MIG device")

    def count_on(self, steps: int = 3) -> int:
        """Its count, after it went on by so many steps from now; `NodeFault` where it left one out or stopped."""
        while self._ready(0.0):
            self._step()
        for _ in range(steps):
            self._step()
        return self.count

    def end(self) -> int:
        """Its count when it ended."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(_PATIENCE_S)
        while self._ready(0.0) and (line := self._line()):
            self._take(line)
        self._expect(self._process.returncode == 0, f"ended with {self._process.returncode}")
        self.close()
        return self.count

    def close(self) -> None:
        """End it, however it is."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _step(self) -> None:
        self._expect(self._ready(_PATIENCE_S), "stopped counting")
        line = self._line()
        self._expect(bool(line), "ended")
        self._take(line)

    def _take(self, line: bytes) -> None:
        count, at_s = line.split()
        self._expect(int(count) == self.count + 1, f"counted from {self.count} to {count.decode()}")
        self.longest_pause_s = max(self.longest_pause_s, float(at_s) - self._last_s)
        self.count, self._last_s = int(count), float(at_s)

    def _ready(self, wait_s: float) -> bool:
        return b"\n" in self._left or bool(select.select([self._pipe], [], [], wait_s)[0])

    def _line(self) -> bytes:
        while b"\n" not in self._left:
            part = os.read(self._pipe, 4096)
            if not part:
                return b""
            self._left += part
        line, _, self._left = self._left.partition(b"\n")
        return line

    def _expect(self, true: bool, otherwise: str) -> None:
        if not true:
            self.close()
            raise NodeFault(f"the program on the instance {otherwise}", code="INTERNAL")

"""How a story is told that checks itself: chapters, the commands that are run, what was checked, maps of GPUs."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable

from gres_mig import config, show
from gres_mig.errors import NodeFault
from gres_mig.look import look
from gres_mig.show import Paper
from gres_mig.simulator.program import command, environment

_PATIENCE_S = 15.0


class Story:
    """`say` prints a piece of it, `checks` counts what was checked so far, `chapter` is the last one's number."""

    def __init__(self, say: Callable[[str], None], paper: Paper, chapter: int = 0) -> None:
        self._out, self._paper = say, paper
        self.checks, self.chapter = 0, chapter

    def _run(self, *words: str, node: str = "", exit_code: int = 0, quiet: bool = False) -> str:
        """What `gres-mig` printed, on that simulated node; it has to end with that exit code."""
        if not quiet:
            self._echo("gres-mig", *words)
        words = ("--node", node, *words) if node else words
        done = subprocess.run(command(*words), env=environment(), capture_output=True, text=True, check=False)
        text = (done.stdout + done.stderr).strip()
        if not quiet:
            self._quote(text)
        if done.returncode != exit_code:
            raise NodeFault(f"gres-mig {' '.join(words)}: exit code {done.returncode}: {text}", code="INTERNAL")
        return text

    def _check(self, true: bool, claim: str, *, quiet: bool = False) -> None:
        if not true:
            raise NodeFault(f"the demo differs from its story: {claim}", code="INTERNAL")
        self.checks += 1
        if not quiet:
            self._say(f"  {self._paper.paint('allocation', 'checked')}: {claim}")

    def _until(self, true: Callable[[], bool]) -> None:
        ends = time.monotonic() + _PATIENCE_S
        while not true():
            if time.monotonic() > ends:
                raise NodeFault("the demo waited in vain", code="INTERNAL")
            time.sleep(0.002)

    def _head(self, text: str) -> None:
        self.chapter += 1
        self._say("\n" + self._paper.paint("title", f"{self.chapter}. {text}"))

    def _text(self, text: str) -> None:
        self._say("\n".join(self._paper.wrap("", text, 0)))

    def _echo(self, *words: str) -> None:
        self._say(f"$ {' '.join(words)}")

    def _quote(self, text: str) -> None:
        self._say("\n".join(f"  {line}" for line in text.splitlines()))

    def _map(self, node: str, title: Iterable[str] = ()) -> None:
        settings = config.load(node=node)
        drawn = show.draw(look(settings), settings, now=time.time(), paper=self._paper)
        self._say("\n".join(["", *title, drawn, ""]))

    def _say(self, text: str) -> None:
        self._out(self._paper.finish([text]))

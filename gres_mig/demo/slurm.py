"""The main job through a real Slurm of two nodes, brought up on loopback for this and taken down again."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from gres_mig import config
from gres_mig.demo.story import Story
from gres_mig.show import Paper
from gres_mig_slurm import delayed, lab
from gres_mig_slurm.delayed import Delayed
from gres_mig_slurm.lab import Lab
from gres_mig_slurm.lab_daemons import USER

_BOARDS = {name: [("rtx-pro-6000", 1)] for name in ("n1", "n2")}


def left_out(folder: str) -> str:
    """Why no Slurm can be brought up in that folder, with what to type; empty where it can."""
    if absent := lab.missing():
        return f"there is no {', '.join(absent)} here; as root, type: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "its daemons are started as root; type: sudo gres-mig demo"
    for name in ("slurm", "munge", USER):
        try:
            pwd.getpwnam(name)
        except KeyError:
            return f"there is no account {name}; type: useradd --system {name}"
    for above in Path(folder).parents:
        if not above.stat().st_mode & 0o001:
            return f"its accounts cannot enter {above}; type: TMPDIR=/tmp gres-mig demo"
    return ""


class SlurmDemo(Story):
    """The story on a cluster whose files are in that folder; its chapters follow on that one."""

    def __init__(self, folder: str, say: Callable[[str], None], paper: Paper, chapter: int) -> None:
        super().__init__(say, paper, chapter)
        self._folder = folder
        self._jobs: dict[str, int] = {}

    def tell(self) -> None:
        """All of it; `NodeFault` as soon as something is not as told."""
        self._head("A Slurm cluster of two nodes")
        self._text(
            "slurmctld, munged and two slurmd of this machine's own Slurm run on loopback, on ports of their own, "
            "with gres-mig's prolog, epilog and submit filter. Each node has one simulated GPU."
        )
        with Lab(_BOARDS, priced=True, folder=Path(self._folder)) as self._lab:
            self._ask("sinfo", "--Node", "--format=%N %T %G")
            self._fill()
            self._cancel_one()
            self._put_back()
            self._wake()
            self._end()
        self._check(not self._lab.processes(), "the cluster is taken down: nothing of it runs any more")

    def _fill(self) -> None:
        self._head("Jobs ask Slurm for memory")
        self._submit("dave", 8000, works=True)
        self._running("dave")
        for name in ("alice", "bob", "carol"):
            self._submit(name, 8000)
        self._running("alice", "bob", "carol")
        places = sorted((i.profile, i.start) for i in self._lab.instances("n1"))
        self._check(places == [("1g.24gb", start) for start in (0, 3, 6, 9)], "four jobs share the one GPU of n1")
        self._check(not self._lab.instances("n2"), "n2 is untouched")
        self._text("Slurm counts what each takes of a GPU, so it starts what no longer fits on the other node.")
        self._submit("erin", 8000)
        self._submit("frank", 30000)
        self._running("erin", "frank")
        shared = sorted(i.profile for i in self._lab.instances("n2"))
        self._check(shared == ["1g.24gb", "2g.48gb"], "the fifth job and a bigger one are on n2")
        self._maps("n1", "n2")

    def _cancel_one(self) -> None:
        self._head("A job is cancelled; its neighbours go on")
        at = {start: name for name in ("alice", "bob", "carol", "dave") for start in self._starts(name)}
        self._beside, self._next, self._last = at[3], at[6], at[9]
        before = self._counted("dave")
        (kept,) = (i for i in self._lab.instances("n1") if i.start == 0)
        self._cancel(self._beside)
        after = self._counted("dave")
        self._lab.until(lambda: self._counted("dave") > after, "dave's program counting on")
        self._check(after > before, f"dave's program beside it counted on from {before} to {after}")
        (now,) = (i for i in self._lab.instances("n1") if i.start == 0)
        self._check(now._replace(holders=()) == kept._replace(holders=()), "its instance is the very same")
        self._maps("n1")

    def _put_back(self) -> None:
        self._head("A job finds no place, and is put back")
        self._cancel(self._next)
        self._text(
            "Half of n1 is free, so Slurm starts a job there that needs half a GPU. But the free slices do not lie "
            "where the driver makes an instance of that size."
        )
        self._submit("grace", 30000)
        self._lab.until(self._delayed, "grace's job put back")
        self._lab.until(lambda: self._lab.state(self._jobs["grace"]) == "PENDING", "grace's job in the queue")
        self._ask("squeue", "--format=%i %j %T %r %N", "--sort=i")
        self._run("why", str(self._jobs["grace"]), node=str(self._lab.gpus("n1")), exit_code=3)
        self._check("grace" not in self._lab.output(self._jobs["grace"]), "nothing of its script has run")
        self._check(not self._lab.run("sinfo", "-h", "-R").stdout, "no node is drained for it")

    def _wake(self) -> None:
        self._head("A place opens, and the job is woken")
        self._text(
            "What ends on a node wakes a job that the node has put back. Slurm starts it some seconds later, not "
            "before it has forgotten the credential of the run that was put back."
        )
        self._cancel(self._last)
        grace = self._jobs["grace"]
        # Its own time to begin again may have come before, on a busy machine.
        self._lab.until(
            lambda: any(job.wakes for job in self._delayed()) or self._lab.state(grace) == "RUNNING",
            "grace's job woken",
        )
        self._running("grace")
        self._check(self._starts("grace") == [6], "it has the place that opened, from start 6 on")
        before = self._counted("dave")
        self._lab.until(lambda: self._counted("dave") > before, "dave's program counting on")
        self._maps("n1")

    def _end(self) -> None:
        self._head("All jobs end")
        left = [str(self._jobs[name]) for name in ("dave", "erin", "frank", "grace")]
        self._echo("scancel", *left)
        self._lab.run("scancel", *left, user="root")
        self._lab.wait_free()
        self._check(not self._lab.instances(), "no instance is left on either node")
        self._ask("sinfo", "--Node", "--format=%N %T")
        self._check(set(self._lab.node_states().values()) == {"idle"}, "both nodes are idle")

    def _submit(self, name: str, mib: int, *, works: bool = False) -> None:
        script = f"#!/bin/sh\necho {name}=$GRES_MIG_UUID\n"
        # A simulated GPU is a file, and root's; to open a device on it is to write there.
        work = f"exec {sys.executable} -I -m gres_mig simulate work {self._lab.gpus('n1')}\n"
        script += work if works else "exec sleep 600\n"
        words = ("sbatch", f"--job-name={name}", f"--gres=migmem:{mib}")
        self._echo(*words, f"{name}.sh")
        output = f"--output={self._lab.home}/%j.out"
        user = "root" if works else USER
        done = self._lab.run(*words, output, user=user, input=script, stdin=None)
        self._quote(done.stderr + done.stdout)
        self._jobs[name] = int(done.stdout.split()[-1])

    def _delayed(self) -> tuple[Delayed, ...]:
        """The jobs that n1 has put back."""
        return delayed.read(config.load(node=self._lab.gpus("n1")))

    def _running(self, *names: str) -> None:
        """Until their scripts run; each has told its instance."""
        for name in names:
            job = self._jobs[name]
            self._lab.wait(job, "RUNNING", within=30)
            self._lab.until(partial(self._uuid, name), f"the script of {name} running")
            (told,) = re.findall(r"^gres-mig: .*$", self._lab.output(job), re.MULTILINE)
            self._say(f"  {name}, job {job} on {self._lab.job(job)['NodeList']}: {told.removeprefix('gres-mig: ')}")

    def _uuid(self, name: str) -> str:
        found = re.search(rf"^{name}=(MIG-\S+)$", self._lab.output(self._jobs[name]), re.MULTILINE)
        return found[1] if found else ""

    def _starts(self, name: str) -> list[int]:
        """Where the instance is that the job was told."""
        return [i.start for i in self._lab.instances() if self._uuid(name) in i.mig_uuids]

    def _counted(self, name: str) -> int:
        """How far a job's program has come; it prints each number with the time."""
        found = re.findall(r"^([0-9]+) [0-9.]+$", self._lab.output(self._jobs[name]), re.MULTILINE)
        return int(found[-1]) if found else 0

    def _cancel(self, name: str) -> None:
        job = self._jobs[name]
        (start,) = self._starts(name)
        self._echo("scancel", f"{job}  # {name}")
        self._lab.scancel(job)
        self._lab.until(
            lambda: all(i.start != start for i in self._lab.instances("n1")), f"the instance of {name} given back"
        )

    def _ask(self, *words: str) -> None:
        self._echo(shlex.join(words))
        self._quote(self._lab.run(*words).stdout)

    def _maps(self, *nodes: str) -> None:
        for node in nodes:
            self._map(str(self._lab.gpus(node)), [self._paper.paint("title", f"on {node}:")])

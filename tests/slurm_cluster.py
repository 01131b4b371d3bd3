"""A real Slurm cluster for tests: the lab, and what only a test does to a cluster or asks of it."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gres_mig_slurm.lab import Lab, missing
from gres_mig_slurm.lab_daemons import HOOKS, USER

__all__ = ["HOOKS", "OTHER_USER", "USER", "Cluster", "brought_up", "require_slurm"]

OTHER_USER = "news"
"""As `USER`, an account that every Debian has."""


def require_slurm() -> None:
    """Skip the module where Slurm cannot be brought up; CI makes that a failure."""
    if absent := missing():
        pytest.skip(f"no {', '.join(absent)} here; run as root: .ci/slurm-packages", allow_module_level=True)
    if os.geteuid() != 0:
        pytest.skip("slurmctld and slurmd are started as root", allow_module_level=True)


@contextmanager
def brought_up(request: pytest.FixtureRequest, *arguments: Any, **options: Any) -> Iterator[Cluster]:
    """A cluster for a module's tests, whose files are kept when one of them failed."""
    before = request.session.testsfailed
    with Cluster(*arguments, **options) as cluster:
        yield cluster
        cluster.kept = cluster.kept or request.session.testsfailed > before


class Cluster(Lab):
    """A cluster of its own, as the lab brings it up."""

    def reconfigure(self, extra: str) -> None:
        """Put other lines at the end of slurm.conf, in place of `extra`, and have the daemons read it."""
        self._given["extra"] = extra
        self.conf.write_text(self._slurm_conf())
        self.scontrol("reconfigure")
        self.until(self._all_idle, "nodes idle after reconfigure")

    def cancel_all(self, *, but: Sequence[int] = (), leaving: Sequence[Any] = ()) -> None:
        """End every job `but` these, and wait until the others' hooks are over and no instance is left, or only
        those `leaving`."""
        kept = {str(job) for job in but}
        if jobs := self._unfinished() - kept:
            self.run("scancel", *jobs, user="root", check=False)
        self.until(lambda: self._unfinished() <= kept, f"only {kept} unfinished")
        if not kept & self._unfinished():
            still = {(each.gpu_uuid, each.epoch) for each in leaving}
            self.until(
                lambda: {(each.gpu_uuid, each.epoch) for each in self.instances()} <= still,
                f"no instance left, but {self.instances()}",
            )

    def touch(self, name: str) -> None:
        """Make an empty file in the jobs' working directory."""
        (self.home / name).touch()

    @contextmanager
    def stand_before(self, command: str, script: str) -> Iterator[None]:
        """Run a script before each of a client command's runs that our hooks make."""
        stand_in = self.folder / "bin" / command
        stand_in.write_text(f'#!/bin/sh\n{script}\nexec /usr/bin/{command} "$@"\n')
        stand_in.chmod(0o755)
        try:
            yield
        finally:
            stand_in.unlink()

    def assert_healthy(self) -> None:
        """No node is drained, down or has a reason against it, and no job is held."""
        reasons = self.run("sinfo", "-h", "-R", user="root").stdout
        assert reasons == "", reasons
        held = self.run("squeue", "-h", "-t", "PD", "-o", "%A %r", user="root").stdout
        assert "held" not in held.lower()

    def wait_drained(self, name: str) -> str:
        """The reason of a node, once it is drained and every hook on it is over."""
        self.until(lambda: self.node(name)["State"] == "IDLE+DRAIN", f"{name} drained, but {self.node(name)}")
        return self.node(name)["Reason"]

    def resume(self, name: str) -> None:
        """Put a drained node into service again; one that came back by itself meanwhile refuses to be resumed."""
        self.scontrol("update", f"NodeName={name}", "State=RESUME", check=False)
        self.until(lambda: self.node(name)["State"] == "IDLE", f"{name} idle, but {self.node(name)}")

    def state_of(self, node: str) -> dict[str, Any]:
        """The records of a node, as they are on disk."""
        file = self.gpus(node) / "state" / "state.json"
        return dict(json.loads(file.read_text())) if file.exists() else {"records": [], "tombstones": []}

    def states(self, array: int | str) -> Counter[str]:
        """How many of an array's tasks are in which state."""
        return Counter(
            self.run("squeue", "-h", "-r", "-t", "all", "-j", str(array), "-o", "%T", user="root").stdout.split()
        )

    def steps(self, job: int) -> list[int]:
        """The pids of a job's step daemons."""
        found = []
        for pid in self.processes():
            # Those that end meanwhile.
            with suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(f"slurmstepd: [{job}.".encode()):
                    found.append(pid)
        return found

    def kill_steps(self, job: int) -> None:
        """A job's step daemons and its script are gone, as after a power cut."""
        pids = self.steps(job)
        assert pids, f"{job} has no step daemon"
        for pid in pids:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for each in (*map(int, children), pid):
                os.kill(each, signal.SIGKILL)
        self.until(lambda: not self.steps(job), "its step daemons gone")

    def _unfinished(self) -> set[str]:
        return set(self.run("squeue", "-h", "-r", "-O", "JobID", user="root").stdout.split())

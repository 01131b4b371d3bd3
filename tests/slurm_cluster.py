"""A real Slurm cluster for tests: submits as a user does, and reads what becomes of jobs and nodes."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from slurm_daemons import HOOKS, OTHER_USER, PATH, USER, Daemons

from gres_mig import simulator

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["HOOKS", "OTHER_USER", "USER", "Cluster", "brought_up", "require_slurm"]

_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol")


def require_slurm() -> None:
    """Skip the module where Slurm cannot be brought up; CI makes that a failure."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here; run as root: .ci/slurm-packages", allow_module_level=True)
    if os.geteuid() != 0:
        pytest.skip("slurmctld and slurmd are started as root", allow_module_level=True)


@contextmanager
def brought_up(request: pytest.FixtureRequest, *arguments: Any, **options: Any) -> Iterator[Cluster]:
    """A cluster for a module's tests, whose files are kept when one of them failed."""
    before = request.session.testsfailed
    with Cluster(*arguments, **options) as cluster:
        yield cluster
        cluster.kept = cluster.kept or request.session.testsfailed > before


class Cluster(Daemons):
    """A cluster of its own; `with` brings it up, and takes down just what it started."""

    def __enter__(self) -> Self:
        try:
            self._write_files()
            self.start("munged")
            self.start("slurmctld")
            for name in self.nodes:
                self.start(name)
            self.until(self._all_idle, f"nodes idle\n{self.logs()}", within=20)
        except BaseException:
            self.close(keep=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(keep=kind is not None)

    def close(self, *, keep: bool = False) -> None:
        """Stop what was started here, and keep the folder with its logs where something failed."""
        for client in self._clients:
            if client.poll() is None:
                client.kill()
            client.communicate()
        for name in (*self.nodes, "slurmctld"):
            self.stop(name)
        self._end_steps()
        self.stop("munged")
        if keep or self.kept:
            print(f"the cluster's files and logs are in {self.folder}", file=sys.stderr)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    def wait_up(self) -> None:
        """Until the controller answers and no node is without its slurmd."""
        self.until(lambda: "*" not in self.sinfo("%T") and self.sinfo("%T") != "", "the cluster up again", within=20)

    def reconfigure(self, extra: str) -> None:
        """Put other lines at the end of slurm.conf, in place of `extra`, and have the daemons read it."""
        self._given["extra"] = extra
        self.conf.write_text(self._slurm_conf())
        self.scontrol("reconfigure")
        self.until(self._all_idle, "nodes idle after reconfigure")

    def run(
        self, *command: str, user: str = USER, check: bool = True, within: float = 30, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """A client command as a user, to its end."""
        given = {**self._defaults(user), **more}
        found = subprocess.run(command, check=False, text=True, capture_output=True, timeout=within, **given)
        if check and found.returncode != 0:
            raise AssertionError(f"{command} ended with {found.returncode}: {found.stdout}{found.stderr}")
        return found

    def popen(self, *command: str, user: str = USER, **more: Any) -> subprocess.Popen[str]:
        """A client command as a user that goes on, such as srun; ended with the cluster."""
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **self._defaults(user), **more}
        client = subprocess.Popen(command, text=True, **given)
        self._clients.append(client)
        return client

    def sbatch(self, *options: str, script: str = "true", user: str = USER, **more: Any) -> int:
        """Submit a script; the job's id. Its output is what `output` reads."""
        text = f"#!/bin/sh\n{script}\n"
        command = ("sbatch", "--parsable", f"--output={self.home}/%j.out", *options)
        said = self.run(*command, user=user, input=text, stdin=None, **more).stdout
        return int(said.strip().partition(";")[0])

    def srun(self, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run srun to its end."""
        return self.run("srun", *words, **more)

    def scontrol(self, *words: str, user: str = "root", check: bool = True) -> str:
        """What scontrol says; as root."""
        return self.run("scontrol", *words, user=user, check=check).stdout

    def scancel(self, job: int | str, *, user: str = USER) -> None:
        """Cancel a job, as its user."""
        self.run("scancel", str(job), user=user)

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

    def sinfo(self, form: str, *words: str) -> str:
        """`sinfo -h -N -o form`."""
        return self.run("sinfo", "-h", "-N", *words, "-o", form, user="root", check=False).stdout.strip()

    def job(self, job: int | str) -> dict[str, str]:
        """The fields of one job, as scontrol shows them; empty when the controller has forgotten it."""
        for line in self.scontrol("-o", "show", "job", str(job), check=False).splitlines():
            fields = dict(re.findall(r"(\S+?)=(\S*)", line))
            if str(job) in (fields.get("JobId"), f"{fields.get('ArrayJobId')}_{fields.get('ArrayTaskId')}"):
                return fields
        return {}

    def state(self, job: int | str) -> str:
        """Its state, such as RUNNING."""
        return self.job(job).get("JobState", "")

    def node(self, name: str) -> dict[str, str]:
        """The fields of a node; `State` and `Reason` (whole) among them."""
        text = self.scontrol("-o", "show", "node", name).strip()
        fields = dict(re.findall(r"(\S+?)=(\S*)", text))
        reason = re.search(r" Reason=(.*) \[", text)
        return {**fields, "Reason": reason[1] if reason else ""}

    def node_states(self) -> dict[str, str]:
        """The state of every node, such as idle or mixed."""
        return dict(line.split() for line in self.sinfo("%N %T").splitlines())

    def assert_healthy(self) -> None:
        """No node is drained, down or has a reason against it, and no job is held."""
        assert self.run("sinfo", "-h", "-R", user="root").stdout == ""
        held = self.run("squeue", "-h", "-t", "PD", "-o", "%A %r", user="root").stdout
        assert "held" not in held.lower()

    def output(self, job: int | str) -> str:
        """What a batch job wrote."""
        file = self.home / f"{job}.out"
        return file.read_text() if file.exists() else ""

    def wait_drained(self, name: str) -> str:
        """The reason of a node, once it is drained and every hook on it is over."""
        self.until(lambda: self.node(name)["State"] == "IDLE+DRAIN", f"{name} drained, but {self.node(name)}")
        return self.node(name)["Reason"]

    def resume(self, name: str) -> None:
        """Put a drained node into service again."""
        self.scontrol("update", f"NodeName={name}", "State=RESUME")
        self.until(lambda: self.node(name)["State"] == "IDLE", f"{name} idle, but {self.node(name)}")

    def hands(self, node: str) -> simulator.Node:
        """The hands on a node's simulated GPUs."""
        return simulator.Node(self.gpus(node))

    def state_of(self, node: str) -> dict[str, Any]:
        """The records of a node, as they are on disk."""
        file = self.gpus(node) / "state" / "state.json"
        return dict(json.loads(file.read_text())) if file.exists() else {"records": [], "tombstones": []}

    def instances(self, node: str | None = None) -> list[Any]:
        """The GPU instances on a node's hardware, or on all nodes."""
        return [found for name in ([node] if node else self.nodes) for found in self.hands(name).instances()]

    def wait(self, job: int | str, *states: str, within: float = 15) -> dict[str, str]:
        """The job's fields once its state is one of these."""

        def reached() -> dict[str, str]:
            fields = self.job(job)
            return fields if fields.get("JobState") in states else {}

        try:
            return self.until(reached, f"job {job} in {states}", within=within)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {self.job(job)}\n{self.output(job)}") from None

    def wait_free(self, node: str | None = None, *, within: float = 15) -> None:
        """Until no GPU instance is left and every epilog is over."""
        self.until(lambda: not self.instances(node), f"no instance left, but {self.instances(node)}", within=within)
        self.until(
            lambda: not self.run("squeue", "-h", "-t", "R,CG,S", "-o", "%A", user="root").stdout.strip(),
            "no job running or completing",
            within=within,
        )

    def _unfinished(self) -> set[str]:
        return set(self.run("squeue", "-h", "-r", "-O", "JobID", user="root").stdout.split())

    def _defaults(self, user: str) -> dict[str, Any]:
        account = pwd.getpwnam(user)
        names = {"HOME": str(self.home), "USER": user, "LOGNAME": user, "SHELL": "/bin/sh"}
        return {
            "stdin": subprocess.DEVNULL,
            "cwd": self.home,
            "user": account.pw_uid,
            "group": account.pw_gid,
            "extra_groups": [],
            "env": {**self.environment(), **names},
        }

    def _all_idle(self) -> bool:
        for name, process in self._running.items():
            if process.poll() is not None:
                raise AssertionError(f"{name} ended with {process.returncode}\n{self.logs()}")
        return sorted(self.node_states().values()) == ["idle"] * len(self.nodes)

"""A throw-away Slurm on loopback to rehearse with: submits as a user does, and reads what becomes of jobs and nodes."""

from __future__ import annotations

import pwd
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from gres_mig.errors import NodeFault
from gres_mig.simulator.admin import Found, Node
from gres_mig_slurm.lab_daemons import PATH, USER, Daemons

if TYPE_CHECKING:
    from typing_extensions import Self

_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol")


def missing() -> tuple[str, ...]:
    """The programs of Slurm and munge that a lab needs and that are not installed here."""
    return tuple(name for name in _PROGRAMS if shutil.which(name, path=PATH) is None)


class Lab(Daemons):
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
        """Stop what was started here; the folder with its logs is kept where something failed, or it was given."""
        for client in self._clients:
            if client.poll() is None:
                client.kill()
            client.communicate()
        for name in (*self.nodes, "slurmctld"):
            self.stop(name)
        self.stop("munged")
        self._end_steps()
        if self.given:
            return
        if keep or self.kept:
            print(f"the cluster's files and logs are in {self.folder}", file=sys.stderr)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    def wait_up(self) -> None:
        """Until the controller answers and no node is without its slurmd."""
        self.until(lambda: "*" not in self.sinfo("%T") and self.sinfo("%T") != "", "the cluster up again", within=20)

    def run(
        self, *command: str, user: str = USER, check: bool = True, within: float = 30, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """A client command as a user, to its end."""
        given = {**self._defaults(user), **more}
        # A job's name, say, is any bytes.
        found = subprocess.run(
            command, check=False, text=True, errors="replace", capture_output=True, timeout=within, **given
        )
        if check and found.returncode != 0:
            said = f"{found.stdout}{found.stderr}".strip()
            raise NodeFault(f"{' '.join(command)} ended with {found.returncode}: {said}", code="INTERNAL")
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

    def output(self, job: int | str) -> str:
        """What a batch job wrote."""
        file = self.home / f"{job}.out"
        return file.read_text() if file.exists() else ""

    def hands(self, node: str) -> Node:
        """The hands on a node's simulated GPUs."""
        return Node(self.gpus(node))

    def instances(self, node: str | None = None) -> list[Found]:
        """The GPU instances on a node's hardware, or on all nodes."""
        return [found for name in ([node] if node else self.nodes) for found in self.hands(name).instances()]

    def wait(self, job: int | str, *states: str, within: float = 15) -> dict[str, str]:
        """The job's fields once its state is one of these."""

        def reached() -> dict[str, str]:
            fields = self.job(job)
            return fields if fields.get("JobState") in states else {}

        try:
            return self.until(reached, f"job {job} in {states}", within=within)
        except NodeFault as error:
            raise NodeFault(f"{error}; it is {self.job(job)}\n{self.output(job)}", code=error.code) from None

    def wait_free(self, node: str | None = None, *, within: float = 15) -> None:
        """Until no GPU instance is left and every epilog is over."""
        self.until(lambda: not self.instances(node), f"no instance left, but {self.instances(node)}", within=within)
        self.until(
            lambda: not self.run("squeue", "-h", "-t", "R,CG,S", "-o", "%A", user="root").stdout.strip(),
            "no job running or completing",
            within=within,
        )

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
                raise NodeFault(f"{name} ended with {process.returncode}\n{self.logs()}", code="INTERNAL")
        return sorted(self.node_states().values()) == ["idle"] * len(self.nodes)

"""Starts that find no place, and what waiting costs, on a real two-node Slurm with simulated GPUs.

    python bench/admission.py [--admission count,gates] [--minutes 2] [--loads 0.7,0.85,1.3] [--gpus 8] [--out FILE]

Needs root and Slurm, as the tests do. Each load is a cluster of its own for each admission, and each of these has the
same arrivals: jobs come as a Poisson stream, no job wants a whole GPU, each is bound to one of the two nodes by its
partition. An oracle plays the same arrivals, durations and hook times on the
same GPUs with the same choice of places, and starts a job exactly when it has one.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "slurm"), str(ROOT / "tests")]

from gated_cluster import Gated  # noqa: E402
from gpus import SETTINGS, gpu  # noqa: E402
from slurm_cluster import Cluster  # noqa: E402

from gres_mig.errors import NoCapacity  # noqa: E402
from gres_mig.models import Request  # noqa: E402
from gres_mig.placement import Choice, Room, choose  # noqa: E402
from gres_mig.simulator.program import command, environment  # noqa: E402
from gres_mig.values import replace  # noqa: E402

MEAN_S, LONGEST_S = 20.0, 100.0
AGED_S = 60
"""Three mean run times; the default of 300 s is meant for jobs of minutes and hours."""
MOST_FAILED = 5


@dataclass(frozen=True)
class Kind:
    """A node: its board, and the classes of jobs for it as (MiB, memory slices, share)."""

    node: str
    board: str
    slices: int
    classes: tuple[tuple[int, int, float], ...]

    @property
    def mean_slices(self) -> float:
        return sum(slices * share for _, slices, share in self.classes)


KINDS = (
    Kind("n1", "a100-40", 8, ((4_800, 1, 0.40), (9_800, 2, 0.35), (19_000, 4, 0.25))),
    Kind("n2", "rtx-pro-6000", 4, ((24_000, 1, 0.60), (48_000, 2, 0.40))),
)


@dataclass
class Job:
    """One arrival, and what became of it; seconds since the begin of the run."""

    kind: Kind
    size: int
    at: float
    runs_s: float
    job_id: int = 0
    began: float = 0.0
    ended: float = 0.0
    failed: int = 0
    oracle: float = 0.0

    @property
    def memory_mib(self) -> int:
        return self.kind.classes[self.size][0]

    @property
    def slices(self) -> int:
        return self.kind.classes[self.size][1]

    @property
    def large(self) -> bool:
        return self.size == len(self.kind.classes) - 1


@dataclass
class Run:
    """One load under one admission."""

    admission: str
    load: float
    gpus: int
    seconds: float
    jobs: list[Job]
    start_s: float = 0.0
    end_s: float = 0.0
    rpcs: int = 0
    controller_s: float = 0.0
    """CPU time of slurmctld."""
    faults: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--admission", default="count,gates")
    parser.add_argument("--minutes", type=float, default=2.0, help="of arrivals at each load")
    parser.add_argument("--loads", default="0.7,0.85,1.3")
    parser.add_argument("--gpus", type=int, default=8, help="of each node")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="a file for the table, in place of standard output")
    given = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("slurmctld and slurmd are started as root")
    runs = [
        play(admission, float(load), given.gpus, given.minutes * 60, given.seed)
        for load in given.loads.split(",")
        for admission in given.admission.split(",")
    ]
    text = "\n".join(table(runs))
    if given.out:
        Path(given.out).write_text(text + "\n", encoding="utf-8")
    print(text)


def arrivals(load: float, gpus: int, seconds: float, seed: int) -> list[Job]:
    """Both nodes' streams, in order; a load of 1 offers as many slices as there are."""
    stream = random.Random(f"{seed} {load} {gpus}")
    jobs = []
    for kind in KINDS:
        rate = load * gpus * kind.slices / (kind.mean_slices * MEAN_S)
        at = stream.expovariate(rate)
        while at < seconds:
            size = stream.choices(range(len(kind.classes)), [share for *_, share in kind.classes])[0]
            jobs.append(Job(kind, size, at, min(LONGEST_S, stream.expovariate(1 / MEAN_S))))
            at += stream.expovariate(rate)
    return sorted(jobs, key=lambda job: job.at)


def play(admission: str, load: float, gpus: int, seconds: float, seed: int) -> Run:
    """The arrivals on a real cluster, then in the oracle."""
    run = Run(admission, load, gpus, seconds, arrivals(load, gpus, seconds, seed))
    with Gated(
        {kind.node: [(kind.board, gpus)] for kind in KINDS},
        by_count=tuple(kind.node for kind in KINDS if admission == "count"),
        extra="MinJobAge=7200\nMaxJobCount=20000",
        partitions="\n".join(f"PartitionName={kind.node} Nodes={kind.node}" for kind in KINDS),
        config=f"aged = {AGED_S}",
        cpus=256,
    ) as cluster:
        services = [
            subprocess.Popen(
                command("--config", str(cluster.gpus(kind.node) / "config.toml"), "serve"),
                env=environment(SLURM_CONF=str(cluster.conf), SLURMD_NODENAME=kind.node),
                stderr=subprocess.DEVNULL,
            )
            for kind in KINDS
        ]
        try:
            run.start_s, run.end_s = hook_times(cluster)
            before = rpcs(cluster), controller_s(cluster)
            submit_all(cluster, run)
            follow(cluster, run)
            run.rpcs, run.controller_s = rpcs(cluster) - before[0], controller_s(cluster) - before[1]
        finally:
            for service in services:
                service.terminate()
                service.wait()
    oracle(run)
    print(f"{admission}, load {load:g}: {len(run.jobs)} jobs done", file=sys.stderr)
    return run


def hook_times(cluster: Cluster) -> tuple[float, float]:
    """On an idle cluster: from submit to the script's begin, and from its end to the end of the epilog; medians."""
    starts, ends = [], []
    for _ in range(5):
        at = time.time()
        job = cluster.sbatch("-pn1", "--gres=migmem:4800", script="date +%s.%N; sleep 1; date +%s.%N")
        cluster.wait(job, "COMPLETED", within=60)
        cluster.until(lambda: not cluster.instances("n1"), "its instance given back")
        over = time.time()
        began, ended = map(float, re.findall(r"^\d+\.\d+$", cluster.output(job), re.MULTILINE))
        starts.append(began - at)
        ends.append(over - ended)
    return median(starts), median(ends)


def submit_all(cluster: Cluster, run: Run) -> None:
    began = time.time()
    for job in run.jobs:
        time.sleep(max(0.0, began + job.at - time.time()))
        script = f"date +%s.%N >>{cluster.home}/$SLURM_JOB_ID.ran; exec sleep {job.runs_s:.2f}"
        # What it is, not what was meant: submitting takes its time on a busy machine.
        job.at = time.time() - began
        job.job_id = cluster.sbatch(f"-p{job.kind.node}", f"--gres=migmem:{job.memory_mib}", script=script)
    run.seconds = max(run.seconds, time.time() - began)
    run.faults.append(f"{began}")


def follow(cluster: Cluster, run: Run) -> None:
    """Wait until all have ended, then ask the controller what became of them."""
    zero = float(run.faults.pop())
    limit = 600 + 4 * run.seconds
    while cluster.run("squeue", "-h", "-r", "-o", "%A", user="root").stdout:
        # Seldom, for it is counted with what the hooks ask.
        time.sleep(3)
        if time.time() - zero > limit:
            raise SystemExit(f"not all jobs have ended within {limit:.0f} s\n{cluster.logs()}")
    by_id = {job.job_id: job for job in run.jobs}
    for line in cluster.scontrol("-o", "show", "job").splitlines():
        fields = dict(re.findall(r"(\S+?)=(\S*)", line))
        job = by_id.get(int(fields["JobId"]))
        if job is None:
            continue
        job.failed = int(fields["Restarts"])
        ran = (cluster.home / f"{job.job_id}.ran").read_text().split() if fields["JobState"] == "COMPLETED" else []
        if len(ran) != 1:
            run.faults.append(f"job {job.job_id} {fields['JobState']}, its script ran {len(ran)} times")
            job.began = job.ended = job.at
            continue
        job.began = float(ran[0]) - zero
        job.ended = job.began + job.runs_s
    states = cluster.node_states()
    run.faults += [f"{kind.node} is {states[kind.node]}" for kind in KINDS if states[kind.node] != "idle"]
    run.faults += cluster.run("squeue", "-h", "-t", "PD", "-o", "%A held: %r", user="root").stdout.splitlines()


def rpcs(cluster: Cluster) -> int:
    """What the controller has been asked so far."""
    text = cluster.run("sdiag", user="root").stdout.partition("Remote Procedure Call statistics by user")[0]
    return sum(map(int, re.findall(r"^\s+[A-Z_]+\s*\(\s*\d+\)\s*count:(\d+)", text, re.MULTILINE)))


def controller_s(cluster: Cluster) -> float:
    """The CPU time that slurmctld has taken so far."""
    pid = (cluster.folder / "slurmctld.pid").read_text().strip()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def oracle(run: Run) -> None:
    """When each job would have begun if the queue, first come first served with backfill, knew all places."""
    for kind in KINDS:
        rooms = [Room(gpu(kind.board, i)) for i in range(run.gpus)]
        waiting: list[Job] = []
        running: list[tuple[float, int, Choice]] = []
        coming = [job for job in run.jobs if job.kind is kind]
        now, number = 0.0, 0
        while coming or waiting or running:
            now = min([*(job.at for job in coming[:1]), *(ends for ends, *_ in running[:1])])
            while running and running[0][0] <= now:
                _, _, choice = heappop(running)
                rooms = [_less(room, choice) for room in rooms]
            while coming and coming[0].at <= now:
                waiting.append(coming.pop(0))
            for job in list(waiting):
                try:
                    choice = choose(rooms, Request(job.memory_mib), SETTINGS)
                except NoCapacity:
                    continue
                rooms = [_more(room, choice) for room in rooms]
                waiting.remove(job)
                number += 1
                job.oracle = now - job.at + run.start_s
                heappush(running, (now + run.start_s + job.runs_s + run.end_s, number, choice))


def _more(room: Room, choice: Choice) -> Room:
    return replace(room, busy=(*room.busy, choice.placement)) if room.gpu.uuid == choice.gpu_uuid else room


def _less(room: Room, choice: Choice) -> Room:
    if room.gpu.uuid != choice.gpu_uuid:
        return room
    return replace(room, busy=tuple(place for place in room.busy if place != choice.placement))


def utilisation(run: Run, kind: Kind, *, oracle: bool) -> float:
    """Slices in use by running jobs, of all, from the second mean run time to the last arrival."""
    first, last = 2 * MEAN_S, run.seconds
    used = 0.0
    for job in run.jobs:
        if job.kind is kind:
            began = job.at + job.oracle if oracle else job.began
            used += job.slices * max(0.0, min(last, began + job.runs_s) - max(first, began))
    return used / (run.gpus * kind.slices * (last - first))


def p95(values: Sequence[float]) -> float:
    return sorted(values)[max(0, -(-len(values) * 95 // 100) - 1)] if values else 0.0


def table(runs: Sequence[Run]) -> Iterator[str]:
    head = ("load", "node", "admission", "jobs", "failed starts a job", f"jobs with more than {MOST_FAILED}, %",
            "wait, mean s", "oracle", "large: p95 wait s", "oracle", "ratio", "utilisation %", "oracle",
            "controller RPCs a job", "controller CPU ms a job")  # fmt: skip
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    verdicts = []
    for run in runs:
        for kind in KINDS:
            jobs = [job for job in run.jobs if job.kind is kind]
            large = [job for job in jobs if job.large]
            many = 100 * sum(job.failed > MOST_FAILED for job in jobs) / len(jobs)
            waits = p95([job.began - job.at for job in large]), p95([job.oracle for job in large])
            ratio = f"{waits[0] / waits[1]:.2f}" if waits[1] else "none"
            cells = (f"{run.load:g}", kind.board, run.admission, str(len(jobs)),
                     f"{mean(job.failed for job in jobs):.2f}", f"{many:.1f}",
                     f"{mean(job.began - job.at for job in jobs):.1f}", f"{mean(job.oracle for job in jobs):.1f}",
                     f"{waits[0]:.1f}", f"{waits[1]:.1f}", ratio,
                     f"{100 * utilisation(run, kind, oracle=False):.1f}",
                     f"{100 * utilisation(run, kind, oracle=True):.1f}", f"{run.rpcs / len(run.jobs):.1f}",
                     f"{1000 * run.controller_s / len(run.jobs):.0f}")  # fmt: skip
            yield f"| {' | '.join(cells)} |"
            where = f"load {run.load:g}, {kind.board}, {run.admission}"
            verdicts.append((many <= 0.5, f"{where}: {many:.1f} % of jobs with more than {MOST_FAILED} failed starts"))
            text = f"{where}: large jobs' p95 wait {waits[0]:.1f} s, the oracle's {waits[1]:.1f} s"
            verdicts.append((waits[0] <= 2 * waits[1], text))
        verdicts.append(
            (not run.faults, f"load {run.load:g}, {run.admission}: no node drained, no job held or failed {run.faults}")
        )
    yield ""
    for run in runs:
        yield (f"Load {run.load:g}, {run.admission}: hooks on the idle cluster: {run.start_s:.2f} s from submit to the "
               f"script, {run.end_s:.2f} s from its end.")  # fmt: skip
    yield ""
    yield from (f"- {'PASS' if good else 'FAIL'}: {text}" for good, text in verdicts)


if __name__ == "__main__":
    main()

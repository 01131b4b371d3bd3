"""What the hooks cost a Slurm cluster: trivial jobs through a real one, as a ratio to hooks that are /bin/true.

    python bench/slurm.py [--jobs 100] [--block 25] [--single 10]

Needs root and Slurm, as the tests do. Two clusters of two nodes are up at once, one with our hooks and one with
/bin/true for each of them. Jobs go in blocks that are submitted held and released together, so that it is not sbatch
that is measured; a block is over when the last of its epilogs is. The hardware takes no time here, and there is a
place for each job of a block. The run fails when a bar, which is the project's own, is missed.
"""

from __future__ import annotations

import argparse
import compileall
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "slurm"), str(ROOT / "tests")]

from slurm_cluster import Cluster  # noqa: E402

MOST_WITHOUT, MOST_WITH = 1.8, 10.0
BOARDS = {"n1": [("rtx-pro-6000", 8)], "n2": [("rtx-pro-6000", 8)]}
MIGMEM = "--gres=migmem:8000"
TRUE, WITHOUT, WITH = "/bin/true hooks", "our hooks, without migmem", "our hooks, with migmem"


def main() -> int:
    """Measure and print; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=100, help="of each kind")
    parser.add_argument("--block", type=int, default=25, help="jobs released together, at most 64")
    parser.add_argument("--single", type=int, default=10, help="jobs of each kind that have the cluster for themselves")
    given = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("slurmctld", path="/usr/sbin:/usr/bin") is None:
        # Not a failure: `make bench` goes on with what can be measured here.
        print("bench/slurm.py is left out: it needs root and Slurm; run as root: .ci/slurm-packages")
        return 0
    # So that the clusters are taken down too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Once and beforehand, as pip does it when a package is installed.
    for folder in (ROOT / "gres_mig", ROOT / "slurm" / "gres_mig_slurm"):
        compileall.compile_dir(str(folder), quiet=2)
    true = "\n".join(f"{hook}=/bin/true" for hook in ("Prolog", "Epilog", "TaskProlog"))
    with ExitStack() as stack:
        plain = stack.enter_context(Cluster(BOARDS, hooks=False, extra=f"{true}\nPrologEpilogTimeout=60"))
        ours = stack.enter_context(Cluster(BOARDS))
        kinds = {TRUE: (plain, ()), WITHOUT: (ours, ()), WITH: (ours, (MIGMEM,))}

        def in_turn(count: int, measure: Callable[[Cluster, tuple[str, ...]], float]) -> dict[str, list[float]]:
            # So that whatever else the machine does falls on all three alike.
            took: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(count):
                for kind, (cluster, options) in kinds.items():
                    took[kind].append(measure(cluster, options))
            return took

        in_turn(1, alone)
        single = in_turn(given.single, alone)
        blocks = in_turn(-(-given.jobs // given.block), lambda *kind: together(*kind, given.block))
    return report(blocks, single, given.block)


def together(cluster: Cluster, options: tuple[str, ...], count: int) -> float:
    """Seconds from the controller's start of the first of so many jobs until the last of their epilogs is over."""
    jobs = [cluster.sbatch("--hold", *options) for _ in range(count)]
    cluster.scontrol("release", ",".join(map(str, jobs)))
    unfinished = ("squeue", "-h", "-o", "%A")
    cluster.until(lambda: not cluster.run(*unfinished, user="root").stdout, "all of a block over", within=120)
    over = time.time()
    failed = [job for job in jobs if cluster.state(job) != "COMPLETED"]
    assert not failed, {job: cluster.job(job) for job in failed}
    assert cluster.instances() == []
    # Not from their release: up to a second later the scheduler looks at them.
    started = starts(cluster)
    return over - min(started[job] for job in jobs)


def alone(cluster: Cluster, options: tuple[str, ...]) -> float:
    """Seconds from the controller's start of a job to the first line of its script, nothing else going on."""
    job = cluster.sbatch(*options, script="date +%s.%N")
    cluster.until(lambda: cluster.state(job) == "COMPLETED", f"job {job} over", within=60)
    ran = re.search(r"^\d+\.\d+$", cluster.output(job), re.MULTILINE)
    assert ran is not None, cluster.output(job)
    return float(ran[0]) - starts(cluster)[job]


def starts(cluster: Cluster) -> dict[int, float]:
    """When the controller started each job, as its log has it to the millisecond, in local time."""
    log = (cluster.folder / "log" / "slurmctld.log").read_text()
    lines = re.findall(r"^\[(\S+)\] sched\S*: (?:_start_job: Started|Allocate) JobId=(\d+) ", log, re.MULTILINE)
    return {int(job): datetime.fromisoformat(at).astimezone().timestamp() for at, job in lines}


def report(blocks: dict[str, list[float]], single: dict[str, list[float]], block: int) -> int:
    """Print the figures; 1 when a bar is missed."""
    one, _, fifteen = os.getloadavg()
    print(f"medians; {os.cpu_count()} CPUs, load average {one:.1f}, of the last 15 minutes {fifteen:.1f}")
    for kind, took in blocks.items():
        spread = f"{min(took):.2f} to {max(took):.2f}"
        print(f"  {kind}: {block} jobs in {median(took):.2f} s ({spread}, {len(took)} times), ", end="")
        print(f"one alone from its start to its first line {1000 * median(single[kind]):.0f} ms")
    missed = 0
    for kind, most in ((WITHOUT, MOST_WITHOUT), (WITH, MOST_WITH)):
        ratio = median(blocks[kind]) / median(blocks[TRUE])
        print(f"{'PASS' if ratio <= most else 'FAIL'} {kind}: {ratio:.2f} x /bin/true hooks, at most {most:g}")
        missed += ratio > most
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

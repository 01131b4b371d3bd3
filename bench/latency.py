"""What a whole `gres-mig allocate` and `reclaim` process costs, as a ratio to a bare interpreter in the same run.

The hardware takes no time here, so what is measured is this program. The bars are the project's own; the run fails
when one is missed.
"""

from __future__ import annotations

import argparse
import compileall
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import gres_mig
from gres_mig import config_text, simulator

MOST_RATIO = 12.0
MOST_OF_SEQUENCE = 0.25
HARDWARE_S = 4.0
GPUS = 8


def main() -> int:
    """Measure and print; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=30)
    runs = parser.parse_args().runs
    compileall.compile_dir(str(Path(gres_mig.__file__).parent), quiet=2)
    missed = 0
    for count in (1, GPUS):
        with tempfile.TemporaryDirectory(dir=_memory()) as folder:
            missed += _ratios(_node(Path(folder) / "node", count, 0.0), count, runs)
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        missed += _at_once(_node(Path(folder) / "node", GPUS, HARDWARE_S / 2))
    return 1 if missed else 0


def _ratios(node: Path, count: int, runs: int) -> int:
    took: dict[str, list[float]] = {"bare": [], "allocate": [], "reclaim": []}
    _seconds(_command(node, "allocate", "--owner", "manual:warm", "--memory", "8000"))
    for _ in range(runs):
        # In turns, so that whatever else the machine does falls on all three alike.
        took["bare"].append(_seconds([sys.executable, "-I", "-S", "-c", "pass"]))
        took["allocate"].append(_seconds(_command(node, "allocate", "--owner", "manual:bench", "--memory", "8000")))
        took["reclaim"].append(_seconds(_command(node, "reclaim", "manual:bench")))
    bare = statistics.median(took["bare"])
    print(f"{count} GPU(s), median of {runs}: bare interpreter {bare * 1000:.1f} ms, load {os.getloadavg()[0]:.1f}")
    missed = 0
    for what in ("allocate", "reclaim"):
        ratio = statistics.median(took[what]) / bare
        missed += _verdict(f"  {what}: {ratio:.1f} x a bare interpreter, at most {MOST_RATIO:g}", ratio <= MOST_RATIO)
    return missed


def _at_once(node: Path) -> int:
    """Whole-GPU requests with slow hardware: GPUs work at the same time, so eight take little longer than one."""
    profile = ("--memory", "90000")
    started = time.perf_counter()
    running = [
        subprocess.Popen(_command(node, "allocate", "--owner", f"manual:{n}", *profile), stdout=subprocess.DEVNULL)
        for n in range(GPUS)
    ]
    codes = [process.wait() for process in running]
    together = time.perf_counter() - started
    assert codes == [0] * GPUS, codes
    # One after the other is eight times one of them, which is measured here and not eight times over.
    _seconds(_command(node, "reclaim", "manual:0"))
    one = _seconds(_command(node, "allocate", "--owner", "manual:again", *profile))
    share = together / (GPUS * one)
    line = f"{GPUS} whole GPUs at once, {HARDWARE_S:g} s of hardware each: {together:.1f} s, {share:.2f} of one by one"
    return _verdict(f"{line} ({GPUS} x {one:.1f} s), at most {MOST_OF_SEQUENCE:g}", share <= MOST_OF_SEQUENCE)


def _node(folder: Path, count: int, half_s: float) -> Path:
    simulator.create(folder, [("rtx-pro-6000", count)], create_s=half_s, compute_s=half_s)
    config_text.write_node_config(folder)
    return folder


def _command(node: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "gres_mig", "--node", str(node), *arguments]


def _seconds(command: Sequence[str]) -> float:
    # As a hook runs it: compiled once, not at every start.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - started


def _verdict(line: str, good: bool) -> int:
    print(f"{'PASS' if good else 'FAIL'} {line}")
    return 0 if good else 1


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    sys.exit(main())

"""Runs programs in slices of a GPU, and says PASS, FAIL or NOTE of each thing that a slice promises.

    python bench/real_slices.py LIBRARY [--gpu GPU-…] [--programs torch|driver] [--simulated NODE]

LIBRARY is an admin's libvgpu.so, or `stand-in` for what is compiled from stand_in.c. Needs root and a GPU that nobody
uses and whose MIG mode is off; no setting of it is changed. A NOTE is what was found and is not gres-mig's to put
right. GRES_MIG_KEEP_UMASK names a keep_umask.so where there is no C compiler.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from slice_node import Gone, Node, Program, answered, until
from slice_worker import WORKERS

EPOCHS = 3
BEYOND_MIB = 1024
"""A program asks for so much more than its limit, and then gives up."""
RELEASE_S = 60.0


class Report:
    """Lines on standard output, and how many of them say FAIL."""

    def __init__(self) -> None:
        self.failed = 0

    def note(self, line: str) -> None:
        """What was found."""
        print(f"NOTE {line}", flush=True)

    def verdict(self, line: str, good: bool) -> None:
        """What has to be so."""
        print(f"{'PASS' if good else 'FAIL'} {line}", flush=True)
        self.failed += not good


def main() -> int:
    """Measure and print; 1 when something failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("library", help="libvgpu.so, or stand-in")
    parser.add_argument("--gpu", default="", help="its UUID; by default the first whose MIG mode is off")
    parser.add_argument("--programs", choices=("torch", "driver"), help="how they allocate; PyTorch where it is there")
    parser.add_argument("--simulated", default="", help="the folder of a simulated node, to rehearse this")
    given = parser.parse_args()
    # So that what was taken is given back too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # What gres-mig trusts, others cannot write.
    os.umask(0o077)
    report = Report()
    if not given.simulated and os.geteuid() != 0:
        report.note("slices were not tried: they need root")
        return 0
    kind = given.programs or ("torch" if importlib.util.find_spec("torch") else "driver")
    if kind != given.programs and kind == "driver":
        report.note(f"no PyTorch for {sys.executable}: the programs allocate through libcuda.so.1 itself")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gres-mig-")))
        try:
            gpu = _chosen(given.gpu, folder, given.simulated)
            node = Node(folder, gpu["uuid"], *_libraries(given.library, folder, report), simulated=given.simulated)
            report.note(f"GPU {gpu['index']} ({gpu['uuid']}), {gpu['model']}; the programs allocate through {kind}")
            _, strangers = node.police()
            if strangers:
                raise Gone(f"{node.gpu} is in use by pid {strangers[0]}; name another with --gpu")
            _Trial(node, kind, min(4000, gpu["memory_mib"] // 4), stack, report).run()
        except Gone as gone:
            report.verdict(str(gone), False)
    return 1 if report.failed else 0


def _chosen(uuid: str, folder: Path, simulated: str) -> dict[str, Any]:
    """That GPU, or the first that can be shared, as `gres-mig status` shows it."""
    gpus = Node(folder, simulated=simulated).run("status")["gpus"]
    for gpu in gpus:
        if gpu["uuid"] == uuid or (not uuid and not (gpu["mig"] and gpu["mig"]["current"])):
            found: dict[str, Any] = gpu
            return found
    if uuid or not gpus:
        raise Gone(f"there is no GPU {uuid or 'at all'} here; see: gres-mig doctor")
    raise Gone("MIG mode is on for every GPU here: none can be shared")


def _libraries(library: str, folder: Path, report: Report) -> tuple[str, str]:
    """The library that limits, and the one that keeps its hands off the umask."""
    compiler, keep_umask = shutil.which("cc"), os.environ.get("GRES_MIG_KEEP_UMASK", "")
    if not compiler and (library == "stand-in" or not keep_umask):
        report.note("there is no C compiler, no cc in PATH; GRES_MIG_KEEP_UMASK may name a keep_umask.so")
    if library == "stand-in":
        if not compiler:
            raise Gone("the stand-in cannot be compiled; name a libvgpu.so")
        library, source = str(folder / "libvgpu.so"), str(Path(__file__).with_name("stand_in.c"))
        flags, more = (shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS"))
        command = [compiler, "-O2", "-shared", "-fPIC", *flags, "-o", library, source, "-ldl", *more]
        if subprocess.run(command, check=False).returncode:
            raise Gone(f"{compiler} does not compile {source}")
        report.note("the library is the stand-in of this bench, not HAMi-core")
    else:
        library = os.path.abspath(library)
        if not os.path.isfile(library):
            raise Gone(f"{library} is no file")
        report.note(f"the library is {library}, sha256 {hashlib.sha256(Path(library).read_bytes()).hexdigest()}")
    if compiler and not keep_umask:
        keep_umask = str(answered("slices", "build", str(folder / "keep_umask.so"), "--json")["file"])
    return library, keep_umask


class _Trial:
    """Slices `a` and `b` of the GPU, and what their programs get."""

    def __init__(self, node: Node, kind: str, memory_mib: int, stack: ExitStack, report: Report) -> None:
        self._node, self._kind, self._stack, self._report = node, kind, stack, report
        self._sizes = {"a": memory_mib, "b": memory_mib * 3 // 2}

    def run(self) -> None:
        """All of it."""
        for name, size_mib in self._sizes.items():
            got = self._node.run("allocate", "--owner", f"manual:{name}", "--memory", str(size_mib))
            self._stack.callback(self._give_back, name)
            line = f"{name} has a slice of {size_mib:,} MiB, isolation={got['isolation']}"
            self._report.verdict(line, got["isolation"] == "cooperative")
        self._node.run("slices", "test")
        self._report.verdict("gres-mig slices test finds that limits hold", True)
        workers = f"{EPOCHS} epochs with {WORKERS} workers that"
        for part in (
            self._both_at_once,
            partial(self._feed, "spawn", f"{workers} use the GPU before it does"),
            partial(self._feed, "fork", f"{workers} leave the GPU alone"),
            self._police,
        ):
            try:
                with ExitStack() as running:
                    part(running)
            except Gone as gone:
                self._report.verdict(str(gone), False)

    def _both_at_once(self, running: ExitStack) -> None:
        for name, size_mib in self._sizes.items():
            program = self._start(name, running)
            total_mib = program.ask("start")["total_mib"]
            self._report.verdict(f"{name} is told of {total_mib:,} MiB in all", total_mib == size_mib)
            mode = program.ask("write", self._node.folder / f"{name}.written")["mode"]
            self._report.verdict(f"{name} writes a file of mode {mode} under umask 027", mode == "0640")
            answer = program.ask("fill", size_mib + BEYOND_MIB)
            held_mib, why = answer["held_mib"], answer["refused"]
            line = f"{name} gets {held_mib:,} MiB of {size_mib:,} MiB, then: {why or 'it is not refused'}"
            self._report.verdict(line, why == "out of memory" and 0 < held_mib <= size_mib)
        uses, _ = self._node.police()
        for name in self._sizes:
            used_mib, given_mib, pids, _ = uses[name]
            line = f"both at once: {name} uses {used_mib:,} MiB of {given_mib:,} MiB as NVML counts"
            line += "" if pids else "; NVML lists no process of it: is this a container with pids of its own?"
            self._report.verdict(line, bool(pids) and used_mib <= given_mib)

    def _feed(self, method: str, what: str, running: ExitStack) -> None:
        """A library that loses count is a finding; that the police see it is ours."""
        program, size_mib = self._start("a", running), self._sizes["a"]
        answer = program.ask("feed", method, EPOCHS, size_mib + BEYOND_MIB)
        uses, _ = self._node.police()
        used_mib, given_mib, _, measure = uses["a"]
        had_mib, why = answer["held_mib"] + answer["workers_mib"], answer["refused"]
        line = f"{what}: a holds {had_mib:,} MiB of {size_mib:,} MiB, NVML counts {used_mib:,} MiB"
        if had_mib > size_mib:
            self._report.note(f"{line}: the library lost count of a process that lives")
        elif used_mib > given_mib:
            self._report.note(f"{line}: more than the {given_mib:,} MiB set aside; see slice_overhead")
        else:
            self._report.verdict(f"{line}, then: {why}", why == "out of memory")
        right = (used_mib > given_mib) == (measure == "warn")
        self._report.verdict(f"{what}: the police say {measure or 'that it keeps to its grant'}", right)
        program.ask("go")

    def _police(self, running: ExitStack) -> None:
        """What drops the limit is seen and ended; a neighbour, and who has no slice, go on."""
        over, neighbour = self._start("a", running, without="LD_PRELOAD"), self._start("b", running)
        stranger = self._node.start(self._kind, {"CUDA_VISIBLE_DEVICES": self._node.gpu})
        running.callback(stranger.end)
        for program, wanted_mib in ((over, self._sizes["a"] + BEYOND_MIB), (neighbour, 256), (stranger, 256)):
            program.ask("start")
            held_mib = program.ask("fill", wanted_mib)["held_mib"]
            if program is over:
                self._report.note(f"without LD_PRELOAD a gets {held_mib:,} MiB of {self._sizes['a']:,} MiB")
        uses, strangers = self._node.police()
        line = f"the police see {uses['a'].used_mib:,} MiB of {uses['a'].given_mib:,} MiB, and say"
        self._report.verdict(f"{line} {uses['a'].measure or 'nothing'}", uses["a"].measure == "warn")
        self._report.verdict("the police name the process of no slice", strangers == (stranger.process.pid,))
        self._report.verdict('with over_grant = "warn" a\'s program goes on', over.process.poll() is None)
        uses, _ = self._node.police("end")
        until(lambda: over.process.poll() is not None, RELEASE_S)
        line = f'with over_grant = "end" they {uses["a"].measure or "do nothing"}, and it ends with'
        self._report.verdict(f"{line} {over.process.poll()}", (over.process.poll() or 0) < 0)
        for program, whose in ((neighbour, "b's program"), (stranger, "the program of no slice")):
            held_mib = program.ask("fill", 512)["held_mib"]
            self._report.verdict(f"{whose} goes on, and gets {held_mib:,} MiB", held_mib == 512)

    def _start(self, name: str, running: ExitStack, without: str = "") -> Program:
        variables = {key: value for key, value in self._node.variables(name).items() if key != without}
        program = self._node.start(self._kind, variables)
        running.callback(program.end)
        return program

    def _give_back(self, name: str) -> None:
        def gone() -> bool:
            self._node.run("reclaim", f"manual:{name}")
            return not self._node.holds(name)

        try:
            self._report.verdict(f"{name} is given back", until(gone, RELEASE_S))
        except Gone as gone_wrong:
            self._report.verdict(str(gone_wrong), False)


if __name__ == "__main__":
    sys.exit(main())

"""The main job on a simulated node: places, refusals, crashes and lost records."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gres_mig import machine
from gres_mig.demo.story import Story
from gres_mig.show import Paper
from gres_mig.simulator.admin import Found, Node
from gres_mig.simulator.program import Program, command, environment


class Demo(Story):
    """The story on one simulated node, in that folder."""

    def __init__(self, folder: str, say: Callable[[str], None], paper: Paper) -> None:
        super().__init__(say, paper)
        self._folder = folder
        self._uuids: dict[str, str] = {}
        """The MIG device of each owner, as the last command about it said."""

    def tell(self) -> None:
        """All of it; `NodeFault` as soon as something is not as told."""
        self._begin()
        self._node = Node(self._folder)
        self._node.configure(log="mutating")
        self._fill_one_gpu()
        self._spill_and_share()
        self._refuse()
        with self._program("manual:frank") as program:
            self._reclaim_beside(program)
            self._kill_in_the_middle(program)
            self._ask_again()
            self._lose_the_records(program)
            self._leave_the_unmanaged_alone()
            program.count_on()
            count = program.end()
        self._check(count > 0, f"frank's program counted from 1 to {count} without a gap, and ended by itself")
        self._give_back()

    def _begin(self) -> None:
        self._head("A node with three GPUs")
        self._text(
            "The GPUs are simulated: a stand-in for libnvidia-ml.so.1 keeps them in a file, refuses what a driver "
            "refuses and outlives the processes that use it. Everything above that library is the product: each "
            "command below runs in a process of its own, through NVIDIA's own Python binding. GPU 2 is not managed, "
            "and somebody made an instance on it by hand."
        )
        words = ("simulate", "create", self._folder, "--board", "rtx-pro-6000", "--count", "3", "--managed", "0,1")
        self._run(*words)
        self._run("simulate", "make", self._folder, "2", "2g.48gb")
        self._map(self._folder)

    def _fill_one_gpu(self) -> None:
        self._head("Four people ask for 8,000 MiB each")
        self._text("The smallest profile that holds it is 1g.24gb; four of them fill one GPU, with no hole left.")
        for name in ("alice", "bob", "carol", "dave"):
            self._allocate(name, 8000)
        places = [(i.profile, i.start) for i in self._node.instances(0)]
        self._check(places == [("1g.24gb", start) for start in (0, 3, 6, 9)], "GPU 0 is full: starts 0, 3, 6 and 9")
        self._check(not self._node.instances(1), "GPU 1 is untouched")
        self._map(self._folder)

    def _spill_and_share(self) -> None:
        self._head("A fifth spills over; another size shares the card with it")
        self._allocate("erin", 8000)
        self._allocate("frank", 30000)
        shared = sorted(i.profile for i in self._node.instances(1))
        self._check(shared == ["1g.24gb", "2g.48gb"], "GPU 1 has a 1g.24gb and a 2g.48gb beside each other")
        self._map(self._folder)

    def _refuse(self) -> None:
        self._head("A request that finds no place is told why")
        before = self._everything()
        self._here("allocate", "--owner", "manual:ivan", "--memory", "97000", exit_code=3)
        self._here("why", "97000", exit_code=3)
        self._check(self._everything() == before, "a refusal changes nothing")

    def _reclaim_beside(self, program: Program) -> None:
        self._head("A neighbour is reclaimed while a program runs")
        self._text("frank's program keeps its MIG device open and counts; erin, on the same GPU, is done.")
        frank, before = self._found("manual:frank"), program.count_on()
        self._here("reclaim", "manual:erin")
        after = program.count_on()
        self._check(after > before, f"the program counted on from {before} to {after}, leaving none out")
        self._check(self._found("manual:frank") == frank, "its instance is the very same")
        self._check(len(self._node.instances(1)) == 1, "erin's is gone")
        self._map(self._folder)

    def _kill_in_the_middle(self, program: Program) -> None:
        self._head("The allocating process is killed with SIGKILL in the middle")
        self._text("grace asks; when the driver has made her instance, and before that is recorded, the process dies.")
        fault = self._node.plant("nvmlGpuInstanceCreateComputeInstance", "stops", after=True, count="node")
        words = ("--node", self._folder, "allocate", "--owner", "manual:grace", "--memory", "8000")
        self._echo("gres-mig", *words[2:])
        with subprocess.Popen(command(*words), env=environment(), stderr=subprocess.DEVNULL) as process:
            stopped = self._stopped(fault)
            process.kill()
            os.kill(stopped, signal.SIGKILL)
        self._until(lambda: machine.process(stopped) is None)
        self._check(len(self._node.instances(1)) == 2, "an instance is there that nobody was given")
        self._map(self._folder)
        leftover = next(i for i in self._node.instances(1) if i.profile == "1g.24gb")
        self._text("grace asks again: what is left of the first ask is settled before she gets hers.")
        self._allocate("grace", 8000)
        there = self._node.instances(1)
        self._check(len(there) == 2, "nothing leaked: GPU 1 has frank's and grace's instance and no other")
        self._check(leftover.epoch not in {i.epoch for i in there}, "the half-made one was destroyed")
        program.count_on()
        self._map(self._folder)

    def _ask_again(self) -> None:
        self._head("A new process asks for the same owner")
        self._text("Every process that allocated is long gone; records and instances are not.")
        before = self._everything()
        self._allocate("grace", 8000, created=False)
        self._check(self._everything() == before, "she has the instance she had, and no hardware was touched")

    def _lose_the_records(self, program: Program) -> None:
        self._head("The node's records are lost; instances are adopted")
        self._text("alice, bob, carol and dave are done. Then half of state.json is gone, as after a broken disk.")
        before = self._everything()
        frank, grace = self._found("manual:frank"), self._found("manual:grace")
        for name in ("alice", "bob", "carol", "dave"):
            self._here("reclaim", f"manual:{name}", quiet=True)
        self._text("No instance is destroyed for that; an admin says whose they are.")
        state = Path(self._folder, "state", "state.json")
        os.truncate(state, state.stat().st_size // 2)
        self._adopt("manual:frank", frank)
        self._adopt("manual:grace", grace)
        self._check(self._found("manual:frank") == frank, "frank's record names the very same instance")
        self._check(self._everything() == [i for i in before if i.gpu != 0], "nothing was made or destroyed for it")
        program.count_on()
        self._map(self._folder)

    def _leave_the_unmanaged_alone(self) -> None:
        self._head("GPU 2, which is not managed")
        (foreign,) = self._node.instances(2)
        self._here("reclaim", "--foreign", f"{foreign.gpu_uuid}:{foreign.id}", "--yes", exit_code=2)
        self._here("disable-mig", foreign.gpu_uuid, exit_code=2)
        calls = [call["gpu"] for call in self._node.calls() if call["mutating"]]
        self._check(bool(calls), f"{len(calls)} calls changed GPUs so far")
        self._check(foreign.gpu_uuid not in calls, "none of them was for GPU 2")
        self._check(self._node.instances(2) == [foreign], "its instance is the very same")

    def _give_back(self) -> None:
        self._head("All is given back")
        self._here("reclaim", "manual:frank")
        self._here("reclaim", "manual:grace")
        self._check(not self._node.instances(0) + self._node.instances(1), "GPU 0 and 1 are empty")
        self._check(len(self._node.instances(2)) == 1, "GPU 2 is as it was")
        self._map(self._folder)

    def _allocate(self, name: str, mib: int, *, created: bool = True) -> None:
        owner = f"manual:{name}"
        text = self._here("allocate", "--owner", owner, "--memory", str(mib))
        self._check(text.startswith(f"{owner} has "), f"{name} has an instance", quiet=True)
        self._check(text.endswith("(already)") != created, f"it was made now: {created}", quiet=True)
        self._remember(owner, text)

    def _adopt(self, owner: str, instance: Found) -> None:
        self._remember(owner, self._here("adopt", owner, f"{instance.gpu_uuid}:{instance.id}"))

    def _remember(self, owner: str, text: str) -> None:
        found = re.search(r"MIG-[0-9a-f-]{36}", text)
        self._uuids[owner] = found[0] if found else ""
        self._found(owner)

    def _found(self, owner: str) -> Found:
        """The instance on the hardware that this owner was told."""
        found = [i for i in self._everything() if self._uuids[owner] in i.mig_uuids]
        self._check(len(found) == 1, f"the instance of {owner} is there", quiet=True)
        return found[0]

    def _everything(self) -> list[Found]:
        return [instance._replace(holders=()) for instance in self._node.instances()]

    @contextmanager
    def _program(self, owner: str) -> Iterator[Program]:
        self._head("A program starts on its instance")
        variables = dict(re.findall(r"^export (\w+)=(\S+)$", self._here("env", owner), re.MULTILINE))
        program = Program(self._folder, variables)
        try:
            self._check(program.count_on() > 0, f"pid {program.pid} has its MIG device open and counts")
            yield program
        finally:
            program.close()

    def _stopped(self, fault: int) -> int:
        """The pid of the process that a planted fault stopped, once it is."""

        def state() -> str:
            pids = self._node.fired(fault)
            return Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[0] if pids else ""

        self._until(lambda: state() == "T")
        return self._node.fired(fault)[0]

    def _here(self, *words: str, exit_code: int = 0, quiet: bool = False) -> str:
        return self._run(*words, node=self._folder, exit_code=exit_code, quiet=quiet)

"""The run that HAMi published on eight RTX PRO 6000, repeated through the command line; a test a result.

Each on a node of eight such GPUs, and again on a node where other models are between them.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from command_line import Answer, here, run, start, state_of, until

from gres_mig.simulator.admin import Found, Node
from gres_mig.simulator.program import Program

NODES = {
    "eight": ("--board", "rtx-pro-6000", "--count", "8"),
    "mixed": (
        *("--board", "l40", "--board", "rtx-pro-6000", "--count", "3", "--board", "h200"),
        *("--board", "rtx-pro-6000", "--count", "5", "--board", "a30"),
    ),
}


class Cluster:
    """A node of which only `managed` of the eight GPUs, and every GPU of another model, are managed."""

    def __init__(self, folder: Path, kind: str, managed: int) -> None:
        self.folder, self.mixed = folder, kind == "mixed"
        indexes = [1, 2, 3, 5, 6, 7, 8, 9] if self.mixed else list(range(8))
        others = [0, 4, 10] if self.mixed else []
        wanted = ",".join(str(index) for index in (*indexes[:managed], *others))
        assert here("simulate", "create", folder, *NODES[kind], "--managed", wanted).code == 0
        self.node = Node(folder)
        self.cards = [self.node.uuids[index] for index in indexes]
        self.node.configure(log="mutating")
        # On a mixed node other models have smaller instances; there the asks name the GPUs they mean.
        self.named = [word for card in self.cards[:managed] for word in ("--gpu", card)] if self.mixed else []

    def words(self, name: str, memory: int) -> list[str]:
        """The command line with which that owner asks."""
        asks = ["allocate", "--owner", f"manual:{name}", "--memory", str(memory)]
        return ["--node", str(self.folder), *asks, *self.named, "--json"]

    def ask(self, name: str, memory: int) -> Answer:
        """That owner asks."""
        return here(*self.words(name, memory))

    def get(self, name: str, memory: int) -> dict[str, Any]:
        """What that owner gets."""
        answer = self.ask(name, memory)
        assert answer.code == 0, answer.err
        return answer.plain

    def do(self, *words: str) -> Answer:
        """A command in a process of its own."""
        return run("--node", self.folder, *words)

    def on(self, card: int) -> list[Found]:
        """What the hardware has on one of the eight."""
        return self.node.instances(self.cards[card])

    def program(self, name: str) -> Program:
        """A job's program, in a process that has what `gres-mig env` says."""
        variables: dict[str, str] = self.do("env", f"manual:{name}", "--json").plain["environment"]
        return Program(str(self.folder), variables)


@pytest.fixture
def managed() -> int:
    """How many of the eight are managed."""
    return 2


@pytest.fixture(params=["eight", "mixed"])
def cluster(memory: Path, request: pytest.FixtureRequest, managed: int) -> Cluster:
    """The node of the run."""
    return Cluster(memory / "node", request.param, managed)


def without_holders(found: list[Found]) -> list[Found]:
    return [each._replace(holders=()) for each in found]


def test_8000_mib_give_a_1g_24gb_of_24192_mib(cluster: Cluster) -> None:
    got = cluster.get("alice", 8000)

    (there,) = cluster.node.instances()
    assert got["profile"] == {"id": 14, "name": "1g.24gb", "memory_mib": 24192}
    assert (got["requested_mib"], got["created"]) == (8000, True)
    assert (there.profile, there.gpu_uuid, there.id) == ("1g.24gb", got["gpu_uuid"], got["gi_id"])
    assert there.mig_uuids == (got["mig_uuid"],)
    assert got["placement"] == {"start": there.start, "size": there.size}


def test_four_fill_one_gpu_at_starts_0_3_6_and_9(cluster: Cluster) -> None:
    got = [cluster.get(name, 8000) for name in ("alice", "bob", "carol", "dave")]

    assert {each["gpu_uuid"] for each in got} == {cluster.cards[0]}
    assert sorted(each["placement"]["start"] for each in got) == [0, 3, 6, 9]
    assert [(each.start, each.size) for each in cluster.on(0)] == [(0, 3), (3, 3), (6, 3), (9, 3)]


def test_a_fifth_goes_to_a_second_gpu_where_one_is_managed(cluster: Cluster) -> None:
    got = [cluster.get(f"job{number}", 8000) for number in range(5)]

    assert got[4]["gpu_uuid"] == cluster.cards[1]
    assert got[4]["profile"]["name"] == "1g.24gb"
    assert len(cluster.on(0)) == 4


@pytest.mark.parametrize("managed", [1])
def test_a_fifth_is_refused_where_none_is_and_the_blockers_are_named(cluster: Cluster) -> None:
    owners = [f"manual:job{number}" for number in range(4)]
    for owner in owners:
        cluster.get(owner.removeprefix("manual:"), 8000)
    before = cluster.node.hardware()["generation"]

    refused = cluster.ask("job4", 8000)
    why = cluster.do("why", "8000", *cluster.named)

    assert refused.code == 3
    assert refused.plain["error"]["fault"] == "capacity"
    assert "no room for 8,000 MiB" in refused.err
    assert "1g.24gb" in refused.err
    assert all(owner in why.out for owner in owners)
    assert cluster.node.hardware()["generation"] == before


@pytest.mark.parametrize("managed", [1])
def test_8000_and_30000_mib_share_a_gpu_as_1g_24gb_and_2g_48gb(cluster: Cluster) -> None:
    small, large = cluster.get("alice", 8000), cluster.get("bob", 30000)

    assert small["gpu_uuid"] == large["gpu_uuid"] == cluster.cards[0]
    assert (small["profile"]["name"], large["profile"]["name"]) == ("1g.24gb", "2g.48gb")
    assert large["profile"]["memory_mib"] == 48512
    assert {each.profile: each.size for each in cluster.on(0)} == {"1g.24gb": 3, "2g.48gb": 6}


@pytest.mark.parametrize("managed", [1])
def test_reclaiming_the_small_one_leaves_the_large_ones_program_counting(cluster: Cluster) -> None:
    cluster.get("alice", 8000)
    large = cluster.get("bob", 30000)
    program = cluster.program("bob")
    before = program.count_on()

    reclaimed = cluster.do("reclaim", "manual:alice")
    after = program.count_on()

    (left,) = cluster.on(0)
    assert reclaimed.code == 0
    assert after > before
    assert (left.mig_uuids, left.holders) == ((large["mig_uuid"],), (program.pid,))
    # Its own count ends where all its steps were seen, none left out: `Program` refuses a gap.
    assert program.end() >= after


def test_a_program_keeps_its_own_instance_from_being_destroyed(cluster: Cluster) -> None:
    got = cluster.get("alice", 8000)
    program = cluster.program("alice")
    configuration = cluster.folder / "config.toml"
    configuration.write_text(configuration.read_text().replace("# in_use_wait = 2", "in_use_wait = 0"))

    reclaimed = cluster.do("reclaim", "manual:alice", "--json")

    assert reclaimed.code == 0
    assert reclaimed.plain["reclaimed"][0]["verdict"] == "stuck"
    assert f"pid {program.pid} " in reclaimed.plain["reclaimed"][0]["reason"]
    assert cluster.on(0)[0].mig_uuids == (got["mig_uuid"],)
    program.end()
    assert cluster.do("reclaim", "--orphans").code == 0
    assert cluster.on(0) == []


def killed_in_the_middle(cluster: Cluster, function: str, nth: int, *, after: bool) -> None:
    """An ask of alice whose processes are killed with SIGKILL while the n-th call of that function is under way."""
    fault = cluster.node.plant(function, "stops", nth=nth, after=after)
    with start(*cluster.words("alice", 8000)) as process:
        until(lambda: [state_of(pid) for pid in cluster.node.fired(fault)] == ["T"])
        (stopped,) = cluster.node.fired(fault)
        process.kill()
        os.kill(stopped, signal.SIGKILL)
        until(lambda: state_of(stopped) in ("", "Z"))
        assert process.communicate() == ("", "")
    cluster.node.mend()


def test_the_allocating_process_is_killed_and_a_new_one_adopts_the_same_instance(cluster: Cluster) -> None:
    # The second session is the one that makes it; it ends after the commit and before anybody is told.
    killed_in_the_middle(cluster, "nvmlShutdown", 2, after=False)
    (made,) = cluster.node.instances()

    got = cluster.do(*cluster.words("alice", 8000)[2:]).plain

    assert got["created"] is False
    assert (got["mig_uuid"],) == made.mig_uuids
    assert cluster.node.instances() == [made]


def test_an_ask_that_was_killed_before_its_commit_leaves_nothing_behind(cluster: Cluster) -> None:
    killed_in_the_middle(cluster, "nvmlGpuInstanceCreateComputeInstance", 1, after=True)
    (half_made,) = cluster.node.instances()

    got = cluster.do(*cluster.words("alice", 8000)[2:]).plain

    (made,) = cluster.node.instances()
    assert got["created"] is True
    assert (got["mig_uuid"],) == made.mig_uuids
    assert made.epoch > half_made.epoch


def test_an_instance_whose_record_is_lost_is_adopted_with_its_program_counting(cluster: Cluster) -> None:
    got = cluster.get("alice", 8000)
    made = without_holders(cluster.node.instances())
    program = cluster.program("alice")
    before = program.count_on()
    (cluster.folder / "state" / "state.json").unlink()

    adopted = cluster.do("adopt", "manual:alice", f"{got['gpu_uuid']}:{got['gi_id']}", "--json").plain

    assert adopted["mig_uuid"] == got["mig_uuid"]
    assert adopted["created"] is False
    assert without_holders(cluster.node.instances()) == made
    assert program.count_on() > before
    program.end()


def test_an_unmanaged_gpu_sees_no_mutating_call_on_any_path(cluster: Cluster) -> None:
    here("simulate", "make", cluster.folder, cluster.cards[7], "2g.48gb")
    (foreign,) = cluster.on(7)
    where = f"{foreign.gpu_uuid}:{foreign.id}"
    paths = [
        *[cluster.words(f"job{number}", 8000)[2:] for number in range(9)],
        ["allocate", "--owner", "manual:eve", "--memory", "8000", "--gpu", foreign.gpu_uuid],
        ["adopt", "manual:eve", where],
        ["reclaim", "--foreign", where, "--yes"],
        ["reclaim", "manual:job0"],
        ["reclaim", "--orphans"],
        ["reconcile"],
        ["enable-mig", foreign.gpu_uuid],
        ["disable-mig", foreign.gpu_uuid],
        ["unfence", foreign.gpu_uuid],
        ["setup", "--mig-at-boot", "--write"],
        ["boot"],
    ]

    codes = [here("--node", cluster.folder, *path).code for path in paths]

    called = {call["gpu"] for call in cluster.node.calls() if call["mutating"]}
    assert codes == [0] * 8 + [3, 2, 2, 2, 0, 0, 0, 2, 2, 0, 0, 0]
    assert called == set(cluster.cards[:2])
    assert cluster.on(7) == [foreign]


def test_on_a_mixed_node_the_smallest_instance_of_any_model_is_given(memory: Path) -> None:
    cluster = Cluster(memory / "node", "mixed", 8)
    cluster.named = []

    got = [cluster.get(f"job{number}", 8000)["profile"] for number in range(10)]

    names = [(each["name"], each["memory_mib"]) for each in got]
    assert names == [("2g.12gb", 11968)] * 2 + [("1g.18gb", 16384)] * 7 + [("1g.24gb", 24192)]

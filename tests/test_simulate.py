"""`gres-mig simulate`: making a node, and what can be done to it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import here, run, start, until

from gres_mig import config
from gres_mig.simulator.admin import Node

UUID = r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


@pytest.fixture
def folder(memory: Path) -> Path:
    """A node of two RTX PRO 6000 and an L40."""
    folder = memory / "node"
    assert here("simulate", "create", folder, "--board", "rtx-pro-6000", "--count", "2", "--board", "l40").code == 0
    return folder


@pytest.fixture
def idle() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def boards_of(folder: Path) -> list[str]:
    return [gpu["board"] for gpu in Node(folder).hardware()["gpus"]]


@pytest.mark.parametrize(
    ("words", "boards"),
    [
        (["--board", "a30"], ["a30"]),
        (["--board", "a30", "--count", "2"], ["a30", "a30"]),
        (["--board", "l40", "--board", "a30", "--count", "2", "--board", "l40"], ["l40", "a30", "a30", "l40"]),
        (["--board=a30", "--count=2", "--mig", "on", "--board", "l40"], ["a30", "a30", "l40"]),
    ],
)
def test_each_count_is_of_the_board_before_it(memory: Path, words: list[str], boards: list[str]) -> None:
    answer = here("simulate", "create", memory / "node", *words)

    assert (answer.code, answer.err) == (0, "")
    assert boards_of(memory / "node") == boards


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "--board"),
        (["--count", "2", "--board", "a30"], "--count belongs after the --board"),
        (["--board", "a30", "--count", "2", "--count", "3"], "--count belongs after the --board"),
        (["--board", "a30", "--count", "0"], "--count"),
        (["--board", "a30", "--count", "33"], "--count"),
        (["--board", "a30", "--count", "20", "--board", "a30", "--count", "20"], "1 to 32 GPUs"),
        (["--board", "gtx"], "no simulated board 'gtx'; boards: a100-40, "),
        (["--board", "a30", "--managed", "1"], "'1' is no GPU of this node"),
        (["--board", "a30", "--managed", "GPU-1"], "'GPU-1' is no GPU of this node"),
        (["--board", "a30", "--managed", ""], "'' is no GPU of this node"),
        (["--board", "a30", "--mig", "yes"], "--mig"),
        (["--board", "a30", "--create-seconds", "-1"], "--create-seconds"),
        (["--board", "a30", "--create-seconds", "nan"], "--create-seconds"),
    ],
)
def test_what_cannot_be_made_is_refused_and_leaves_no_folder(memory: Path, words: list[str], complaint: str) -> None:
    answer = here("simulate", "create", memory / "node", *words)

    assert answer.code == 2
    assert complaint in answer.err
    assert answer.err.count("\n") == 1
    assert not (memory / "node").exists()


def test_a_folder_with_anything_in_it_is_refused(memory: Path) -> None:
    (memory / "mine").write_text("mine")

    answer = here("simulate", "create", memory, "--board", "a30")

    assert answer.code == 2
    assert "is not empty" in answer.err
    assert os.listdir(memory) == ["mine"]


def test_a_folder_that_is_a_node_is_refused(folder: Path) -> None:
    before = (folder / "hardware.json").read_text()

    answer = here("simulate", "create", folder, "--board", "a30")

    assert answer.code == 2
    assert "already holds a simulated node" in answer.err
    assert (folder / "hardware.json").read_text() == before


def test_a_driver_that_is_none_leaves_no_half_a_node(memory: Path) -> None:
    refused = here("simulate", "create", memory / "new", "--board", "a30", "--driver", "abc")

    assert refused.code == 2
    assert "'abc' is no version of a driver" in refused.err
    assert here("simulate", "create", memory / "new", "--board", "a30").code == 0


def test_a_file_is_no_folder(memory: Path) -> None:
    (memory / "file").touch()

    assert "is not a folder" in here("simulate", "create", memory / "file", "--board", "a30").err


def test_an_empty_folder_will_do(memory: Path) -> None:
    assert here("simulate", "create", memory, "--board", "a30").code == 0
    assert boards_of(memory) == ["a30"]


def test_the_command_it_prints_next_works_as_it_stands(memory: Path) -> None:
    made = here("simulate", "create", memory / "my node", "--board", "a30", "--mig", "off")
    steps = re.findall(r"^next: gres-mig (.*)$", made.out, re.MULTILINE)

    codes = [subprocess.run(["sh", "-c", f"exec {shell(step)}"], check=False).returncode for step in steps]

    # The first turns MIG on, which on an Ampere board waits for a reset.
    assert len(steps) == 2
    assert codes == [3, 4]
    here("simulate", "reset", memory / "my node", "0")
    assert subprocess.run(["sh", "-c", f"exec {shell(steps[1])}"], check=False).returncode == 0


def shell(step: str) -> str:
    import shlex

    from gres_mig.simulator.program import command, environment

    path = shlex.quote(environment()["PYTHONPATH"])
    return f"env PYTHONPATH={path} {shlex.join(command())} {step} >/dev/null 2>&1"


@pytest.mark.parametrize(
    ("managed", "expected"),
    [("*", ["*"]), ("none", []), ("1", [1]), ("0,2", [0, 2])],
)
def test_the_gpus_are_managed_as_named(memory: Path, managed: str, expected: list[int | str]) -> None:
    here("simulate", "create", memory / "node", "--board", "a30", "--count", "3", "--managed", managed)

    uuids = Node(memory / "node").uuids
    wanted = tuple("*" if which == "*" else uuids[int(which)] for which in expected)
    assert config.load(node=memory / "node").managed == wanted


def test_a_gpu_made_again_in_the_same_folder_may_be_named_by_the_uuid_it_had(memory: Path) -> None:
    first = here("simulate", "create", memory / "node", "--board", "a30", "--json").plain["gpus"][0]["uuid"]
    (memory / "node").rename(memory / "old")

    again = here("simulate", "create", memory / "node", "--board", "a30", "--managed", first, "--json").plain

    assert [(gpu["uuid"], gpu["managed"]) for gpu in again["gpus"]] == [(first, True)]


def test_a_node_that_manages_nothing_points_to_setup(memory: Path) -> None:
    made = here("simulate", "create", memory / "node", "--board", "a30", "--managed", "none")
    refused = here("--node", memory / "node", "allocate", "--owner", "manual:a", "--memory", "1")

    assert f"next: gres-mig --node {memory / 'node'} setup --write" in made.out
    assert refused.code == 4
    assert "run: gres-mig setup" in refused.err


def test_times_and_chips_are_as_asked(memory: Path) -> None:
    words = ("--create-seconds", "0.25", "--destroy-seconds", "1.5", "--half-swapped")
    here("simulate", "create", memory / "node", "--board", "a100-40", *words)

    hardware = Node(memory / "node").hardware()
    assert (hardware["settings"]["create_s"], hardware["settings"]["destroy_s"]) == (0.25, 1.5)
    assert hardware["gpus"][0]["half_swapped"]


def test_the_boards_are_listed_with_memory_and_whether_they_have_mig() -> None:
    text, plain = here("simulate", "boards").out, here("simulate", "boards", "--json").plain

    boards = {board["board"]: (board["memory_mib"], board["mig"]) for board in plain["boards"]}
    assert boards["rtx-pro-6000"] == (97887, True)
    assert boards["l40"] == (46068, False)
    assert len(boards) == 10
    for line in text.splitlines():
        memory_mib, mig = boards[line.split()[0]]
        assert f"{memory_mib:,} MiB" in line
        assert ("no MIG" in line) != mig


def test_a_reboot_takes_the_instances_and_changes_the_boot_id(folder: Path) -> None:
    node = Node(folder)
    before = node.boot_id
    here("simulate", "make", folder, "0", "1g.24gb")

    answer = here("simulate", "reboot", folder, "--json")

    assert node.boot_id != before
    assert answer.plain["boot_id"] == node.boot_id
    assert node.instances() == []


def test_a_driver_reload_keeps_the_boot_id(folder: Path) -> None:
    node = Node(folder)
    before, loads = node.boot_id, node.module_instance

    here("simulate", "reload", folder)

    assert (node.boot_id, node.module_instance) == (before, loads + 1)


def test_a_lost_gpu_is_back_after_a_reset(folder: Path) -> None:
    lost = here("simulate", "lose", folder, "1")
    while_lost = Node(folder).hardware()["gpus"][1]["lost"]
    reset = here("simulate", "reset", folder, Node(folder).uuids[1])

    assert (lost.code, while_lost, reset.code) == (0, "all", 0)
    assert Node(folder).hardware()["gpus"][1]["lost"] == ""


def test_mig_mode_is_turned_by_hand_and_may_be_left_pending(folder: Path) -> None:
    here("simulate", "mig", folder, "0", "off")
    here("simulate", "mig", folder, "1", "off", "--pending")

    gpus = Node(folder).hardware()["gpus"]
    assert [(gpu["mig"], gpu["pending"]) for gpu in gpus[:2]] == [(0, 0), (1, 0)]
    assert here("simulate", "mig", folder, "2", "on").code == 2


def test_a_foreign_instance_is_made_and_destroyed_by_hand(folder: Path) -> None:
    made = here("simulate", "make", folder, "0", "2g.48gb", "--start", "6", "--json").plain
    there = Node(folder).instances()

    gone = here("simulate", "destroy", folder, f"0:{made['gi_id']}")

    assert [(i.profile, i.start, i.id, *i.mig_uuids) for i in there] == [
        ("2g.48gb", 6, made["gi_id"], made["mig_uuid"])
    ]
    assert gone.code == 0
    assert Node(folder).instances() == []


def test_a_bare_instance_has_no_mig_device(folder: Path) -> None:
    assert here("simulate", "make", folder, "0", "1g.24gb", "--bare", "--json").plain["mig_uuid"] is None


def test_what_the_driver_refuses_by_hand_is_told(folder: Path) -> None:
    here("simulate", "make", folder, "0", "4g.96gb")

    answer = here("simulate", "make", folder, "0", "1g.24gb", "--start", "0")

    assert answer.code != 0
    assert "Insufficient Resources" in answer.err


@pytest.mark.parametrize("place", ["0", "0:GI"])
def test_a_held_gpu_or_instance_is_in_use_until_it_is_released(
    folder: Path, idle: subprocess.Popen[bytes], place: str
) -> None:
    node = Node(folder)
    made = node.make(0, "1g.24gb")
    place = place.replace("GI", str(made.id))

    held = here("simulate", "hold", folder, place, "--pid", idle.pid)
    holders = [node.hardware()["gpus"][0]["holders"], node.instances(0)[0].holders]
    released = here("simulate", "release", folder, place, "--pid", idle.pid)

    assert (held.code, released.code) == (0, 0)
    assert idle.pid in ([h["pid"] for h in holders[0]] if place == "0" else holders[1])
    assert node.hardware()["gpus"][0]["holders"] == []
    assert node.instances(0)[0].holders == ()


def test_a_process_that_is_not_there_holds_nothing(folder: Path) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()

        answer = here("simulate", "hold", folder, "0", "--pid", process.pid)

    assert answer.code == 2
    assert f"no process {process.pid}" in answer.err


@pytest.mark.parametrize(
    "words",
    [
        ["reset", "{}", "9"],
        ["reset", "{}", "-1"],
        ["lose", "{}", "GPU-0"],
        ["destroy", "{}", "0"],
        ["destroy", "{}", "0:7"],
        ["destroy", "{}", "0:x"],
        ["hold", "{}", "0:7", "--pid", "1"],
        ["make", "{}", "0", "3g.71gb"],
        ["make", "{}", "0", "1g.24gb", "--start", "1"],
        ["fail", "{}", "nvmlDeviceFly", "hangs"],
        ["fail", "{}", "nvmlDeviceGetMigMode", "sulks"],
        ["reboot", "{}/elsewhere"],
        ["play", "{}"],
        [],
    ],
)
def test_what_is_not_there_is_answered_by_one_line(folder: Path, words: list[str]) -> None:
    before = Node(folder).hardware()

    answer = here("simulate", *(word.format(folder) for word in words))

    assert answer.code == 2
    assert answer.err.startswith("gres-mig: ")
    assert answer.err.count("\n") == 1
    assert Node(folder).hardware() == before


def test_a_program_counts_on_the_mig_device_its_environment_names(folder: Path) -> None:
    uuid = here("--node", folder, "allocate", "--owner", "manual:a", "--memory", "8000", "--json").plain["mig_uuid"]

    answer = run("simulate", "work", folder, "--steps", "3", "--every", "0.001", CUDA_VISIBLE_DEVICES=uuid)

    lines = answer.out.splitlines()
    assert lines[0] == f"opened {uuid}, 24,192 MiB"
    assert [line.split()[0] for line in lines[1:]] == ["1", "2", "3"]
    assert Node(folder).instances()[0].holders == ()


def test_a_program_ends_when_its_instance_goes_away_under_it(folder: Path) -> None:
    node = Node(folder)
    made = node.make(0, "1g.24gb")
    with start("simulate", "work", folder, made.mig_uuids[0]) as process:
        until(lambda: node.instances()[0].holders == (process.pid,))
        node.reset(0)

        _, err = process.communicate()

    assert process.returncode == 4
    assert f"{made.mig_uuids[0]} went away" in err


def test_a_program_on_a_device_that_is_not_there_is_refused(folder: Path) -> None:
    answer = run("simulate", "work", folder, "MIG-00000000-0000-0000-0000-000000000000", "--steps", "1")

    assert answer.code == 2
    assert "no MIG device" in answer.err


def test_the_next_call_of_a_function_fails_once_for_the_whole_node(folder: Path) -> None:
    ask = ("--node", folder, "allocate", "--owner", "manual:a", "--memory", "8000")
    here("simulate", "fail", folder, "nvmlInitWithFlags", "returns", "--code", "9")

    codes = [run(*ask).code, run(*ask).code]

    assert codes == [4, 0]


def test_mending_removes_what_was_planted(folder: Path) -> None:
    here("simulate", "fail", folder, "*", "returns", "--times", "0")
    planted = here("--node", folder, "allocate", "--owner", "manual:a", "--memory", "8000").code
    mended = here("simulate", "mend", folder)

    assert (planted, mended.code) == (4, 0)
    assert here("--node", folder, "allocate", "--owner", "manual:a", "--memory", "8000").code == 0

"""A simulated node from outside: put together, rebooted, reset, switched over."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
from simulated import ROOT, code, create, profiles

from gres_mig import simulator
from gres_mig.errors import BadRequest, ConfigError, GresMigError

AMPERE, HOPPER = 0, 1


@pytest.fixture
def node(tmp_path: Path) -> Iterator[simulator.Node]:
    simulator.create(tmp_path, [("a100-40", 1), ("h100-80", 1), ("l40", 1)])
    simulator.install(tmp_path)
    pynvml.nvmlInit()
    yield simulator.Node(tmp_path)
    simulator.uninstall()


def handle(index: int) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def modes(node: simulator.Node) -> list[tuple[int, int]]:
    return [(gpu["mig"], gpu["pending"]) for gpu in node.hardware()["gpus"][:2]]


def test_a_reboot_leaves_no_instance_and_the_mode_only_where_the_board_keeps_it(node: simulator.Node) -> None:
    before = node.boot_id, node.module_instance
    node.make(AMPERE, "1g.5gb")
    node.make(HOPPER, "1g.10gb")
    node.reboot()

    assert node.instances() == []
    assert modes(node) == [(1, 1), (0, 0)]
    assert node.boot_id != before[0]
    assert node.module_instance == before[1] + 1
    assert simulator.boot_id(node.store.folder) == node.boot_id
    assert simulator.module_instance(node.store.folder) == node.module_instance


def test_gpus_may_come_up_in_another_order(node: simulator.Node) -> None:
    before = node.uuids
    node.reboot(order=[2, 0, 1])

    assert node.uuids == (before[2], before[0], before[1])


def test_a_board_can_be_told_to_keep_its_mode(node: simulator.Node) -> None:
    node.set_gpu(HOPPER, survives_reboot=True)
    node.set_gpu(AMPERE, survives_reboot=False)
    node.reboot()

    assert modes(node) == [(0, 0), (1, 1)]


def test_a_driver_reload_leaves_no_instance_in_the_same_boot(node: simulator.Node) -> None:
    before = node.boot_id, node.module_instance
    node.make(AMPERE, 19)
    node.reload_driver()

    assert node.instances() == []
    assert (node.boot_id, node.module_instance) == (before[0], before[1] + 1)


def test_a_reset_clears_one_gpu_in_the_same_load(node: simulator.Node) -> None:
    before = node.boot_id, node.module_instance
    node.make(AMPERE, 19)
    other = node.make(HOPPER, 19)
    node.lose(AMPERE)
    node.reset(AMPERE)

    assert node.instances() == [other]
    assert (node.boot_id, node.module_instance) == before
    assert pynvml.nvmlDeviceGetUUID(handle(AMPERE)) == node.uuids[AMPERE]


def test_an_ampere_changes_its_mode_at_a_reset(node: simulator.Node) -> None:
    status = pynvml.nvmlDeviceSetMigMode(handle(AMPERE), 0)
    pending = pynvml.nvmlDeviceGetMigMode(handle(AMPERE))
    node.reset(AMPERE)

    assert (status, pending) == (pynvml.NVML_ERROR_RESET_REQUIRED, [1, 0])
    assert pynvml.nvmlDeviceGetMigMode(handle(AMPERE)) == [0, 0]


def test_an_ampere_changes_its_mode_at_a_reboot(node: simulator.Node) -> None:
    pynvml.nvmlDeviceSetMigMode(handle(AMPERE), 0)
    node.reboot()

    assert modes(node)[AMPERE] == (0, 0)


def test_a_pending_mode_can_be_taken_back(node: simulator.Node) -> None:
    pynvml.nvmlDeviceSetMigMode(handle(AMPERE), 0)

    assert pynvml.nvmlDeviceSetMigMode(handle(AMPERE), 1) == 0
    assert pynvml.nvmlDeviceGetMigMode(handle(AMPERE)) == [1, 1]


def test_a_hopper_changes_its_mode_at_once(node: simulator.Node) -> None:
    statuses = [pynvml.nvmlDeviceSetMigMode(handle(HOPPER), mode) for mode in (0, 1)]

    assert statuses == [0, 0]
    assert pynvml.nvmlDeviceGetMigMode(handle(HOPPER)) == [1, 1]


def test_a_mode_does_not_change_under_instances_or_users(node: simulator.Node) -> None:
    made = node.make(HOPPER, 19)
    with_instance = pynvml.nvmlDeviceSetMigMode(handle(HOPPER), 0)
    node.destroy(HOPPER, made.id)
    node.hold(HOPPER)
    with_user = pynvml.nvmlDeviceSetMigMode(handle(HOPPER), 0)
    node.let_go(HOPPER)

    assert (with_instance, with_user) == (pynvml.NVML_ERROR_IN_USE, pynvml.NVML_ERROR_IN_USE)
    assert pynvml.nvmlDeviceGetMigMode(handle(HOPPER)) == [1, 0]
    assert pynvml.nvmlDeviceSetMigMode(handle(HOPPER), 0) == 0


def test_an_admins_hand_is_bound_by_the_drivers_rules(node: simulator.Node) -> None:
    made = node.make(AMPERE, "3g.20gb", 0)
    node.hold(AMPERE, made.id, 0)

    with pytest.raises(GresMigError, match=r"making 4g\.20gb on GPU 0: Insufficient Resources"):
        node.make(AMPERE, "4g.20gb", 0)
    with pytest.raises(GresMigError, match="destroying GPU instance 1 of GPU 0: In use by another client"):
        node.destroy(AMPERE, made.id)
    with pytest.raises(BadRequest, match=r"it has 1g\.5gb, 1g\.5gb"):
        node.make(AMPERE, "9g.90gb")


def test_an_admin_may_take_the_compute_instance_alone(node: simulator.Node) -> None:
    made = node.make(AMPERE, 19, 0)
    node.destroy(AMPERE, made.id, compute_only=True)

    assert [i.mig_uuids for i in node.instances()] == [()]


def test_a_node_has_uuids_of_its_own_that_stay(tmp_path: Path) -> None:
    uuids = []
    for folder in ("one", "two"):
        simulator.create(tmp_path / folder, [("rtx-pro-6000", 8)])
        uuids += simulator.Node(tmp_path / folder).uuids
    (tmp_path / "one" / "hardware.json").unlink()
    simulator.create(tmp_path / "one", [("rtx-pro-6000", 8)])

    assert len(set(uuids)) == 16
    assert simulator.Node(tmp_path / "one").uuids == tuple(uuids[:8])


def test_a_node_can_be_made_with_mig_off(tmp_path: Path) -> None:
    simulator.create(tmp_path, [("h200", 1), ("l40", 1)], mig=False)

    assert [gpu["mig"] for gpu in simulator.Node(tmp_path).hardware()["gpus"]] == [0, 0]


def test_a_node_is_not_made_twice_nor_of_nothing_nor_of_an_unknown_board(tmp_path: Path) -> None:
    simulator.create(tmp_path / "node", [("h200", 1)])

    with pytest.raises(BadRequest, match="already holds a simulated node"):
        simulator.create(tmp_path / "node", [("h200", 1)])
    with pytest.raises(BadRequest, match="1 to 32 GPUs, not 0"):
        simulator.create(tmp_path / "other", [])
    with pytest.raises(BadRequest, match="no simulated board 'h300'; boards: a100-40, a100-80, a30"):
        simulator.create(tmp_path / "other", [("h300", 1)])


def test_a_folder_without_a_node_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"run: gres-mig simulate create {tmp_path}"):
        simulator.install(tmp_path)
    with pytest.raises(ConfigError, match="is no simulated node"):
        simulator.boot_id(tmp_path)


def test_a_board_nobody_has_heard_of_works(tmp_path: Path) -> None:
    figures = simulator.board_data("h200")
    figures["model"] = "NVIDIA X900"
    figures["profiles"][0]["memory_mib"] = 17000
    simulator.create(tmp_path, [("x900", 1), ("h200", 1)], custom={"x900": figures})
    simulator.install(tmp_path)
    pynvml.nvmlInit()
    said = [(pynvml.nvmlDeviceGetName(handle(i)), profiles(handle(i))[0].memorySizeMB) for i in (0, 1)]
    simulator.uninstall()

    assert said == [("NVIDIA X900", 17000), ("NVIDIA H200", 16384)]


@pytest.mark.parametrize("name", simulator.board_names())
def test_a_board_is_whole_and_says_where_its_figures_come_from(name: str) -> None:
    figures = simulator.board_data(name)

    assert figures["board"] == name
    assert figures["sources"]
    for profile in figures["profiles"]:
        assert None not in profile.values()
        assert profile["memory_basis"]
        assert max(profile["starts"]) + profile["size"] <= figures["units"]
        assert profile["memory_mib"] < figures["memory_mib"]
        assert profile["instance_count"] == 1 or profile["instance_count"] == len(profile["starts"])
    for profile in figures["left_out"]:
        assert profile["unknown"]


def test_all_boards_of_the_readme_are_there() -> None:
    assert set(simulator.board_names()) == {
        *("rtx-pro-6000", "a30", "a100-40", "a100-80", "h100-80", "h100-94", "h200", "gh200", "b200", "l40")
    }


@pytest.fixture
def foreign(tmp_path: Path) -> simulator.Node:
    """A node that belongs to user 65534."""
    folder = tmp_path / "node"
    simulator.create(folder, [("rtx-pro-6000", 1)])
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 65534, 65534)
    for parent in (tmp_path, *tmp_path.parents):
        # pytest's own, one more of them where its tests run side by side.
        if "pytest-" in str(parent):
            parent.chmod(0o755)
    return simulator.Node(folder)


def as_user(uid: int, node: simulator.Node, call: str) -> int:
    """The code that a call on the node's GPU ends with for that user."""
    script = (
        "import os, sys; sys.path[:0] = sys.argv[2:]; import pynvml, simulated; from gres_mig import simulator\n"
        "os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))\n"
        "simulator.install(os.getcwd()); pynvml.nvmlInit(); gpu = pynvml.nvmlDeviceGetHandleByIndex(0)\n"
        f"print(simulated.code(lambda: {call}))\n"
    )
    command = [sys.executable, "-c", script, str(uid), str(ROOT), str(ROOT / "tests")]
    return int(subprocess.run(command, cwd=node.store.folder, capture_output=True, text=True, check=True).stdout)


root_only = pytest.mark.skipif(os.geteuid() != 0, reason="changes to another user")


@root_only
def test_who_may_change_a_node_is_a_setting(foreign: simulator.Node) -> None:
    by_default = [as_user(uid, foreign, "simulated.create(gpu, 14)") for uid in (0, 65534, 65533)]
    foreign.configure(permission="root")
    by_root = [as_user(uid, foreign, "simulated.create(gpu, 14)") for uid in (0, 65534)]

    assert by_default == [0, 0, pynvml.NVML_ERROR_NO_PERMISSION]
    assert by_root == [0, pynvml.NVML_ERROR_NO_PERMISSION]


@root_only
def test_a_user_who_may_only_look_is_logged_and_meets_faults_as_well(foreign: simulator.Node) -> None:
    foreign.configure(log="all")
    foreign.plant("nvmlDeviceGetMigMode", "returns", code=10)

    met = [as_user(65533, foreign, f"pynvml.{name}(gpu)") for name in ("nvmlDeviceGetMigMode", "nvmlDeviceGetUUID")]

    assert met == [10, 0]
    assert [c["code"] for c in foreign.calls() if c["function"] == "nvmlDeviceGetMigMode"] == [10]


def test_creating_takes_the_time_it_is_told_and_refusing_does_not(node: simulator.Node) -> None:
    node.make(HOPPER, 19, 0)
    node.configure(create_s=60, destroy_s=60, compute_s=60)

    assert code(lambda: create(handle(HOPPER), 19, 0)) == pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES


def test_an_unknown_setting_is_refused(node: simulator.Node) -> None:
    with pytest.raises(BadRequest, match="no setting speed"):
        node.configure(speed=9)

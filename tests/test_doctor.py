"""`gres-mig doctor`: a good node has no findings, a planted fault is found and its next step named."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from gres_mig import config_text, machine, simulator
from gres_mig.allocator import Allocator
from gres_mig.commands import boot_unit
from gres_mig.doctor import Finding, boot, driver, rivals
from gres_mig.doctor import node as checks
from gres_mig.doctor.systemd import Units
from gres_mig.errors import NodeFault
from gres_mig.look import look
from gres_mig.models import Owner, Request, Settings
from gres_mig.mounts import file_system
from gres_mig.state import Store
from gres_mig.values import replace
from tests.command_line import here
from tests.commands import nobody, run

ALICE = Owner("manual:alice")
ROOT = Path(__file__).parent.parent
MOUNTS = "22 27 0:21 / /proc rw - proc proc rw\n27 1 8:1 / / rw - ext4 /dev/sda1 rw\n"


@pytest.fixture
def settings(node: simulator.Node) -> Settings:
    """The node's settings, in its config.toml as well: all GPUs managed, a busy instance is stuck at once."""
    settings = replace(config_text.write_node_config(node.store.folder), in_use_wait_s=0.0)
    config_text.write(settings)
    return settings


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder that stands for `/`."""
    for name in ("proc/self", "sys/module", "etc/systemd/system", "dev"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTS)
    return tmp_path


def bad(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    """Level and text of what is not right."""
    return [(found.level, found.text) for found in findings if found.level != "ok"]


def found(node: simulator.Node, check: str) -> list[Finding]:
    """What the command says of one check."""
    plain = run(node, "doctor", "--json").plain["findings"]
    return [Finding(f["check"], f["level"], f["text"], f["todo"] or "") for f in plain if f["check"] == check]


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_good_node_has_neither_problem_nor_warning(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    allocator.allocate(ALICE, Request(8000))

    ran = run(node, "doctor")

    assert ran.code == 0
    assert ran.out.splitlines()[-1] == "no problems, no warnings"
    assert "PROBLEM" not in ran.out


def test_a_problem_is_said_with_the_line_to_type_and_exits_4(node: simulator.Node, settings: Settings) -> None:
    node.set_mig(0, False)

    ran = run(node, "doctor", columns=200)

    assert ran.code == 4
    line = next(n for n, text in enumerate(ran.out.splitlines()) if text.startswith("PROBLEM"))
    assert "MIG mode is off" in ran.out.splitlines()[line]
    assert ran.out.splitlines()[line + 1].strip() == f"run: gres-mig enable-mig {node.uuids[0]}"
    assert ran.out.splitlines()[-1] == "1 problem, no warnings"


def test_a_configuration_with_a_mistake_is_found_and_the_rest_is_checked_still(
    node: simulator.Node, settings: Settings
) -> None:
    Path(settings.config_path).write_text("gpus = 7\n")

    ran = run(node, "doctor", "--json")

    assert ran.code == 4
    levels = {each["check"]: each["level"] for each in ran.plain["findings"]}
    assert (levels["configuration"], levels["driver"]) == ("problem", "ok")


def test_a_machine_without_configuration_is_told_to_set_up(tmp_path: Path) -> None:
    settings = Settings(str(tmp_path / "state"), str(tmp_path / "run"), str(tmp_path / "config.toml"))

    (finding,) = checks.configuration(settings, None)

    assert (finding.level, finding.todo) == ("warning", "run: gres-mig setup")


def test_a_configuration_that_is_not_roots_is_a_problem(tmp_path: Path) -> None:
    file = write(tmp_path / "config.toml")
    if os.geteuid() == 0:
        os.chown(file, 1000, 1000)
    settings = Settings(str(tmp_path), str(tmp_path), str(file))

    (finding,) = checks.configuration(settings, None)

    assert (finding.level, finding.todo) == ("problem", f"run: chown root:root {file}")


def test_a_validated_configuration_of_an_older_file_is_found(node: simulator.Node, settings: Settings) -> None:
    run(node, "status")
    fresh = bad(checks.validated(settings))
    with open(settings.config_path, "a", encoding="utf-8") as file:
        file.write("# a word more\n")

    assert fresh == []
    ((level, text),) = bad(checks.validated(settings))
    assert (level, "is of an older" in text) == ("warning", True)


def test_a_managed_gpu_that_is_not_on_the_node_is_found(node: simulator.Node) -> None:
    gone = "GPU-00000000-1111-2222-3333-444444444444"
    config_text.write_node_config(node.store.folder, (node.uuids[0], gone))

    (problem, _) = found(node, "managed GPUs")

    assert (problem.level, problem.text) == ("problem", f"{gone} is managed, but not on this node")


def test_a_gpu_may_be_managed_by_its_pci_address(node: simulator.Node) -> None:
    config_text.write_node_config(node.store.folder, ("00000000:1b:00.0",))

    (finding,) = found(node, "managed GPUs")

    assert (finding.level, finding.text) == ("ok", "1 of 2 GPUs of this node")


def test_a_node_that_manages_nothing_is_told_so(node: simulator.Node) -> None:
    config_text.write_node_config(node.store.folder, ())

    (finding,) = found(node, "managed GPUs")

    assert (finding.level, finding.todo) == ("warning", "run: gres-mig setup")


def test_an_allowed_profile_that_the_model_does_not_have_is_found(node: simulator.Node, settings: Settings) -> None:
    model = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    config_text.write(replace(settings, allowed={model: ("1g.24gb", "1g.25gb"), "NVIDIA A30": ("9g.9gb",)}))

    warning, _ = found(node, "managed GPUs")

    assert (warning.level, warning.text) == ("warning", f"1g.25gb is allowed for {model}, which has no such profile")


def test_a_pending_mig_mode_is_found_with_the_processes_in_its_way(node: simulator.Node, settings: Settings) -> None:
    node.set_mig(0, False, pending=True)
    node.hold(0)

    (problem, good) = found(node, "MIG mode")

    assert problem.level == "problem"
    assert f"a change of MIG mode to on is pending; in its way: {machine.describe(os.getpid())}" in problem.text
    assert "nvidia-smi --gpu-reset -i 00000000:17:00.0" in problem.todo
    assert good.text == "in force on 1 managed GPU"


def test_a_kernel_module_and_a_process_that_only_opened_the_gpu_are_in_the_way_too(
    node: simulator.Node, settings: Settings
) -> None:
    node.set_mig(0, True, pending=False)
    folder = Path(node.store.folder)
    (folder / "sys/module/nvidia_drm").mkdir(parents=True)
    card = write(folder / "dev/nvidia0")
    script = f"open({str(card)!r}); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", f"import sys; card = {script}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        (problem, _) = found(node, "MIG mode")
        holder.communicate(b"\n")

    assert f"pid {holder.pid} " in problem.text
    assert problem.text.endswith("kernel module nvidia_drm")


@pytest.mark.parametrize("boards", [[("l40", 2)]])
def test_where_no_board_has_mig_it_is_said_how_they_are_shared(node: simulator.Node) -> None:
    config_text.write_node_config(node.store.folder, ("*",))

    (finding,) = found(node, "MIG mode")

    assert (finding.level, finding.text) == ("warning", "all GPUs are managed, and none of them has MIG")
    assert finding.todo.startswith("to share them: slices in ")


@pytest.mark.parametrize("boards", [[("rtx-pro-6000", 1), ("l40", 1)]])
def test_a_board_without_mig_is_a_problem_only_where_it_is_managed_by_name(node: simulator.Node) -> None:
    config_text.write_node_config(node.store.folder, ("*",))
    all_of_them = bad(found(node, "MIG mode"))
    config_text.write_node_config(node.store.folder, node.uuids)

    by_name = bad(found(node, "MIG mode"))

    assert all_of_them == []
    assert by_name == [("problem", f"GPU 1 ({node.uuids[1]}) is managed, but this board has no MIG")]


def test_a_node_that_only_shares_its_gpus_is_as_good_as_another(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    assert here("simulate", "create", folder, "--board", "l40", "--board", "l40", "--driver", "615.10.04").code == 0
    file = folder / "config.toml"
    file.write_text('slices = "*"\nexperimental_driver_limit = true\n')
    node = simulator.Node(folder)

    good = run(node, "doctor")
    limited = found(node, "slices")
    file.write_text('slices = "*"\n')
    (unlimited,) = found(node, "slices")
    simulator.uninstall()

    assert good.out.splitlines()[-1] == "no problems, no warnings"
    assert [each.text for each in limited] == ["2 shared GPU(s); each slice is held to its memory by the driver"]
    assert unlimited.text == (
        f"GPU 0 ({node.uuids[0]}), GPU 1 ({node.uuids[1]}): nothing limits slices: "
        "hami_core names no library, and experimental_driver_limit is off"
    )


def test_a_lost_gpu_is_a_problem(node: simulator.Node, settings: Settings) -> None:
    node.lose(1, identity=True)
    address = node.hardware()["gpus"][1]["pci"]

    problem, _ = found(node, "MIG mode")

    assert (problem.level, problem.todo) == ("problem", f"run: nvidia-smi --gpu-reset -i {address}, or reboot the node")


def test_an_unmanaged_gpu_is_nobodys_problem(node: simulator.Node) -> None:
    config_text.write_node_config(node.store.folder, (node.uuids[0],))
    node.set_mig(1, False)

    assert run(node, "doctor").code == 0


def test_a_driver_that_is_not_loaded_is_a_problem(node: simulator.Node, settings: Settings) -> None:
    node.unload_driver()

    (problem,) = found(node, "driver")

    assert problem.level == "problem"
    assert problem.text.endswith("no kernel module nvidia is loaded")


def test_a_library_that_is_newer_than_the_module_is_a_problem(node: simulator.Node, settings: Settings) -> None:
    node.upgrade_library()
    write(Path(node.store.folder, "sys/module/nvidia/version"), "570.133.20\n")

    (problem,) = found(node, "driver")

    assert problem.text.endswith("the kernel module is 570.133.20")
    assert "reboot the node" in problem.todo


def test_driver_versions_have_to_fit(tree: Path) -> None:
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@host)\n"
    write(tree / "proc/driver/nvidia/version", line)

    def check(*versions: str) -> list[str]:
        answer = versions[0], versions[1]
        return [finding.level for finding in driver.driver(answer, tree / "proc", tree / "sys")]

    assert check("580.159.04", "13.580.159.04") == ["ok"]
    assert check("580.126.09", "13.580.126.09") == ["problem"]
    assert check("580.159.04", "12.570.133.20") == ["problem"]


def test_an_error_of_the_driver_keeps_its_hint(tree: Path) -> None:
    (finding,) = driver.driver(NodeFault("no", hint="do this"), tree / "proc", tree / "sys")

    assert (finding.level, finding.todo) == ("problem", "do this; run: modprobe nvidia")


@pytest.mark.parametrize(
    ("installed", "levels"),
    [
        ({"nvidia_ml_py": "13.615.71"}, ["ok"]),
        ({"nvidia_ml_py": "12.535.161"}, ["warning"]),
        ({"nvidia_ml_py": "13.615.71", "pynvml": "13.0.1"}, ["warning"]),
        ({"nvidia_ml_py": "13.615.71", "pynvml": "11.5.3"}, ["problem"]),
        ({"pynvml": "11.5.3"}, ["problem", "problem"]),
        ({}, ["problem"]),
    ],
)
def test_the_binding_is_nvidias_and_the_old_one_is_not_beside_it(
    tmp_path: Path, installed: dict[str, str], levels: list[str]
) -> None:
    for name, version in installed.items():
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        write(tmp_path / f"{name}-{version}.dist-info/METADATA", text)

    assert [finding.level for finding in driver.binding([str(tmp_path)])] == levels


def test_device_files_of_instances_have_to_be_there(
    node: simulator.Node, allocator: Allocator, settings: Settings, tree: Path
) -> None:
    allocation = allocator.allocate(ALICE, Request(8000)).allocation
    gpus = allocator.look()
    without = bad(driver.capability_nodes(gpus, settings, tree))
    table = f"config 1\nmonitor 2\ngpu0/gi{allocation.gi_id}/access 30\ngpu0/gi{allocation.gi_id}/ci0/access 31\n"
    write(tree / "proc/driver/nvidia-caps/mig-minors", table)
    for name in ("dev/nvidia0", "dev/nvidia-caps/nvidia-cap30"):
        write(tree / name)
    one_missing = bad(driver.capability_nodes(gpus, settings, tree))
    write(tree / "dev/nvidia-caps/nvidia-cap31")

    assert [level for level, _ in without] == ["problem"]
    ((_, text),) = one_missing
    assert text == f"1 device file(s) of instances are missing, the first is {tree}/dev/nvidia-caps/nvidia-cap31"
    assert bad(driver.capability_nodes(gpus, settings, tree)) == []


def test_with_mig_off_no_device_files_are_asked_for(node: simulator.Node, settings: Settings, tree: Path) -> None:
    node.set_mig(0, False)
    node.set_mig(1, False)

    assert list(driver.capability_nodes(look(settings).gpus, settings, tree)) == []


@pytest.mark.parametrize(
    ("mode", "private", "found_text"),
    [(0o700, True, ""), (0o750, True, "readable or writable"), (0o755, False, ""), (0o777, False, "is writable")],
)
def test_a_folder_is_closed_to_others(tmp_path: Path, tree: Path, mode: int, private: bool, found_text: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(mode)

    findings = list(checks.folder("records", str(folder), private=private, owner=os.geteuid(), proc=tree / "proc"))

    if found_text:
        assert [found_text in text for _, text in bad(findings)] == [True]
        assert findings[0].todo == f"run: chmod {'0700' if private else '0755'} {folder}"
    else:
        assert bad(findings) == []


def test_a_folder_of_another_user_is_a_problem(tmp_path: Path, tree: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(0o700)
    if os.geteuid() == 0:
        os.chown(folder, 1000, 1000)

    ((level, text),) = bad(checks.folder("records", str(folder), private=True, owner=4711, proc=tree / "proc"))

    assert (level, text) == ("problem", f"{folder} belongs to uid {folder.stat().st_uid}")


@pytest.mark.parametrize(("kind", "level"), [("nfs4", "problem"), ("fuse.glusterfs", "problem"), ("xfs", "ok")])
def test_records_on_a_network_file_system_are_a_problem_before_they_are_there(
    tree: Path, kind: str, level: str
) -> None:
    (tree / "proc/self/mountinfo").write_text(f"{MOUNTS}30 27 0:44 / /srv/state rw - {kind} server:/srv rw\n")

    (finding,) = checks.folder("records", "/srv/state/gres-mig", private=True, owner=0, proc=tree / "proc")

    assert finding.level == level


def test_the_mount_that_counts_is_the_nearest_and_the_last_of_one_place(tree: Path) -> None:
    more = (
        "30 27 0:44 / /srv rw - nfs4 server:/srv rw\n"
        "31 30 8:2 / /srv/local\\040disk rw shared:1 - xfs /dev/sdb1 rw\n"
        "32 27 0:45 / /mnt rw - ext4 /dev/sdc1 rw\n"
        "33 32 0:46 / /mnt rw - cifs //server/share rw\n"
    )
    (tree / "proc/self/mountinfo").write_text(MOUNTS + more)

    kinds = [file_system(path, tree / "proc") for path in ("/srv/local disk/a", "/srvx", "/srv/a", "/mnt/a")]

    assert kinds == ["xfs", "ext4", "nfs4", "cifs"]


@pytest.mark.parametrize(("now", "level"), [(1_000_000_000.0, "problem"), (None, "ok")])
def test_a_clock_that_was_never_set_is_a_problem(tmp_path: Path, now: float | None, level: str) -> None:
    (finding,) = checks.clock(now or time.time(), str(tmp_path / "state.json"))

    assert finding.level == level


def test_a_clock_behind_the_records_is_a_problem(tmp_path: Path) -> None:
    state = write(tmp_path / "state.json")
    os.utime(state, (time.time() + 7200,) * 2)

    (finding,) = checks.clock(time.time(), str(state))

    assert finding.level == "problem"


def test_somebody_who_may_not_allocate_is_told_so(node: simulator.Node, settings: Settings, tree: Path) -> None:
    real = replace(settings, simulator="")

    assert [f.level for f in checks.permissions(real, 0, tree)] == ["ok"]
    assert [f.level for f in checks.permissions(real, 1000, tree)] == ["warning"]


def test_others_get_an_answer_too(node: simulator.Node, allocator: Allocator, settings: Settings) -> None:
    allocator.allocate(ALICE, Request(8000))
    run(node, "status")
    with nobody(node, settings):
        ran = run(node, "doctor", "--json")

    assert ran.code == 0
    assert "manual:alice" not in ran.out
    assert {f["check"] for f in ran.plain["findings"] if f["level"] == "warning"} <= {"permissions"}


def test_that_somebody_may_not_list_instances_is_no_problem_of_the_node(
    node: simulator.Node, settings: Settings
) -> None:
    with nobody(node, settings):
        ran = run(node, "doctor")

    assert ran.code == 0


def test_a_process_that_sits_on_the_lock_of_a_fenced_gpu_is_named(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    allocator.fence(node.uuids[0], "a driver call did not return")
    with open(os.path.join(settings.run_dir, f"gpu-{node.uuids[0]}.lock"), "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ((level, text),) = bad(found(node, "locks"))

    assert level == "problem"
    assert text.startswith(f"{machine.describe(os.getpid())} holds the lock of {node.uuids[0]}")
    assert bad(found(node, "locks")) == []


def test_a_process_at_work_on_a_gpu_is_no_finding(node: simulator.Node, settings: Settings) -> None:
    patient = replace(settings, hardware_timeout_s=600.0)
    with open(os.path.join(settings.run_dir, f"gpu-{node.uuids[0]}.lock"), "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        assert bad(checks.locks(patient, (), Path("/proc"))) == []
        assert [
            level for level, _ in bad(checks.locks(replace(patient, hardware_timeout_s=0.0), (), Path("/proc")))
        ] == ["warning"]


def test_a_stopped_process_that_holds_the_nodes_lock_is_a_problem_and_status_does_not_wait_for_it(
    node: simulator.Node, settings: Settings
) -> None:
    eager = replace(settings, hardware_timeout_s=0.0)
    script = "import fcntl, os, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); os.kill(os.getpid(), 19)"
    holder = subprocess.Popen([sys.executable, "-c", script, os.path.join(settings.run_dir, "node.lock")])
    os.waitpid(holder.pid, os.WUNTRACED)
    try:
        ((level, text),) = bad(checks.locks(eager, (), Path("/proc")))
        ran = run(node, "status")
    finally:
        holder.kill()
        holder.wait()

    assert (level, "holds the node's lock" in text) == ("problem", True)
    assert ran.code == 0


def test_a_fenced_gpu_is_a_problem(node: simulator.Node, allocator: Allocator, settings: Settings) -> None:
    allocator.allocate(ALICE, Request(8000))
    allocator.fence(node.uuids[0], "a driver call did not return")

    (problem,) = found(node, "fences")
    (agreement,) = found(node, "records")

    assert problem.text == f"GPU 0 ({node.uuids[0]}) is fenced: a driver call did not return"
    assert problem.todo.endswith(f"gres-mig unfence {node.uuids[0]}")
    assert agreement.level == "ok"


def test_stuck_and_lost_records_are_problems(node: simulator.Node, allocator: Allocator, settings: Settings) -> None:
    stuck = allocator.allocate(ALICE, Request(8000)).allocation
    node.hold(0, stuck.gi_id, 0)
    run(node, "reclaim", "manual:alice")
    node.destroy(0, allocator.allocate(Owner("manual:bob"), Request(30000)).allocation.gi_id)

    problems = found(node, "records")

    assert [p.level for p in problems] == ["problem", "problem"]
    assert {p.todo for p in problems} == {
        "end what uses it, then run: gres-mig reclaim --orphans",
        "when its owner is done, run: gres-mig reclaim manual:bob",
    }


def test_a_foreign_instance_is_a_warning_with_both_ways_out(node: simulator.Node, settings: Settings) -> None:
    made = node.make(1, "2g.48gb", 6)

    (warning,) = found(node, "foreign")

    name = f"{node.uuids[1]}:{made.id}"
    assert warning.level == "warning"
    assert warning.todo == f"run: gres-mig adopt OWNER {name}, or gres-mig reclaim --foreign {name} --yes"


def test_damaged_records_that_were_set_aside_are_named(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    allocator.allocate(ALICE, Request(8000))
    Path(settings.state_dir, "state.json").write_bytes(b"{")
    with Store(settings, machine.boot_id(settings.simulator)).transaction():
        pass

    levels = [finding.level for finding in found(node, "records")]

    assert levels == ["warning", "problem"]


def test_records_of_a_newer_version_are_a_problem_and_the_hardware_is_checked_still(
    node: simulator.Node, settings: Settings
) -> None:
    Path(settings.state_dir, "state.json").write_text('{"format": 99}')

    ran = run(node, "doctor", "--json")

    levels = {each["check"]: each["level"] for each in ran.plain["findings"]}
    assert (levels["records"], levels["driver"]) == ("problem", "ok")


def test_another_mig_manager_that_starts_at_boot_is_a_problem(tree: Path) -> None:
    unit = write(tree / "usr/lib/systemd/system/nvidia-mig-manager.service")
    installed = bad(rivals.enabled(Units(tree), managed=True))
    wants = tree / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir()
    (wants / unit.name).symlink_to("/usr/lib/systemd/system/nvidia-mig-manager.service")

    (finding,) = rivals.enabled(Units(tree), managed=True)

    assert installed == []
    assert (finding.level, finding.todo) == ("problem", f"run: systemctl disable --now {unit.name}")
    assert [f.level for f in rivals.enabled(Units(tree), managed=False)] == ["warning"]


def test_a_masked_unit_of_another_manager_does_not_start(tree: Path) -> None:
    wants = tree / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir()
    for folder in (wants, wants.parent):
        (folder / "nvidia-mig-manager.service").symlink_to(os.devnull)

    assert bad(rivals.enabled(Units(tree), managed=True)) == []


@pytest.mark.parametrize("slices", ["system.slice", "unified/system.slice", "systemd/system.slice"])
def test_another_mig_manager_that_runs_is_a_problem(tree: Path, slices: str) -> None:
    (tree / "sys/fs/cgroup" / slices / "nvidia-mig-manager.service").mkdir(parents=True)

    ((level, text),) = bad(rivals.enabled(Units(tree), managed=True))

    assert (level, "is active" in text) == ("problem", True)


@pytest.mark.parametrize(
    ("command", "level"),
    [
        ("/usr/bin/gpu-kubelet-plugin\0--v=4\0", "problem"),
        ("/bin/sh\0/usr/bin/nvidia-mig-manager\0", "problem"),
        ("nvidia-device-plugin\0", "warning"),
        ("/usr/sbin/slurmd\0-D\0", None),
        ("grep\0-r\0nvidia-mig-manager\0", None),
    ],
)
def test_programs_of_other_managers_are_found_among_the_processes(tree: Path, command: str, level: str | None) -> None:
    write(tree / "proc/4711/cmdline", command)
    write(tree / "proc/uptime", "1 1")

    findings = [
        (finding.level, "pid 4711" in finding.text) for finding in rivals.processes(tree / "proc", managed=True)
    ]

    assert findings == ([(level, True)] if level else [])


def test_mig_at_boot_needs_its_unit_enabled(tree: Path) -> None:
    settings = Settings("", "", mig_at_boot=True)
    missing = bad(boot.boot_unit(settings, Units(tree), boot_unit.NAME))
    unit = write(tree / "etc/systemd/system" / boot_unit.NAME, boot_unit.render())
    write(unit.parent / "multi-user.target.wants" / unit.name)

    assert [level for level, _ in missing] == ["warning"]
    assert bad(boot.boot_unit(settings, Units(tree), boot_unit.NAME)) == []


@pytest.mark.parametrize(
    ("file", "said", "after"),
    [
        ("etc/systemd/system/one.service", "[Unit]\nAfter=two.service three.service\n", True),
        ("usr/lib/systemd/system/two.service", "[Unit]\n# Before=zero.service\nBefore = one.service\n", True),
        ("usr/lib/systemd/system/one.service", "[Unit]\nAfter=three.service \\\n  two.service\n", True),
        ("usr/lib/systemd/system/one.service", "[Unit]\nAfter=two.service\nAfter=\n", False),
        ("etc/systemd/system/one.service.d/10-site.conf", "[Unit]\nAfter=two.service\n", True),
        ("run/systemd/system/one.service", "[Unit]\n#After=two.service\nDescription=After=two.service\n", False),
    ],
)
def test_the_order_of_units_is_what_their_files_say_together(tree: Path, file: str, said: str, after: bool) -> None:
    write(tree / file, said)

    assert Units(tree).comes_after("one.service", "two.service") == after


def test_what_an_admin_wrote_for_a_unit_goes_before_what_its_package_has(tree: Path) -> None:
    write(tree / "usr/lib/systemd/system/one.service", "[Unit]\nAfter=two.service\n")
    write(tree / "etc/systemd/system/one.service", "[Unit]\n")

    assert not Units(tree).comes_after("one.service", "two.service")


def test_a_folder_that_holds_no_node_is_a_problem_not_an_accident(tmp_path: Path) -> None:
    ran = here("--node", str(tmp_path / "nowhere"), "doctor", "--json")

    assert ran.code == 4
    assert "holds no simulated node" in next(f["text"] for f in ran.plain["findings"] if f["level"] == "problem")


def test_a_driver_that_hangs_is_answered_and_named(node: simulator.Node, settings: Settings) -> None:
    config_text.write(replace(settings, hardware_timeout_s=0.2))
    node.plant("nvmlDeviceGetMigMode", "hangs", gpu=0, times=0)

    first = run(node, "doctor", "--json")
    node.mend()

    assert first.code == 4
    (problem,) = [f for f in first.plain["findings"] if f["check"] == "look"]
    assert "did not return within 0.2 s" in problem["text"]


def test_a_machine_without_driver_and_configuration_is_checked(tmp_path: Path) -> None:
    state = tmp_path / "state"
    config = write(tmp_path / "config.toml", f'gpus = []\nstate_dir = "{state}"\n')

    ran = here("--config", str(config), "doctor", "--json")

    checked = {each["check"] for each in ran.plain["findings"]}
    assert {"version", "configuration", "clock", "binding", "driver", "other managers"} <= checked
    assert not state.exists()


def test_every_field_of_the_json_is_documented(node: simulator.Node, settings: Settings) -> None:
    documented = (ROOT / "docs/json.md").read_text(encoding="utf-8")

    plain = run(node, "doctor", "--json").plain

    fields = {*plain, *(f"findings[].{name}" for name in plain["findings"][0])} - {"schema"}
    assert not {name for name in fields if f"`{name}`" not in documented}

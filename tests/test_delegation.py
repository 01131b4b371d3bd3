"""`gres-mig setup --delegate`: one user makes instances without root, and nobody else."""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import command_line
import pytest
from notebook_server import OTHER_USER, USER, Host, require_user

from gres_mig import answers, delegation
from gres_mig.doctor.service import service as doctor_service
from gres_mig.errors import BadRequest, ConfigError, NodeFault
from gres_mig.models import Settings
from gres_mig.simulator.program import command, environment

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives something to another user")

LEAVE = "proc/driver/nvidia/capabilities/mig/config"


@pytest.fixture
def root(memory: Path) -> Path:
    """The parts of a machine's /proc and /dev that count here, as a driver of release 580 shows them."""
    memory.chmod(0o755)
    (memory / LEAVE).parent.mkdir(parents=True)
    (memory / LEAVE).write_text("DeviceFileMinor: 1\nDeviceFileMode: 256\nDeviceFileModify: 1\n")
    (memory / "proc/devices").write_text("Character devices:\n195 nvidia\n238 nvidia-caps\n\nBlock devices:\n  8 sd\n")
    return memory


@pytest.fixture
def settings(memory: Path) -> Settings:
    """A real node's settings, with its folders here."""
    (memory / "config.toml").write_text(f'[node.n1]\nstate_dir = "{memory}/state"\nrun_dir = "{memory}/run"\n')
    return Settings(f"{memory}/state", f"{memory}/run", f"{memory}/config.toml")


@pytest.fixture
def host() -> Iterator[Host]:
    """A simulated node of root's."""
    with Host() as host:
        yield host


def owner(path: Path) -> str:
    """Whose it is."""
    return pwd.getpwuid(path.stat().st_uid).pw_name


def delegate(settings: Settings, name: str, root: Path) -> None:
    """Do it."""
    delegation.carry_out(delegation.plan(settings, delegation.user(name), str(root)))


def test_the_user_gets_the_records_and_the_drivers_leave(settings: Settings, root: Path) -> None:
    delegate(settings, USER, root)

    node = root / "dev/nvidia-caps/nvidia-cap1"
    assert (owner(root / "state"), owner(root / "run"), owner(node)) == (USER, USER, USER)
    assert stat.S_IMODE((root / "state").stat().st_mode) == 0o700
    assert stat.S_ISCHR(node.stat().st_mode)
    assert (os.major(node.stat().st_rdev), os.minor(node.stat().st_rdev)) == (238, 1)
    assert stat.S_IMODE(node.stat().st_mode) == 0o400


def test_the_drivers_tools_are_told_to_leave_the_node_alone(settings: Settings, root: Path) -> None:
    """Else nvidia-modprobe, which any user may run, would make it root's again."""
    delegate(settings, USER, root)

    assert (root / LEAVE).read_text() == "DeviceFileModify: 0\n"


def test_what_is_so_already_is_not_done_again(settings: Settings, root: Path) -> None:
    before = [step.needed for step in delegation.plan(settings, delegation.user(USER), str(root))]
    delegate(settings, USER, root)
    # As the driver shows it after that was written.
    (root / LEAVE).write_text("DeviceFileMinor: 1\nDeviceFileMode: 256\nDeviceFileModify: 0\n")

    after = [step.needed for step in delegation.plan(settings, delegation.user(USER), str(root))]

    assert before == [True] * 4
    assert after == [False] * 4


def test_it_is_undone_with_root(settings: Settings, root: Path) -> None:
    delegate(settings, USER, root)
    (root / "state/state.json").write_text("{}")
    os.chown(root / "state/state.json", pwd.getpwnam(USER).pw_uid, -1)
    (root / LEAVE).write_text("DeviceFileMinor: 1\nDeviceFileMode: 256\nDeviceFileModify: 0\n")

    delegate(settings, "root", root)

    paths = [root / "state", root / "state/state.json", root / "run", root / "dev/nvidia-caps/nvidia-cap1"]
    assert {owner(path) for path in paths} == {"root"}
    assert (root / LEAVE).read_text() == "DeviceFileModify: 1\n"


def test_what_the_user_left_in_place_of_a_file_is_not_followed_and_no_cache_of_his_is_trusted(
    settings: Settings, root: Path
) -> None:
    delegate(settings, USER, root)
    uid = pwd.getpwnam(USER).pw_uid
    (root / "target").write_text("another's")
    os.chown(root / "target", uid, -1)
    (root / "run/node.lock").symlink_to(root / "target")
    os.link(root / "target", root / "run/gpu.lock")
    (root / "run/config.json").write_text("{}")
    os.chown(root / "run/config.json", uid, -1)
    (root / LEAVE).write_text("DeviceFileMinor: 1\nDeviceFileMode: 256\nDeviceFileModify: 0\n")

    delegate(settings, "root", root)

    assert owner(root / "target") == USER
    assert not (root / "run/config.json").exists()


def test_who_has_the_records_may_allocate_and_others_may_not(settings: Settings, root: Path) -> None:
    require_user(USER)
    delegate(settings, USER, root)
    code = (
        "import sys\n"
        "from gres_mig import answers\n"
        "from gres_mig.errors import NotPermitted\n"
        "from gres_mig.models import Settings\n"
        "settings = Settings(sys.argv[1], sys.argv[2], sys.argv[3])\n"
        "for more in ({}, {'or_delegate': True}):\n"
        "    try:\n"
        "        answers.for_root(settings, 'allocate', **more); print('may')\n"
        "    except NotPermitted: print('may not')\n"
    )
    said = {}
    for name in (USER, OTHER_USER):
        words = ["setpriv", f"--reuid={name}", "--clear-groups", sys.executable, "-c", code]
        folders = [settings.state_dir, settings.run_dir, settings.config_path]
        done = subprocess.run([*words, *folders], capture_output=True, text=True, check=True)
        said[name] = done.stdout.split("\n")[:2]

    assert said == {USER: ["may not", "may"], OTHER_USER: ["may not", "may not"]}


def test_only_roots_configuration_says_whose_the_records_are(settings: Settings, root: Path) -> None:
    delegate(settings, USER, root)
    before = answers.delegated(settings)
    os.chown(settings.config_path, pwd.getpwnam(OTHER_USER).pw_uid, -1)

    assert before == pwd.getpwnam(USER).pw_uid
    assert answers.delegated(settings) == 0


def test_a_folder_that_others_can_write_gives_nobody_anything(settings: Settings, root: Path) -> None:
    delegate(settings, USER, root)
    (root / "state").chmod(0o770)

    assert answers.delegated(settings) == 0


def test_after_a_boot_it_is_given_again(settings: Settings, root: Path) -> None:
    delegate(settings, USER, root)
    (root / "run").rmdir()
    (root / "dev/nvidia-caps/nvidia-cap1").unlink()
    (root / LEAVE).write_text("DeviceFileMinor: 1\nDeviceFileMode: 256\nDeviceFileModify: 1\n")

    delegation.carry_out(delegation.renew(settings, str(root)))

    assert owner(root / "run") == owner(root / "dev/nvidia-caps/nvidia-cap1") == USER


def test_the_boot_unit_does_that_and_tells_what_went_wrong_with_it(settings: Settings, root: Path) -> None:
    if Path("/", LEAVE).exists():
        pytest.skip("this machine has a driver, which is not a test's to change")
    delegate(settings, USER, root)

    answer = command_line.run("--config", settings.config_path, "--name", "n1", "boot", "--json")

    assert answer.code == 4
    assert "the driver shows no permission to give" in answer.plain["errors"][0]["message"]


def test_where_nothing_is_delegated_a_boot_gives_nothing(settings: Settings, root: Path) -> None:
    delegate(settings, "root", root)

    assert delegation.renew(settings, str(root)) == []


def test_a_user_that_is_no_more_is_told(settings: Settings, root: Path) -> None:
    (root / "state").mkdir(mode=0o700)
    os.chown(root / "state", 61234, -1)

    with pytest.raises(
        ConfigError, match="belongs to uid 61234, which is no user; run: gres-mig setup --delegate root"
    ):
        delegation.renew(settings, str(root))


@pytest.mark.parametrize("name", ["no-such-user", "61234", "", "-1", "99999999999"])
def test_what_is_no_user_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="there is no user"):
        delegation.user(name)


def test_without_a_driver_it_says_what_is_missing(settings: Settings, root: Path) -> None:
    (root / LEAVE).unlink()

    with pytest.raises(NodeFault, match="the driver shows no permission to give"):
        delegation.plan(settings, delegation.user(USER), str(root))


def test_what_is_no_device_of_the_drivers_is_left_alone(settings: Settings, root: Path) -> None:
    (root / "dev/nvidia-caps").mkdir(parents=True)
    (root / "dev/nvidia-caps/nvidia-cap1").write_text("")

    with pytest.raises(NodeFault, match="is not the device it should be"):
        delegation.plan(settings, delegation.user(USER), str(root))


def test_beside_a_running_service_it_is_refused(host: Host) -> None:
    host.serve()

    with pytest.raises(BadRequest, match="the node service runs"):
        delegation.plan(host.settings, delegation.user(USER))


def test_what_was_roots_in_his_folders_becomes_his_by_delegating_again(settings: Settings, root: Path) -> None:
    delegate(settings, USER, root)
    Path(settings.state_dir, "state.json").touch()
    # The driver shows it whole again.
    (root / LEAVE).write_text("DeviceFileMinor: 1\nDeviceFileMode: 256\nDeviceFileModify: 0\n")
    again = delegation.plan(settings, delegation.user(USER), str(root))
    delegation.carry_out(again)

    assert [step.needed for step in again if step.path == settings.state_dir] == [True]
    assert owner(Path(settings.state_dir, "state.json")) == USER


def test_the_socket_of_a_service_that_has_ended_is_removed(settings: Settings, root: Path) -> None:
    """Or notebook servers would wait for it."""
    run_dir = Path(settings.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "service.sock").touch()
    (found,) = doctor_service(settings, root / "etc")
    delegate(settings, USER, root)

    assert found.text.startswith(f"nobody answers at {run_dir}/service.sock: notebook servers wait for a service, ")
    assert not (run_dir / "service.sock").exists()
    assert list(doctor_service(settings, root / "etc")) == []


def test_where_slurms_jobs_get_instances_it_is_refused_and_can_be_undone(settings: Settings, root: Path) -> None:
    (root / "run/slurm").mkdir(parents=True)

    with pytest.raises(BadRequest, match="Slurm's jobs get instances here"):
        delegate(settings, USER, root)

    delegate(settings, "root", root)


def test_on_a_simulated_node_the_user_becomes_its_maker_and_root_takes_it_back(host: Host) -> None:
    require_user(USER)

    def run(*words: str, user: str = "root") -> subprocess.CompletedProcess[str]:
        line = ["setpriv", f"--reuid={user}", "--clear-groups", *command("--node", str(host.folder), *words)]
        return subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)

    asks = ["allocate", "--owner", "manual:a", "--memory", "8000"]
    before = run(*asks, user=USER)
    shown = run("setup", "--delegate", USER)
    untouched = owner(host.folder)
    run("setup", "--delegate", USER, "--write")
    given = run(*asks, user=USER)
    run("status")
    run("reclaim", "manual:a")
    after = run(*asks, user=USER)
    other = run(*asks, user=OTHER_USER)
    back = run("setup", "--delegate", "root", "--write")

    assert (before.returncode, given.returncode, other.returncode, back.returncode) == (2, 0, 2, 0)
    assert after.returncode == 0, after.stderr
    assert f"{USER} may do on this simulated node all that its maker may" in shown.stdout
    assert f"next: gres-mig --node {host.folder} setup --delegate {USER} --write" in shown.stdout
    assert untouched == "root"
    assert {owner(path) for path in host.folder.rglob("*")} == {"root"}
    assert host.instances()


def test_a_link_in_place_of_a_folder_of_his_gives_nobody_what_is_behind_it(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has the tree of a simulated node exchanges it while root gives it to another."""
    his, other = pwd.getpwnam(USER), pwd.getpwnam(OTHER_USER)
    (memory / "config.toml").write_text("")
    node = Settings(f"{memory}/node/state", f"{memory}/node/run", "", simulator=f"{memory}/node")
    for path in (memory / "node/inner/shadow", memory / "behind/shadow"):
        path.parent.mkdir(parents=True)
        path.write_text("")
    for path in (memory / "node", memory / "node/inner", memory / "node/inner/shadow"):
        os.chown(path, his.pw_uid, -1)
    opening = os.open

    def exchanged(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if os.path.basename(path) == "shadow":
            monkeypatch.undo()
            (memory / "node/inner").rename(memory / "node/aside")
            (memory / "node/inner").symlink_to(memory / "behind")
        return opening(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", exchanged)

    delegation.carry_out(delegation.plan(node, other, str(memory)))

    assert owner(memory / "behind/shadow") == "root"
    assert owner(memory / "node/aside/shadow") == OTHER_USER


def test_to_write_it_takes_root(settings: Settings, root: Path) -> None:
    assert root.stat().st_mode & 0o005
    code = (
        "import os, sys\n"
        "from gres_mig.__main__ import main\n"
        f"os.setuid({pwd.getpwnam(OTHER_USER).pw_uid})\n"
        "main(['--config', sys.argv[1], '--name', 'n1', 'setup', '--delegate', 'root', '--write'])\n"
    )
    words = [sys.executable, "-c", code, settings.config_path]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert done.stderr.startswith("gres-mig: setup --delegate --write needs root; ")

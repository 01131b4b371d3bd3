"""A GPU's MIG mode, its fence, and what the boot unit runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import Answer, here, start, until

from gres_mig import config
from gres_mig.simulator.admin import Node
from gres_mig.state import Store

BOARDS = ("--board", "h100-80", "--count", "2", "--board", "a100-40", "--board", "l40", "--board", "h100-80")
H100, OTHER, A100, L40, UNMANAGED = range(5)


class Cluster:
    """A node with an unmanaged GPU and one of each kind; its call log holds what changes a GPU."""

    def __init__(self, folder: Path, mig: str) -> None:
        self.folder = folder
        assert here("simulate", "create", folder, *BOARDS, "--managed", "0,1,2,3", "--mig", mig).code == 0
        self.node = Node(folder)
        self.node.configure(log="mutating")

    def do(self, *words: object) -> Answer:
        return here("--node", self.folder, *words)

    def turn(self, mode: str, which: int) -> Answer:
        """`enable-mig` or `disable-mig` of that GPU."""
        return self.do({"on": "enable-mig", "off": "disable-mig"}[mode], self.node.uuids[which], "--json")

    def mode(self, which: int) -> tuple[int, int]:
        """Current and pending."""
        gpu = self.node.hardware()["gpus"][which]
        return gpu["mig"], gpu["pending"]

    def asked(self) -> list[str]:
        """The GPUs of which a change of mode was asked."""
        return [call["gpu"] for call in self.node.calls() if call["function"] == "nvmlDeviceSetMigMode"]

    def set(self, key: str, value: str) -> None:
        """A line of config.toml."""
        file = self.folder / "config.toml"
        text, count = re.subn(rf"^(# )?{key} = .*$", f"{key} = {value}", file.read_text(), flags=re.MULTILINE)
        assert count == 1
        file.write_text(text)


@pytest.fixture
def cluster(memory: Path) -> Cluster:
    """MIG is off everywhere, as after a boot."""
    return Cluster(memory / "node", "off")


@pytest.fixture
def serving(memory: Path) -> Cluster:
    """MIG is on everywhere."""
    return Cluster(memory / "node", "on")


@pytest.fixture
def idle() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@contextmanager
def opening(cluster: Cluster, which: int, program: Path = Path("/bin/cat")) -> Iterator[int]:
    """A process that has that GPU's device file open, as a monitoring agent has."""
    device = cluster.folder / "dev" / f"nvidia{which}"
    device.parent.mkdir(exist_ok=True)
    device.touch()
    fd = os.open(device, os.O_RDONLY)
    with subprocess.Popen([program], stdin=subprocess.PIPE, pass_fds=[fd]) as process:
        os.close(fd)
        yield process.pid
        process.kill()


def test_mig_is_turned_on_and_read_back(cluster: Cluster) -> None:
    answer = cluster.turn("on", H100)

    assert answer.code == 0
    assert answer.plain["mig"] is True
    assert answer.plain["changed"] is True
    assert cluster.mode(H100) == (1, 1)
    assert cluster.asked() == [cluster.node.uuids[H100]]
    assert cluster.do("allocate", "--owner", "manual:a", "--memory", "8000").code == 0


def test_a_mode_that_is_in_force_already_is_not_asked_for_again(serving: Cluster) -> None:
    answer = serving.turn("on", H100)

    assert answer.code == 0
    assert answer.plain["changed"] is False
    assert serving.asked() == []


def test_a_gpu_may_be_named_by_pci_address(cluster: Cluster) -> None:
    address = cluster.node.hardware()["gpus"][H100]["pci"]

    for name in (address.lower(), address[4:], address[9:]):
        assert cluster.do("enable-mig", name).code == 0
    assert cluster.mode(H100) == (1, 1)


def test_who_may_only_look_sees_the_mode_too(cluster: Cluster) -> None:
    cluster.turn("on", H100)

    public = Store(config.load(node=cluster.folder), "").public()

    assert [gpu["mig_current"] for gpu in public["gpus"] if gpu["uuid"] == cluster.node.uuids[H100]] == [True]


@pytest.mark.parametrize("name", ["0", "GPU-0", "", "../../x", "MIG-1"])
def test_a_gpu_that_is_not_named_by_uuid_or_address_is_refused(cluster: Cluster, name: str) -> None:
    answer = cluster.do("enable-mig", name)

    assert answer.code == 2
    assert "is no GPU of this node" in answer.err
    assert cluster.asked() == []


def test_a_gpu_that_is_not_managed_is_left_alone(cluster: Cluster) -> None:
    answer = cluster.turn("on", UNMANAGED)

    assert answer.code == 2
    assert answer.plain["error"]["code"] == "NOPERM"
    assert cluster.node.calls() == []


def test_a_board_without_mig_is_refused(cluster: Cluster) -> None:
    answer = cluster.turn("on", L40)

    assert answer.code == 2
    assert "no MIG" in answer.err
    assert cluster.asked() == []


def test_an_ampere_board_waits_for_its_reset_and_says_so(cluster: Cluster) -> None:
    pending = cluster.turn("on", A100)
    mode = cluster.mode(A100)
    here("simulate", "reset", cluster.folder, A100)

    assert pending.code == 3
    assert pending.plain["error"]["code"] == "BUSY"
    assert "pending until the GPU is reset" in pending.err
    assert "nvidia-smi --gpu-reset -i 00000000:" in pending.err
    assert mode == (0, 1)
    assert cluster.turn("on", A100).plain["changed"] is False


def test_a_pending_change_is_taken_back_by_asking_for_what_is_in_force(serving: Cluster) -> None:
    off = serving.turn("off", A100)
    mode = serving.mode(A100)
    on = serving.turn("on", A100)

    assert (off.code, mode) == (3, (1, 0))
    assert on.code == 0
    assert serving.mode(A100) == (1, 1)


def test_a_gpu_with_a_process_on_it_is_not_asked_to_change(cluster: Cluster, idle: subprocess.Popen[bytes]) -> None:
    cluster.node.hold(H100, pid=idle.pid)

    answer = cluster.turn("on", H100)

    assert answer.code == 3
    assert f"pid {idle.pid} sleep" in answer.err
    assert answer.plain["error"]["blockers"][0].startswith(f"pid {idle.pid} sleep")
    assert cluster.asked() == []
    assert cluster.mode(H100) == (0, 0)


def test_who_only_has_the_device_open_is_named_too(cluster: Cluster) -> None:
    with opening(cluster, H100) as pid:
        answer = cluster.turn("on", H100)

    assert answer.code == 3
    assert f"pid {pid} cat" in answer.err
    assert cluster.asked() == []


def test_persistenced_has_every_device_open_and_steps_aside(cluster: Cluster, tmp_path: Path) -> None:
    daemon = tmp_path / "nvidia-persistenced"
    daemon.symlink_to("/bin/cat")

    with opening(cluster, H100, daemon):
        answer = cluster.turn("on", H100)

    assert answer.code == 0
    assert cluster.mode(H100) == (1, 1)


def test_a_client_that_only_the_driver_knows_leaves_the_gpu_as_it_was(
    serving: Cluster, idle: subprocess.Popen[bytes]
) -> None:
    serving.node.hold(H100, pid=idle.pid, listed=False)
    (serving.folder / "sys" / "module" / "nvidia_drm").mkdir(parents=True)

    answer = serving.turn("off", H100)

    assert answer.code == 3
    assert "the driver answered 19, yet it is not in force" in answer.err
    assert answer.plain["error"]["blockers"] == ["kernel module nvidia_drm"]
    assert serving.mode(H100) == (1, 1)


def test_a_driver_that_says_done_and_is_not_is_not_believed(cluster: Cluster) -> None:
    cluster.node.plant("nvmlDeviceSetMigMode", "lies")

    answer = cluster.turn("on", H100)

    assert answer.code == 3
    assert "the driver said it was done, yet it is not in force" in answer.err
    assert cluster.mode(H100) == (0, 0)


def test_mig_is_not_turned_off_under_an_allocation(serving: Cluster) -> None:
    uuid = serving.node.uuids[H100]
    got = serving.do("allocate", "--owner", "manual:a", "--memory", "8000", "--gpu", uuid, "--json").plain

    answer = serving.turn("off", H100)

    assert answer.code == 3
    assert answer.plain["error"]["blockers"] == [f"manual:a (1g.10gb at {got['placement']['start']}:1)"]
    assert serving.asked() == []


def test_mig_is_not_turned_off_under_a_foreign_instance(serving: Cluster) -> None:
    made = serving.node.make(H100, "3g.40gb", 4)

    answer = serving.turn("off", H100)

    assert answer.code == 3
    assert f"foreign instance {serving.node.uuids[H100]}:{made.id} at 4:4" in answer.err
    assert serving.asked() == []


def test_mig_is_turned_off_on_an_empty_gpu_and_on_no_other(serving: Cluster) -> None:
    serving.node.make(OTHER, "1g.10gb")

    answer = serving.turn("off", H100)

    assert answer.code == 0
    assert [serving.mode(which) for which in (H100, OTHER)] == [(0, 0), (1, 1)]
    assert len(serving.node.instances(OTHER)) == 1


def test_a_change_waits_for_who_works_on_the_gpu(cluster: Cluster) -> None:
    cluster.set("lock_wait", "0")
    fault = cluster.node.plant("nvmlDeviceSetMigMode", "stops", count="node")
    with start("--node", cluster.folder, "enable-mig", cluster.node.uuids[H100]) as first:
        until(lambda: cluster.node.fired(fault))
        second = cluster.turn("on", H100)
        os.kill(cluster.node.fired(fault)[0], signal.SIGCONT)
        first.communicate()

    assert second.code == 3
    assert first.returncode == 0
    assert cluster.mode(H100) == (1, 1)


def test_no_other_command_ever_changes_the_mode(serving: Cluster) -> None:
    made = serving.node.make(OTHER, "1g.10gb")
    where = f"{serving.node.uuids[OTHER]}:{made.id}"
    codes = [
        serving.do(*words).code
        for words in (
            ["allocate", "--owner", "manual:a", "--memory", "8000"],
            ["adopt", "manual:b", where],
            ["reclaim", "manual:a"],
            ["reclaim", "manual:b"],
            ["reclaim", "--orphans"],
            ["reconcile"],
            ["setup", "--write"],
            ["boot"],
            ["status"],
        )
    ]

    assert codes == [0] * len(codes)
    assert serving.asked() == []


@contextmanager
def fenced(serving: Cluster) -> Iterator[int]:
    """GPU 0 is fenced: a create hangs in the driver; the number of the fault that ends it."""
    serving.set("hardware_timeout", "0.3")
    uuid = serving.node.uuids[H100]
    fault = serving.node.plant("nvmlDeviceCreateGpuInstanceWithPlacement", "hangs", count="node")
    asked = serving.do("allocate", "--owner", "manual:a", "--memory", "8000", "--gpu", uuid, "--json")
    assert asked.plain["error"]["code"] == "TIMEOUT"
    try:
        yield fault
    finally:
        serving.node.mend()


def test_a_gpu_stays_fenced_while_a_process_is_inside_a_driver_call(serving: Cluster) -> None:
    uuid = serving.node.uuids[H100]

    with fenced(serving) as fault:
        inside = serving.do("unfence", uuid)
        serving.node.release(fault)
        until(lambda: serving.do("unfence", uuid).code == 0)

    assert inside.code == 3
    assert "a process is still working on it" in inside.err
    assert re.search(r"pid \d+", inside.err)
    assert serving.do("allocate", "--owner", "manual:b", "--memory", "8000", "--gpu", uuid).code == 0


def test_a_fenced_gpu_does_not_change_its_mode(serving: Cluster) -> None:
    with fenced(serving) as fault:
        serving.node.release(fault)
        until(lambda: serving.turn("off", H100).plain["error"]["code"] != "BUSY")

        answer = serving.turn("off", H100)

    assert answer.code == 4
    assert "run: gres-mig unfence" in answer.err
    assert serving.mode(H100) == (1, 1)


def test_a_gpu_that_is_not_fenced_is_said_not_to_be(serving: Cluster) -> None:
    answer = serving.do("unfence", serving.node.uuids[H100], "--json")

    assert answer.code == 0
    assert answer.plain["unfenced"] is False


def test_boot_leaves_the_mode_alone_unless_it_is_told_to(cluster: Cluster) -> None:
    answer = cluster.do("boot")

    assert answer.code == 0
    assert "MIG mode is off" in answer.out
    assert cluster.node.calls() == []


def test_boot_turns_mig_on_for_the_managed_gpus_where_it_is_told_to(serving: Cluster) -> None:
    serving.set("mig_at_boot", "true")
    here("simulate", "reboot", serving.folder)
    forgotten = [serving.mode(which) for which in (H100, OTHER, A100, UNMANAGED)]

    answer = serving.do("boot", "--json")

    # An H100 forgets its mode at a reboot, an A100 keeps it.
    assert forgotten == [(0, 0), (0, 0), (1, 1), (0, 0)]
    assert answer.code == 0
    assert [gpu["changed"] for gpu in answer.plain["gpus"]] == [True, True, False, False]
    assert [serving.mode(which)[0] for which in (H100, OTHER, A100, UNMANAGED)] == [1, 1, 1, 0]
    assert serving.asked() == [serving.node.uuids[H100], serving.node.uuids[OTHER]]


def test_boot_goes_round_a_gpu_that_is_in_use(cluster: Cluster, idle: subprocess.Popen[bytes]) -> None:
    cluster.set("mig_at_boot", "true")
    cluster.node.hold(H100, pid=idle.pid)

    answer = cluster.do("boot")

    assert answer.code == 3
    assert f"pid {idle.pid} sleep" in answer.err
    assert [cluster.mode(which) for which in (H100, OTHER)] == [(0, 0), (1, 1)]


def test_boot_closes_the_records_of_the_last_boot_and_destroys_nothing_for_them(serving: Cluster) -> None:
    serving.do("allocate", "--owner", "manual:a", "--memory", "8000")
    here("simulate", "reboot", serving.folder)
    serving.node.configure(log="off")
    (serving.folder / "calls.jsonl").unlink()
    serving.node.configure(log="mutating")

    answer = serving.do("boot")

    assert answer.code == 0
    assert serving.node.calls() == []
    assert serving.do("reclaim", "manual:a").out == "manual:a holds nothing\n"


def test_boot_settles_what_a_crash_in_this_boot_left(serving: Cluster) -> None:
    fault = serving.node.plant("nvmlGpuInstanceCreateComputeInstance", "kills", after=True, count="node")
    serving.do("allocate", "--owner", "manual:a", "--memory", "8000")
    left = len(serving.node.instances())

    answer = serving.do("boot", "--json")

    assert serving.node.fired(fault)
    assert left == 1
    assert answer.plain["settled"] == 1
    assert serving.node.instances() == []


def test_a_gpu_that_hangs_at_boot_keeps_no_other_waiting(cluster: Cluster) -> None:
    cluster.set("mig_at_boot", "true")
    cluster.set("hardware_timeout", "0.3")
    cluster.node.plant("nvmlDeviceSetMigMode", "hangs", gpu=H100)
    began = time.monotonic()

    answer = cluster.do("boot", "--json")
    took = time.monotonic() - began
    cluster.node.mend()

    assert answer.code == 4
    assert answer.plain["errors"][0]["code"] == "TIMEOUT"
    assert cluster.mode(OTHER) == (1, 1)
    assert took < 10


def test_a_gpu_that_does_not_even_answer_a_look_is_fenced_at_boot_and_gone_round(cluster: Cluster) -> None:
    cluster.set("mig_at_boot", "true")
    cluster.set("hardware_timeout", "0.3")
    cluster.node.plant("nvmlDeviceGetMigMode", "hangs", gpu=H100, times=0)

    answer = cluster.do("boot", "--json")
    cluster.node.mend()

    assert answer.code == 4
    assert "fenced: a driver call did not return within 0.3 s" in answer.plain["gpus"][0]["trouble"]
    assert cluster.mode(OTHER) == (1, 1)


def test_boot_on_a_node_that_manages_nothing_has_nothing_to_do(memory: Path) -> None:
    here("simulate", "create", memory / "node", "--board", "a30", "--managed", "none")

    answer = here("--node", memory / "node", "boot")

    assert answer.code == 0
    assert "no GPU of this node is managed" in answer.out

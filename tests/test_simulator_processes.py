"""The simulated hardware outlives processes and is one for all of them."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
from simulated import code, create, instances, mig_uuids, process

from gres_mig import simulator


@pytest.fixture
def node(tmp_path: Path) -> Iterator[simulator.Node]:
    simulator.create(tmp_path, [("rtx-pro-6000", 8)])
    simulator.install(tmp_path)
    pynvml.nvmlInit()
    yield simulator.Node(tmp_path)
    simulator.uninstall()


@pytest.fixture
def gpu(node: simulator.Node) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(0)


def run(node: simulator.Node, script: str) -> str:
    with process(node.store.folder, script) as other:
        return other.communicate()[0]


def test_what_one_process_makes_another_sees_and_may_destroy(node: simulator.Node, gpu: Any) -> None:
    gi = create(gpu, 14, 3)

    said = run(node, "gi = simulated.instances(gpu, 14)[0]\npynvml.nvmlGpuInstanceDestroy(gi)\nprint('gone')")

    assert said == "gone\n"
    assert instances(gpu, 14) == []
    assert code(lambda: pynvml.nvmlGpuInstanceGetInfo(gi)) == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_an_instance_made_again_by_another_process_is_not_the_one_a_handle_means(
    node: simulator.Node, gpu: Any
) -> None:
    gi = create(gpu, 14, 3)

    run(node, "pynvml.nvmlGpuInstanceDestroy(simulated.instances(gpu, 14)[0]); simulated.create(gpu, 14, 3)")

    assert code(lambda: pynvml.nvmlGpuInstanceDestroy(gi)) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert len(node.instances()) == 1


def test_an_old_session_may_list_devices_that_are_gone(node: simulator.Node, gpu: Any) -> None:
    made = node.make(0, 14, 3)
    node.configure(stale_sessions=True)
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    node.destroy(0, made.id)

    stale = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
    refused = code(lambda: pynvml.nvmlDeviceGetUUID(stale))
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()

    assert refused == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert mig_uuids(gpu) == []


def test_a_forked_child_has_no_session_until_it_begins_one(node: simulator.Node) -> None:
    pid = os.fork()
    if pid == 0:
        before = code(pynvml.nvmlDeviceGetCount)
        pynvml.nvmlInit()
        os._exit(100 * (before == pynvml.NVML_ERROR_UNINITIALIZED) + pynvml.nvmlDeviceGetCount())
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 108
    assert pynvml.nvmlDeviceGetCount() == 8


def test_a_session_is_an_open_file_and_its_end_closes_it(node: simulator.Node) -> None:
    def open_files() -> list[str]:
        links = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
        return [link for link in links if link.startswith(os.path.realpath(node.store.folder))]

    during = open_files()
    pynvml.nvmlShutdown()

    assert during == [os.path.realpath(os.path.join(node.store.folder, "nvidiactl"))]
    assert open_files() == []


def test_installing_twice_keeps_the_session(node: simulator.Node) -> None:
    simulator.install(node.store.folder)

    assert pynvml.nvmlDeviceGetCount() == 8


def test_installing_another_node_takes_its_place(node: simulator.Node, tmp_path: Path) -> None:
    simulator.create(tmp_path / "other", [("h200", 1)])
    simulator.install(tmp_path / "other")

    assert code(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 1


def test_after_uninstall_the_real_library_is_asked_for(node: simulator.Node) -> None:
    simulator.uninstall()

    assert pynvml.nvmlLib is None
    assert code(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED


def test_a_session_from_before_a_reboot_is_none(node: simulator.Node) -> None:
    node.reboot()

    assert code(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 8


def test_a_holder_dies_with_its_process(node: simulator.Node) -> None:
    made = node.make(0, 14, 0)
    with process(node.store.folder, "sys.stdin.read()") as user:
        node.hold(0, made.id, 0, pid=user.pid)
        held = node.instances(0)[0].holders
        user.communicate()
    after = node.instances(0)[0].holders

    assert held == (user.pid,)
    assert after == ()
    assert node.destroy(0, made.id) is None


def test_a_zombie_holds_nothing(node: simulator.Node) -> None:
    made = node.make(0, 14, 0)
    with process(node.store.folder, "sys.stdin.read()") as user:
        node.hold(0, made.id, 0, pid=user.pid)
        user.kill()
        os.waitid(os.P_PID, user.pid, os.WEXITED | os.WNOWAIT)

        assert node.instances(0)[0].holders == ()
        assert Path(f"/proc/{user.pid}").exists()


def test_another_process_of_the_same_pid_is_not_the_holder(node: simulator.Node) -> None:
    made = node.make(0, 14, 0)
    node.hold(0, made.id, 0)
    with node.store.change() as hardware:
        hardware["gpus"][0]["instances"][0]["compute"][0]["holders"][0]["start"] -= 1

    assert node.instances(0)[0].holders == ()


def test_a_process_killed_while_it_creates_leaves_nothing_and_blocks_nobody(node: simulator.Node, gpu: Any) -> None:
    node.configure(create_s=60)
    with process(node.store.folder, "print('ready', flush=True); simulated.create(gpu, 14, 0)") as maker:
        assert maker.stdout is not None
        maker.stdout.readline()
        lock = os.stat(os.path.join(node.store.folder, "gpu0.lock")) if _locked(node, maker.pid) else None
        maker.kill()
        maker.communicate()
    node.configure(create_s=0)

    assert lock is not None
    assert node.instances() == []
    assert code(lambda: create(gpu, 14, 0)) == 0


def _locked(node: simulator.Node, pid: int) -> bool:
    """Wait until that process is inside the driver call."""
    lock = os.path.realpath(os.path.join(node.store.folder, "gpu0.lock"))
    while True:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(f"/proc/{pid}/fd/{fd}") == lock:
                    return True
        os.sched_yield()


def test_a_kill_at_any_moment_leaves_a_whole_file(node: simulator.Node) -> None:
    script = (
        "print('ready', flush=True)\nwhile True:\n    pynvml.nvmlGpuInstanceDestroy(simulated.create(gpu, 14, 0))\n"
    )
    for pause in (0.0, 0.003, 0.011):
        with process(node.store.folder, script) as victim:
            assert victim.stdout is not None
            victim.stdout.readline()
            time.sleep(pause)  # not to wait for anything: to kill it at another moment each time
            victim.kill()
            victim.communicate()

        hardware = node.hardware()
        assert len(hardware["gpus"]) == 8
        assert len(node.instances()) <= 1
        assert victim.returncode == -signal.SIGKILL
        for left in node.instances():
            node.destroy(0, left.id)


def test_eight_gpus_take_their_time_at_once(node: simulator.Node) -> None:
    node.configure(create_s=0.5)
    script = (
        "sys.stdin.readline()\n"
        "simulated.create(pynvml.nvmlDeviceGetHandleByIndex(int(sys.stdin.readline())), 0, 0, 12)\n"
    )
    makers = [process(node.store.folder, script) for _ in range(8)]
    begin = time.monotonic()
    for index, maker in enumerate(makers):
        assert maker.stdin is not None
        maker.stdin.write(f"go\n{index}\n")
        maker.stdin.flush()
    for maker in makers:
        maker.communicate()
    took = time.monotonic() - begin

    assert [maker.returncode for maker in makers] == [0] * 8
    assert [i.gpu for i in node.instances()] == list(range(8))
    assert took < 8 * 0.5


def test_one_gpu_makes_one_instance_at_a_time(node: simulator.Node) -> None:
    node.configure(create_s=0.2, log="mutating")
    makers = [process(node.store.folder, "simulated.create(gpu, 14)") for _ in range(4)]
    for maker in makers:
        maker.communicate()
    ends = sorted(call["at_ns"] for call in node.calls())

    assert [maker.returncode for maker in makers] == [0] * 4
    assert all(later - sooner >= 0.19e9 for sooner, later in itertools.pairwise(ends))


def test_many_processes_never_share_a_slice(node: simulator.Node) -> None:
    script = (
        "import random; random.seed(int(sys.stdin.readline()))\n"
        "gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(2)]\n"
        "mine = []\n"
        "for _ in range(120):\n"
        "    if mine and random.random() < 0.5:\n"
        "        pynvml.nvmlGpuInstanceDestroy(mine.pop(random.randrange(len(mine))))\n"
        "        continue\n"
        "    try:\n"
        "        mine.append(simulated.create(random.choice(gpus), *random.choice([(14,), (5,), (14, 3, 3)])))\n"
        "    except pynvml.NVMLError_InsufficientResources:\n"
        "        pass\n"
        "print(len(mine))\n"
    )
    makers = [process(node.store.folder, script) for _ in range(4)]
    for seed, maker in enumerate(makers):
        assert maker.stdin is not None
        maker.stdin.write(f"{seed}\n")
        maker.stdin.flush()
    kept = sum(int(maker.communicate()[0]) for maker in makers)
    slices = [(i.gpu, s) for i in node.instances() for s in range(i.start, i.start + i.size)]

    assert [maker.returncode for maker in makers] == [0] * 4
    assert len(node.instances()) == kept
    assert len(set(slices)) == len(slices)


def test_a_reader_never_takes_a_new_file_for_the_one_it_knows(node: simulator.Node) -> None:
    reader, writer = simulator.Node(node.store.folder), simulator.Node(node.store.folder)

    for _ in range(200):
        before = reader.store.read()["generation"]
        # Twice within a tick of the clock, so that inode, size and time of change may all be the old ones.
        for lost in ("all", ""):
            with writer.store.change() as hardware:
                hardware["gpus"][0]["lost"] = lost
        assert reader.store.read()["generation"] == before + 2

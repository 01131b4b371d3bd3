"""Planted faults do to a caller what a driver in trouble does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
from simulated import code, create, instances, process

from gres_mig import simulator
from gres_mig.errors import BadRequest

CREATE = "nvmlDeviceCreateGpuInstanceWithPlacement"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[simulator.Node]:
    simulator.create(tmp_path, [("rtx-pro-6000", 2)])
    simulator.install(tmp_path)
    pynvml.nvmlInit()
    yield simulator.Node(tmp_path)
    simulator.uninstall()


def handle(index: int = 0) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def test_a_call_returns_a_code_instead_of_doing_it(node: simulator.Node) -> None:
    node.plant(CREATE, "returns", code=19)

    assert code(lambda: create(handle(), 14, 0)) == 19
    assert node.instances() == []
    assert code(lambda: create(handle(), 14, 0)) == 0


def test_a_call_returns_a_code_after_doing_it(node: simulator.Node) -> None:
    node.plant(CREATE, "returns", code=999, after=True)

    assert code(lambda: create(handle(), 14, 0)) == 999
    assert [i.start for i in node.instances()] == [0]


def test_a_fault_hits_the_nth_call_and_as_many_as_it_lasts(node: simulator.Node) -> None:
    node.plant("nvmlDeviceGetMigMode", "returns", code=10, nth=2, times=2)

    answers = [code(lambda: pynvml.nvmlDeviceGetMigMode(handle())) for _ in range(5)]

    assert answers == [0, 10, 10, 0, 0]


def test_a_fault_can_last_for_ever_and_be_mended(node: simulator.Node) -> None:
    number = node.plant("nvmlDeviceGetMigMode", "returns", code=10, times=0)
    answers = [code(lambda: pynvml.nvmlDeviceGetMigMode(handle())) for _ in range(3)]
    fired = node.fired(number)
    node.mend()

    assert answers == [10, 10, 10]
    assert fired == [os.getpid()] * 3
    assert code(lambda: pynvml.nvmlDeviceGetMigMode(handle())) == 0


def test_a_fault_can_be_of_one_gpu(node: simulator.Node) -> None:
    node.plant("nvmlDeviceGetMigMode", "returns", code=10, gpu=1, times=0)

    answers = [code(lambda index=index: pynvml.nvmlDeviceGetMigMode(handle(index))) for index in (0, 1)]

    assert answers == [0, 10]


def test_a_star_counts_the_calls_of_all_functions(node: simulator.Node) -> None:
    gpu = handle()
    calls = [pynvml.nvmlDeviceGetMigMode, pynvml.nvmlDeviceGetUUID] * 2
    node.plant("*", "returns", code=10, nth=3)

    answers = [code(lambda call=call: call(gpu)) for call in calls]

    assert answers == [0, 0, 10, 0]


def test_the_suffix_of_a_symbol_may_be_left_out(node: simulator.Node) -> None:
    node.plant("nvmlDeviceGetCount", "returns", code=10)

    assert code(pynvml.nvmlDeviceGetCount) == 10


def test_init_can_fail(node: simulator.Node) -> None:
    node.plant("nvmlInitWithFlags", "returns", code=999)

    assert code(pynvml.nvmlInit) == 999


def test_a_lying_create_gives_out_a_handle_of_nothing(node: simulator.Node) -> None:
    node.plant(CREATE, "lies", gpu=1)

    gi = create(handle(1), 14, 0)

    assert node.instances() == []
    assert code(lambda: pynvml.nvmlGpuInstanceGetInfo(gi)) == 2


def test_a_lying_destroy_leaves_what_it_says_is_gone(node: simulator.Node) -> None:
    node.plant("nvmlGpuInstanceDestroy", "lies")
    gi = create(handle(), 14, 0)

    assert code(lambda: pynvml.nvmlGpuInstanceDestroy(gi)) == 0
    assert len(node.instances()) == 1


def test_a_lying_list_is_empty(node: simulator.Node) -> None:
    node.plant("nvmlDeviceGetGpuInstances", "lies")
    create(handle(), 14, 0)

    assert [len(instances(handle(), 14)) for _ in range(2)] == [0, 1]


def test_a_gpu_lost_in_the_middle_of_a_call_stays_lost(node: simulator.Node) -> None:
    gpu = handle()
    node.plant(CREATE, "returns", code=15, after=True, sticky=True)

    assert code(lambda: create(gpu, 14, 0)) == 15
    assert code(lambda: pynvml.nvmlDeviceGetMigMode(gpu)) == 15
    assert code(lambda: pynvml.nvmlDeviceGetMigMode(handle(1))) == 0
    node.reset(0)
    assert code(lambda: pynvml.nvmlDeviceGetMigMode(gpu)) == 0


def test_a_version_mismatch_that_appears_stays_for_all(node: simulator.Node) -> None:
    node.plant("nvmlDeviceGetMigMode", "returns", code=18, sticky=True)
    gpu = handle()

    assert code(lambda: pynvml.nvmlDeviceGetMigMode(gpu)) == 18
    assert code(pynvml.nvmlDeviceGetCount) == 18


@pytest.mark.parametrize(("after", "left"), [(False, 0), (True, 1)])
def test_a_process_is_killed_before_or_after_a_call(node: simulator.Node, after: bool, left: int) -> None:
    number = node.plant(CREATE, "kills", after=after)

    with process(node.store.folder, "simulated.create(gpu, 14, 0); print('alive')") as victim:
        said = victim.communicate()[0]

    assert (victim.returncode, said) == (-signal.SIGKILL, "")
    assert node.fired(number) == [victim.pid]
    assert len(node.instances()) == left


def test_the_nth_of_all_calls_of_a_process_can_kill_it(node: simulator.Node) -> None:
    # Its calls: init, the handle, then a create (two to learn the size of the place), so the fifth is the create.
    node.plant("*", "kills", nth=5, after=True)

    with process(node.store.folder, "simulated.create(gpu, 14, 0); print('alive')") as victim:
        victim.communicate()

    assert victim.returncode == -signal.SIGKILL
    assert len(node.instances()) == 1


def test_each_process_counts_for_itself_or_the_node_counts(node: simulator.Node) -> None:
    script = "print(simulated.code(lambda: pynvml.nvmlDeviceGetMigMode(gpu)))"
    node.plant("nvmlDeviceGetMigMode", "returns", code=10, nth=1)
    node.plant("nvmlDeviceGetMigMode", "returns", code=20, nth=4, count="node")

    said = []
    for _ in range(3):
        with process(node.store.folder, f"{script}\n{script}") as caller:
            said.append(caller.communicate()[0].split())

    assert said == [["10", "0"], ["10", "20"], ["10", "0"]]


def test_a_stopped_process_goes_on_when_it_is_continued(node: simulator.Node) -> None:
    node.plant(CREATE, "stops", after=True)
    with process(node.store.folder, "print(simulated.code(lambda: simulated.create(gpu, 14, 0)))") as caller:
        _, status = os.waitpid(caller.pid, os.WUNTRACED)
        made = len(node.instances())
        os.kill(caller.pid, signal.SIGCONT)
        said = caller.communicate()[0]

    assert os.WIFSTOPPED(status)
    assert made == 1
    assert said == "0\n"


def test_a_hanging_call_ends_only_when_released(node: simulator.Node) -> None:
    number = node.plant(CREATE, "hangs")
    script = (
        "import signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('term', flush=True))\n"
        "print('ready', flush=True)\n"
        "print(simulated.code(lambda: simulated.create(gpu, 14, 0)))"
    )
    with process(node.store.folder, script) as caller:
        assert caller.stdout is not None
        caller.stdout.readline()
        while not node.fired(number):
            os.sched_yield()
        # A driver call comes back to no signal handler before it is done.
        caller.send_signal(signal.SIGTERM)
        made = len(node.instances())
        node.release(number)
        said = caller.communicate()[0]

    assert made == 0
    assert said == "term\n0\n"


def test_a_hanging_process_can_be_killed(node: simulator.Node) -> None:
    number = node.plant(CREATE, "hangs", after=True)
    with process(node.store.folder, "simulated.create(gpu, 14, 0)") as caller:
        while not node.fired(number):
            os.sched_yield()
        while not node.instances():
            os.sched_yield()
        caller.kill()
        caller.communicate()
    node.mend()

    assert caller.returncode == -signal.SIGKILL
    assert code(lambda: create(handle(), 14, 3)) == 0


def test_an_unknown_fault_is_refused(node: simulator.Node) -> None:
    with pytest.raises(BadRequest, match="returns, hangs, lies, kills, stops"):
        node.plant(CREATE, "explodes")


def test_the_log_tells_who_called_what_on_which_gpu(node: simulator.Node) -> None:
    node.configure(log="all")
    create(handle(1), 14, 0)

    calls = [(c["function"], c["gpu"], c["mutating"], c["code"]) for c in node.calls()]

    assert calls[0] == ("nvmlDeviceGetHandleByIndex_v2", "", False, 0)
    assert calls[-1] == (CREATE, node.uuids[1], True, 0)
    assert {c["pid"] for c in node.calls()} == {os.getpid()}


def test_the_log_can_be_of_changes_alone(node: simulator.Node) -> None:
    node.configure(log="mutating")
    gi = create(handle(), 14, 0)
    code(lambda: create(handle(), 14, 0))
    pynvml.nvmlDeviceSetMigMode(handle(1), 1)
    pynvml.nvmlGpuInstanceDestroy(gi)

    assert [(c["function"], c["code"]) for c in node.calls()] == [
        (CREATE, 0),
        (CREATE, 23),
        ("nvmlDeviceSetMigMode", 0),
        ("nvmlGpuInstanceDestroy", 0),
    ]

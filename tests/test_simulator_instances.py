"""What instances are once they are made: ids, UUIDs, names, memory, order."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import byref, c_uint
from pathlib import Path
from typing import Any

import pynvml
import pytest
from simulated import code, create, instances, mig_uuids, placements, profiles

from gres_mig import simulator

H200 = 1


@pytest.fixture
def node(tmp_path: Path) -> Iterator[simulator.Node]:
    simulator.create(tmp_path, [("rtx-pro-6000", 1), ("h200", 1)], minors=[3, 0])
    simulator.install(tmp_path)
    pynvml.nvmlInit()
    yield simulator.Node(tmp_path)
    simulator.uninstall()


@pytest.fixture
def gpu(node: simulator.Node) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(0)


def complete(gi: Any, profile: int = 0) -> Any:
    """The compute instance's info."""
    return pynvml.nvmlComputeInstanceGetInfo(pynvml.nvmlGpuInstanceCreateComputeInstance(gi, profile))


def test_a_gpu_instance_says_where_it_is(gpu: Any) -> None:
    info = pynvml.nvmlGpuInstanceGetInfo(create(gpu, 14, 6))

    assert (info.id, info.profileId, info.placement.start, info.placement.size) == (5, 14, 6, 3)
    assert pynvml.nvmlDeviceGetUUID(info.device) == pynvml.nvmlDeviceGetUUID(gpu)


def test_instances_are_listed_by_profile_and_found_by_id(gpu: Any) -> None:
    create(gpu, 14, 0)
    create(gpu, 14, 3)
    create(gpu, 5, 6)

    found = {
        id_: [pynvml.nvmlGpuInstanceGetInfo(gi).placement.start for gi in instances(gpu, id_)] for id_ in (14, 5, 0)
    }

    assert found == {14: [0, 3], 5: [6], 0: []}
    assert pynvml.nvmlGpuInstanceGetInfo(pynvml.nvmlDeviceGetGpuInstanceById(gpu, 4)).placement.start == 3


def test_a_mig_device_says_what_it_is(gpu: Any) -> None:
    gi = create(gpu, 14, 3)
    info = complete(gi)
    mig = info.device
    attributes = pynvml.nvmlDeviceGetAttributes(mig)

    assert pynvml.nvmlDeviceGetName(mig) == "NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 1g.24gb"
    assert bool(pynvml.nvmlDeviceIsMigDeviceHandle(mig))
    assert pynvml.nvmlDeviceGetMemoryInfo(mig).total == 24192 << 20
    assert pynvml.nvmlDeviceGetMemoryInfo(mig, pynvml.nvmlMemory_v2).free == 24192 << 20
    assert (attributes.multiprocessorCount, attributes.memorySizeMB) == (46, 24192)
    assert (attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount) == (1, 1)
    assert (pynvml.nvmlDeviceGetGpuInstanceId(mig), pynvml.nvmlDeviceGetComputeInstanceId(mig)) == (4, 0)
    assert pynvml.nvmlDeviceGetMinorNumber(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig)) == 3
    assert pynvml.nvmlGpuInstanceGetInfo(info.gpuInstance).id == 4


def test_a_mig_device_is_found_by_both_forms_of_its_uuid(gpu: Any) -> None:
    uuid = pynvml.nvmlDeviceGetUUID(complete(create(gpu, 14, 3)).device)

    for name in (uuid, f"MIG-{pynvml.nvmlDeviceGetUUID(gpu)}/4/0"):
        assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID(name)) == uuid
    assert code(lambda: pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{pynvml.nvmlDeviceGetUUID(gpu)}/4/1")) == 6


def test_a_gpu_is_found_by_uuid_and_by_any_form_of_its_address(node: simulator.Node) -> None:
    handles = [
        pynvml.nvmlDeviceGetHandleByUUID(node.uuids[H200]),
        *(pynvml.nvmlDeviceGetHandleByPciBusId(a) for a in ("00000000:1B:00.0", "0000:1b:00.0", "1B:00.0")),
    ]

    assert [pynvml.nvmlDeviceGetIndex(h) for h in handles] == [H200] * 4
    assert pynvml.nvmlDeviceGetPciInfo(handles[0]).busId == "00000000:1B:00.0"
    assert pynvml.nvmlDeviceGetMinorNumber(handles[0]) == 0


def test_the_same_place_gets_the_same_uuid_again(node: simulator.Node) -> None:
    first = node.make(0, 14, 3)
    other = node.make(0, 14, 6)
    node.destroy(0, first.id)
    again = node.make(0, 14, 3)
    node.reboot()
    node.set_mig(0, True)
    after_reboot = node.make(0, 14, 3)

    assert first.mig_uuids == again.mig_uuids == after_reboot.mig_uuids
    assert first.mig_uuids != other.mig_uuids
    assert first.mig_uuids[0][18] == "5"
    assert first.epoch != again.epoch


def test_no_two_mig_devices_of_a_node_share_a_uuid(tmp_path: Path) -> None:
    simulator.create(tmp_path, [("h200", 32)])
    node = simulator.Node(tmp_path)
    for gpu in range(32):
        for start in range(7):
            node.make(gpu, 19, start)

    uuids = [i.mig_uuids[0] for i in node.instances()]

    assert len(set(uuids)) == len(uuids) == 32 * 7


def test_the_index_of_a_mig_device_shifts_when_another_is_made_before_it(node: simulator.Node) -> None:
    gpu = pynvml.nvmlDeviceGetHandleByIndex(H200)
    late = node.make(H200, 19, 3)
    before = mig_uuids(gpu)
    early = node.make(H200, 19, 0)

    assert before == [*late.mig_uuids]
    assert mig_uuids(gpu) == [*early.mig_uuids, *late.mig_uuids]
    assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 1)) == 1
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu) == 7


def test_a_bare_gpu_instance_is_no_mig_device(node: simulator.Node, gpu: Any) -> None:
    node.make(0, 14, 0, bare=True)

    assert mig_uuids(gpu) == []
    assert len(instances(gpu, 14)) == 1
    assert len(node.complete(0, 3).mig_uuids) == 1
    assert len(mig_uuids(gpu)) == 1


def test_the_whole_gpu_instance_has_a_compute_profile_of_all_its_slices(node: simulator.Node) -> None:
    for index in (0, 1):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        for profile in profiles(gpu):
            gi = create(gpu, profile.id)
            offered = []
            for enum in range(8):
                try:
                    offered.append(pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, enum, 0))
                except pynvml.NVMLError_NotSupported:
                    continue
            whole = [c for c in offered if c.sliceCount == profile.sliceCount]
            pynvml.nvmlGpuInstanceDestroy(gi)

            assert [(c.instanceCount, c.multiprocessorCount) for c in whole] == [(1, profile.multiprocessorCount)]
            assert [c.name for c in whole] == [profile.name]


def test_a_gpu_instance_can_be_divided_into_compute_instances(node: simulator.Node) -> None:
    gpu = pynvml.nvmlDeviceGetHandleByIndex(H200)
    gi = create(gpu, 9, 0)

    infos = [complete(gi) for _ in range(3)]

    assert [(i.id, i.placement.start, i.placement.size) for i in infos] == [(0, 0, 1), (1, 1, 1), (2, 2, 1)]
    assert len({pynvml.nvmlDeviceGetUUID(i.device) for i in infos}) == 3
    assert pynvml.nvmlDeviceGetName(infos[0].device) == "NVIDIA H200 MIG 1c.3g.71gb"
    assert code(lambda: complete(gi)) == 23


def test_a_compute_instance_takes_the_lowest_free_id_and_a_legal_place(node: simulator.Node) -> None:
    gi = create(pynvml.nvmlDeviceGetHandleByIndex(H200), 5, 0)
    place = pynvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement
    upper = place(gi, 1, byref(pynvml.c_nvmlGpuInstancePlacement_t(2, 2)))
    lower = pynvml.nvmlGpuInstanceCreateComputeInstance(gi, 0)
    pynvml.nvmlComputeInstanceDestroy(upper)

    info = complete(gi)

    assert (info.id, info.placement.start) == (0, 1)
    assert pynvml.nvmlComputeInstanceGetInfo(lower).id == 1
    assert code(lambda: place(gi, 1, byref(pynvml.c_nvmlGpuInstancePlacement_t(1, 2)))) == 2
    assert code(lambda: place(gi, 1, byref(pynvml.c_nvmlGpuInstancePlacement_t(0, 2)))) == 23
    assert pynvml.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(gi, 1) == 1


def test_compute_instances_are_listed_and_found_by_id(gpu: Any) -> None:
    gi = create(gpu, 5, 0)
    complete(gi)
    array = (pynvml.c_nvmlComputeInstance_t * 8)()
    count = c_uint(0)
    pynvml.nvmlGpuInstanceGetComputeInstances(gi, 0, array, byref(count))
    by_id = pynvml.nvmlGpuInstanceGetComputeInstanceById(gi, 0)

    assert count.value == 1
    assert pynvml.nvmlComputeInstanceGetInfo(array[0]).profileId == 0
    assert pynvml.nvmlComputeInstanceGetInfo(by_id).id == 0


def test_places_of_compute_instances_can_be_asked_for(gpu: Any) -> None:
    gi = create(gpu, 5, 0)
    count = c_uint(0)
    ask = pynvml.nvmlGpuInstanceGetComputeInstancePossiblePlacements
    ask(gi, 0, None, byref(count))
    array = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    ask(gi, 0, array, byref(count))

    assert [(p.start, p.size) for p in array] == [(0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("taken", "left"),
    [([], 7), ([(9, 0)], 3), ([(9, 4)], 4), ([(5, 0)], 3), ([(5, 0), (9, 4)], 0), ([(0, 0)], 0), ([(19, 6)], 6)],
)
def test_remaining_capacity_depends_on_where_the_others_are(
    node: simulator.Node, taken: list[tuple[int, int]], left: int
) -> None:
    gpu = pynvml.nvmlDeviceGetHandleByIndex(H200)
    for profile, start in taken:
        create(gpu, profile, start)

    assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, 19) == left


def test_placements_ignore_what_is_occupied(gpu: Any) -> None:
    empty = placements(gpu, 14)
    create(gpu, 14, 0)

    assert placements(gpu, 14) == empty == [(0, 3), (3, 3), (6, 3), (9, 3)]


def test_a_users_memory_shows_on_its_instance_and_its_gpu(node: simulator.Node, gpu: Any) -> None:
    mig = complete(create(gpu, 14, 0)).device
    node.hold(0, 3, 0, memory_mib=1000)

    assert pynvml.nvmlDeviceGetMemoryInfo(mig).used == 1000 << 20
    assert pynvml.nvmlDeviceGetMemoryInfo(gpu).used == 1000 << 20
    assert pynvml.nvmlDeviceGetMemoryInfo(mig).free == 23192 << 20


def test_processes_are_listed_with_their_instance_except_those_that_only_watch(node: simulator.Node, gpu: Any) -> None:
    mig = complete(create(gpu, 14, 3)).device
    node.hold(0, 4, 0, memory_mib=5)
    node.hold(0, 4, listed=False)

    rows = [
        [(p.gpuInstanceId, p.computeInstanceId, p.usedGpuMemory) for p in processes]
        for processes in (
            pynvml.nvmlDeviceGetComputeRunningProcesses(mig),
            pynvml.nvmlDeviceGetComputeRunningProcesses(gpu),
        )
    ]

    assert rows == [[(4, 0, 5 << 20)]] * 2
    assert pynvml.nvmlDeviceGetGraphicsRunningProcesses(gpu) == []


def test_a_process_on_an_unpartitioned_gpu_has_no_instance(node: simulator.Node, gpu: Any) -> None:
    node.hold(0)

    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)

    assert [(p.gpuInstanceId, p.computeInstanceId) for p in processes] == [(0xFFFFFFFF, 0xFFFFFFFF)]

"""What a driver refuses, with the code it refuses it with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import byref, c_uint
from pathlib import Path
from typing import Any

import pynvml
import pytest
from simulated import code, create, instances, placements, profiles

from gres_mig import simulator

INVALID, UNSUPPORTED, PERMISSION, NOT_FOUND, SIZE = 2, 3, 4, 6, 7
LOST, MISMATCH, IN_USE, RESOURCES = 15, 18, 19, 23


@pytest.fixture
def node(tmp_path: Path) -> Iterator[simulator.Node]:
    simulator.create(tmp_path, [("rtx-pro-6000", 1), ("a100-40", 1), ("h200", 1), ("l40", 1), ("b200", 1), ("a30", 1)])
    simulator.install(tmp_path)
    pynvml.nvmlInit()
    yield simulator.Node(tmp_path)
    simulator.uninstall()


RTX, A100, H200, L40, B200, A30 = range(6)


def handle(index: int) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


@pytest.mark.usefixtures("node")
def test_an_occupied_place_is_insufficient_resources() -> None:
    create(handle(RTX), 14, 3)

    assert code(lambda: create(handle(RTX), 14, 3)) == RESOURCES
    assert code(lambda: create(handle(RTX), 5, 0)) == RESOURCES
    assert code(lambda: create(handle(RTX), 5, 6)) == 0


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize(("start", "size"), [(1, 3), (12, 3), (0, 1), (0, 6), (0xFFFFFFFF, 3)])
def test_a_place_that_is_none_of_the_profile_is_an_invalid_argument(start: int, size: int) -> None:
    assert code(lambda: create(handle(RTX), 14, start, size)) == INVALID


@pytest.mark.usefixtures("node")
def test_a_full_gpu_has_no_place_left() -> None:
    for _ in range(4):
        create(handle(RTX), 14)

    assert code(lambda: create(handle(RTX), 14)) == RESOURCES
    assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(handle(RTX), 14) == 0


@pytest.mark.usefixtures("node")
def test_only_one_instance_has_the_media_extensions() -> None:
    create(handle(A100), 20, 0)

    assert code(lambda: create(handle(A100), 20, 1)) == RESOURCES
    assert code(lambda: create(handle(A100), 19, 1)) == 0


@pytest.mark.usefixtures("node")
def test_an_instance_with_all_media_engines_leaves_room_only_for_those_without() -> None:
    create(handle(RTX), 65, 0)

    assert code(lambda: create(handle(RTX), 14, 3)) == RESOURCES
    assert code(lambda: create(handle(RTX), 47, 3)) == RESOURCES
    assert code(lambda: create(handle(RTX), 67, 3)) == 0
    assert code(lambda: create(handle(RTX), 66, 6)) == 0


@pytest.mark.usefixtures("node")
def test_all_media_engines_are_not_to_be_had_beside_an_instance_that_has_some() -> None:
    create(handle(RTX), 14, 0)

    assert code(lambda: create(handle(RTX), 65, 3)) == RESOURCES
    assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(handle(RTX), 65) == 0


@pytest.mark.usefixtures("node")
def test_media_extensions_of_two_sizes_exclude_each_other() -> None:
    create(handle(A30), 21, 0)

    assert code(lambda: create(handle(A30), 6, 2)) == RESOURCES
    assert code(lambda: create(handle(A30), 5, 2)) == 0


@pytest.mark.usefixtures("node")
def test_a_profile_of_another_chip_is_unsupported_and_one_of_none_is_invalid() -> None:
    for call in (
        lambda id_: create(handle(H200), id_, 0, 1),
        lambda id_: placements(handle(H200), id_),
        lambda id_: pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(handle(H200), id_),
        lambda id_: instances(handle(H200), id_),
    ):
        assert code(lambda call=call: call(47)) == UNSUPPORTED
        assert code(lambda call=call: call(1)) == INVALID


@pytest.mark.usefixtures("node")
def test_a_profile_whose_figures_nobody_published_is_left_out() -> None:
    assert [p.id for p in profiles(handle(B200))] == [19, 14, 20, 15]
    assert code(lambda: pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle(B200), 4)) == UNSUPPORTED


@pytest.mark.usefixtures("node")
def test_a_gpu_without_mig_supports_none_of_it() -> None:
    gpu = handle(L40)

    assert code(lambda: pynvml.nvmlDeviceGetMigMode(gpu)) == UNSUPPORTED
    assert code(lambda: pynvml.nvmlDeviceSetMigMode(gpu, 1)) == UNSUPPORTED
    assert code(lambda: create(gpu, 19, 0, 1)) == UNSUPPORTED
    assert profiles(gpu) == []
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu) == 0
    assert pynvml.nvmlDeviceGetMemoryInfo(gpu).total == 46068 << 20


def test_with_mig_off_nothing_is_made_but_everything_can_be_asked(node: simulator.Node) -> None:
    node.set_mig(RTX, False)
    gpu = handle(RTX)

    assert code(lambda: create(gpu, 14, 0)) == UNSUPPORTED
    assert code(lambda: create(gpu, 14)) == UNSUPPORTED
    assert instances(gpu, 14) == []
    assert code(lambda: pynvml.nvmlDeviceGetGpuInstanceById(gpu, 0)) == NOT_FOUND
    assert code(lambda: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)) == NOT_FOUND
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu) == 0
    assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, 14) == 4


def test_a_pending_mode_is_not_yet_in_force(node: simulator.Node) -> None:
    node.set_mig(A100, False, pending=True)

    assert pynvml.nvmlDeviceGetMigMode(handle(A100)) == [0, 1]
    assert code(lambda: create(handle(A100), 19)) == UNSUPPORTED


@pytest.mark.usefixtures("node")
def test_a_gpu_instance_with_a_compute_instance_is_in_use() -> None:
    gi = create(handle(RTX), 14)
    ci = pynvml.nvmlGpuInstanceCreateComputeInstance(gi, 0)

    assert code(lambda: pynvml.nvmlGpuInstanceDestroy(gi)) == IN_USE
    pynvml.nvmlComputeInstanceDestroy(ci)
    assert code(lambda: pynvml.nvmlGpuInstanceDestroy(gi)) == 0


def test_an_instance_somebody_uses_is_not_destroyed(node: simulator.Node) -> None:
    gi = create(handle(RTX), 14)
    ci = pynvml.nvmlGpuInstanceCreateComputeInstance(gi, 0)
    gi_id = pynvml.nvmlGpuInstanceGetInfo(gi).id

    node.hold(RTX, gi_id, 0)
    assert code(lambda: pynvml.nvmlComputeInstanceDestroy(ci)) == IN_USE
    node.let_go(RTX, gi_id, 0)
    assert code(lambda: pynvml.nvmlComputeInstanceDestroy(ci)) == 0
    node.hold(RTX, gi_id, listed=False)
    assert code(lambda: pynvml.nvmlGpuInstanceDestroy(gi)) == IN_USE
    node.let_go(RTX, gi_id)
    assert code(lambda: pynvml.nvmlGpuInstanceDestroy(gi)) == 0


def test_the_first_instance_needs_the_whole_gpu_idle(node: simulator.Node) -> None:
    node.hold(RTX)
    assert code(lambda: create(handle(RTX), 14)) == IN_USE

    node.let_go(RTX)
    create(handle(RTX), 14)
    node.hold(RTX)

    assert code(lambda: create(handle(RTX), 14)) == 0


def test_changing_the_partitioning_needs_permission(node: simulator.Node) -> None:
    gi = create(handle(RTX), 14)
    ci = pynvml.nvmlGpuInstanceCreateComputeInstance(gi, 0)
    node.configure(permission="no-one")

    for call in (
        lambda: create(handle(RTX), 14),
        lambda: create(handle(RTX), 14, 3),
        lambda: pynvml.nvmlGpuInstanceDestroy(gi),
        lambda: pynvml.nvmlComputeInstanceDestroy(ci),
        lambda: pynvml.nvmlGpuInstanceCreateComputeInstance(gi, 0),
        lambda: pynvml.nvmlDeviceSetMigMode(handle(RTX), 0),
        lambda: instances(handle(RTX), 14),
        lambda: pynvml.nvmlDeviceGetGpuInstanceById(handle(RTX), 3),
    ):
        assert code(call) == PERMISSION
    assert [i.mig_uuids != () for i in node.instances(RTX)] == [True]


def test_reading_a_partitioned_gpu_needs_the_monitor_capability(node: simulator.Node) -> None:
    node.configure(monitor=False)

    assert code(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle(RTX))) == PERMISSION
    assert code(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle(RTX))) == PERMISSION
    assert code(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle(L40))) == 0


def test_a_vgpu_guest_makes_no_gpu_instances(node: simulator.Node) -> None:
    node.configure(virtualization=2)

    assert code(lambda: create(handle(RTX), 14)) == UNSUPPORTED


def test_a_lost_gpu_answers_nothing(node: simulator.Node) -> None:
    gpu = handle(RTX)
    gi = create(gpu, 14)
    uuid = node.uuids[RTX]
    node.lose(RTX)

    for call in (
        lambda: handle(RTX),
        lambda: pynvml.nvmlDeviceGetHandleByUUID(uuid),
        lambda: pynvml.nvmlDeviceGetUUID(gpu),
        lambda: pynvml.nvmlDeviceGetMigMode(gpu),
        lambda: pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, 0),
        lambda: create(gpu, 14),
        lambda: instances(gpu, 14),
        lambda: pynvml.nvmlGpuInstanceGetInfo(gi),
        lambda: pynvml.nvmlGpuInstanceDestroy(gi),
    ):
        assert code(call) == LOST
    assert pynvml.nvmlDeviceGetCount() == 6
    assert code(lambda: create(handle(A100), 19)) == 0


def test_a_lost_gpu_may_still_have_a_name(node: simulator.Node) -> None:
    node.lose(RTX, identity=True)
    gpu = handle(RTX)

    assert pynvml.nvmlDeviceGetUUID(gpu) == node.uuids[RTX]
    assert pynvml.nvmlDeviceGetMinorNumber(gpu) == 0
    assert code(lambda: pynvml.nvmlDeviceGetMigMode(gpu)) == LOST


@pytest.mark.usefixtures("node")
def test_a_handle_of_a_destroyed_instance_is_an_invalid_argument() -> None:
    gi = create(handle(RTX), 14, 0)
    ci = pynvml.nvmlGpuInstanceCreateComputeInstance(gi, 0)
    mig = pynvml.nvmlComputeInstanceGetInfo(ci).device
    pynvml.nvmlComputeInstanceDestroy(ci)
    pynvml.nvmlGpuInstanceDestroy(gi)
    again = create(handle(RTX), 14, 0)
    pynvml.nvmlGpuInstanceCreateComputeInstance(again, 0)

    for call in (
        lambda: pynvml.nvmlGpuInstanceGetInfo(gi),
        lambda: pynvml.nvmlGpuInstanceDestroy(gi),
        lambda: pynvml.nvmlGpuInstanceCreateComputeInstance(gi, 0),
        lambda: pynvml.nvmlComputeInstanceGetInfo(ci),
        lambda: pynvml.nvmlComputeInstanceDestroy(ci),
        lambda: pynvml.nvmlDeviceGetUUID(mig),
        lambda: pynvml.nvmlDeviceGetMemoryInfo(mig),
    ):
        assert code(call) == INVALID


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize(
    "call",
    [
        pynvml.nvmlDeviceGetUUID,
        pynvml.nvmlDeviceGetMigMode,
        pynvml.nvmlGpuInstanceGetInfo,
        pynvml.nvmlGpuInstanceDestroy,
        pynvml.nvmlComputeInstanceDestroy,
        pynvml.nvmlComputeInstanceGetInfo,
    ],
)
def test_null_is_no_handle(call: Callable[[Any], Any]) -> None:
    assert code(lambda: call(pynvml.c_nvmlDevice_t())) == INVALID
    assert code(lambda: call(None)) == INVALID


@pytest.mark.usefixtures("node")
def test_a_handle_of_one_kind_is_not_one_of_another() -> None:
    gi = create(handle(RTX), 14)

    assert code(lambda: pynvml.nvmlDeviceGetUUID(gi)) == INVALID
    assert code(lambda: pynvml.nvmlGpuInstanceGetInfo(handle(RTX))) == INVALID
    assert code(lambda: pynvml.nvmlComputeInstanceDestroy(gi)) == INVALID


@pytest.mark.usefixtures("node")
def test_what_is_not_there_is_not_found() -> None:
    assert code(lambda: pynvml.nvmlDeviceGetHandleByUUID("GPU-00000000-0000-0000-0000-000000000000")) == NOT_FOUND
    assert code(lambda: pynvml.nvmlDeviceGetHandleByPciBusId("0000:ff:00.0")) == NOT_FOUND
    assert code(lambda: pynvml.nvmlDeviceGetGpuInstanceById(handle(RTX), 3)) == NOT_FOUND
    assert code(lambda: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle(RTX), 0)) == NOT_FOUND
    assert code(lambda: pynvml.nvmlGpuInstanceGetComputeInstanceById(create(handle(RTX), 14), 0)) == NOT_FOUND
    assert code(lambda: handle(6)) == INVALID


@pytest.mark.usefixtures("node")
def test_a_wrong_structure_version_is_an_invalid_argument() -> None:
    info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle(RTX), 0)
    symbol = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetGpuInstanceProfileInfoV")

    assert info.version == 0
    assert symbol(handle(RTX), 0, byref(info)) == INVALID
    assert code(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle(RTX), version=0x01000028)) == INVALID


@pytest.mark.usefixtures("node")
def test_an_array_that_would_be_overrun_is_refused() -> None:
    gpu = handle(RTX)
    create(gpu, 14)
    places, handles = (pynvml.c_nvmlGpuInstancePlacement_t * 3)(), (pynvml.c_nvmlGpuInstance_t * 3)()
    count = c_uint(4)

    assert code(lambda: pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, 14, places, byref(count))) == SIZE
    assert code(lambda: pynvml.nvmlDeviceGetGpuInstances(gpu, 14, handles, byref(count))) == SIZE
    assert code(lambda: pynvml.nvmlDeviceGetGpuInstances(gpu, 14, None, byref(count))) == INVALID


@pytest.mark.usefixtures("node")
def test_a_placement_by_value_is_caught_where_the_real_library_crashes() -> None:
    placement = pynvml.c_nvmlGpuInstancePlacement_t(0, 3)

    with pytest.raises(TypeError, match="byref"):
        pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle(RTX), 14, placement)


@pytest.mark.usefixtures("node")
def test_a_function_that_is_not_simulated_is_missing_as_from_an_old_library() -> None:
    assert code(lambda: pynvml.nvmlDeviceGetTemperature(handle(RTX), 0)) == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND


def test_a_symbol_can_be_taken_out_of_the_library(node: simulator.Node) -> None:
    node.configure(missing=["nvmlDeviceGetGpuInstanceProfileInfoV"])

    info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo
    assert code(lambda: info(handle(RTX), 0)) == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    assert code(lambda: info(handle(RTX), 0, version=1)) == 0


def test_a_newer_library_knows_more_profiles(node: simulator.Node) -> None:
    gi = create(handle(H200), 0)
    gpu_info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo
    compute_info = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo
    before = code(lambda: gpu_info(handle(H200), 17)), code(lambda: compute_info(gi, 8, 0))

    node.configure(gpu_profiles=18, compute_profiles=9)

    assert before == (INVALID, INVALID)
    assert (code(lambda: gpu_info(handle(H200), 17)), code(lambda: compute_info(gi, 8, 0))) == (3, 3)


def test_without_the_driver_there_is_no_session(node: simulator.Node) -> None:
    node.unload_driver()

    assert code(pynvml.nvmlInit) == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    assert code(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED


def test_a_library_newer_than_the_driver_answers_nothing_until_a_reload(node: simulator.Node) -> None:
    node.upgrade_library()
    refused = code(pynvml.nvmlInit), code(pynvml.nvmlDeviceGetCount)
    node.reload_driver()

    assert refused == (MISMATCH, MISMATCH)
    assert code(pynvml.nvmlInit) == 0


@pytest.mark.usefixtures("node")
def test_before_init_and_after_shutdown_nothing_is_answered() -> None:
    pynvml.nvmlInit()
    pynvml.nvmlShutdown()
    assert pynvml.nvmlDeviceGetCount() == 6
    pynvml.nvmlShutdown()

    assert code(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED
    assert code(pynvml.nvmlShutdown) == pynvml.NVML_ERROR_UNINITIALIZED

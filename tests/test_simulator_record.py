"""The simulated H200 against what a real one answered: driver 580.159.04, MIG off, getters only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
from simulated import code, instances, placements

from gres_mig import simulator

RECORD: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "h200_nvml_580.159.json").read_text())
DEVICE: dict[str, Any] = RECORD["devices"][0]
V1_FIELDS = [name for name, _ in pynvml.c_nvmlGpuInstanceProfileInfo_t._fields_]


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[Any]:
    simulator.create(tmp_path, [("h200", 1)], mig=False, uuids=[DEVICE["uuid"]], pci=[DEVICE["pci"]["busId"]])
    simulator.Node(tmp_path).configure(virtualization=1)
    simulator.install(tmp_path)
    pynvml.nvmlInit()
    yield pynvml.nvmlDeviceGetHandleByIndex(0)
    simulator.uninstall()


def answer(call: Callable[[], Any]) -> Any:
    """As the record was written: a structure by fields, an error by code, class and words."""
    try:
        result = call()
    except pynvml.NVMLError as error:
        return f"NVMLError {error.value} {type(error).__name__}: {error}"
    if hasattr(result, "_fields_"):
        return {name: getattr(result, name) for name, _ in result._fields_}
    return result


@pytest.mark.usefixtures("gpu")
def test_the_system_says_what_the_record_says() -> None:
    said = {
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "nvml": pynvml.nvmlSystemGetNVMLVersion(),
        "cuda": pynvml.nvmlSystemGetCudaDriverVersion(),
        "count": pynvml.nvmlDeviceGetCount(),
    }

    assert said == {key: RECORD[key] for key in said}


def test_the_gpu_says_what_the_record_says(gpu: Any) -> None:
    said = {
        "name": pynvml.nvmlDeviceGetName(gpu),
        "uuid": pynvml.nvmlDeviceGetUUID(gpu),
        "minor": pynvml.nvmlDeviceGetMinorNumber(gpu),
        "mem": answer(lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu)),
        "mem_v2": answer(lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu, pynvml.nvmlMemory_v2)),
        "mig_mode": pynvml.nvmlDeviceGetMigMode(gpu),
        "max_mig": pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu),
        "mig_handle0": answer(lambda: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)),
        "is_mig": repr(pynvml.nvmlDeviceIsMigDeviceHandle(gpu)),
        "attrs": answer(lambda: pynvml.nvmlDeviceGetAttributes(gpu)),
        "pci": answer(lambda: pynvml.nvmlDeviceGetPciInfo(gpu)),
        "persist": pynvml.nvmlDeviceGetPersistenceMode(gpu),
    }

    assert said == {key: DEVICE[key] for key in said}
    assert pynvml.nvmlDeviceGetVirtualizationMode(gpu) == 1


@pytest.mark.parametrize("enum", range(19))
def test_a_profile_says_what_the_record_says(gpu: Any, enum: int) -> None:
    recorded = DEVICE["profiles"][str(enum)]

    v2 = answer(lambda: pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, enum, version=2))
    v1 = answer(lambda: pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, enum, version=1))
    v3 = answer(lambda: pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, enum, version=3))

    assert v2 == recorded["v2"]
    assert v3 == recorded["v3"]
    if isinstance(v2, str):
        assert v1 == recorded["v1"]
    else:
        assert v1 == {name: recorded["v1"][name] for name in V1_FIELDS}
        assert [list(p) for p in placements(gpu, v2["id"])] == recorded["nvmlDeviceGetGpuInstancePossiblePlacements"]
        assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, v2["id"]) == recorded["remaining"]
        assert len(instances(gpu, v2["id"])) == recorded["instances"]


@pytest.mark.parametrize("profile_id", DEVICE["byid"])
def test_a_profile_by_id_says_what_the_record_says(gpu: Any, profile_id: str) -> None:
    said = answer(lambda: pynvml.nvmlDeviceGetGpuInstanceProfileInfoById(gpu, int(profile_id)))

    assert said == DEVICE["byid"][profile_id]


def test_all_answers_are_the_same_without_privilege(gpu: Any, tmp_path: Path) -> None:
    simulator.Node(tmp_path).configure(permission="no-one")

    assert placements(gpu, 9) == [(0, 4), (4, 4)]
    assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, 9) == 2
    assert pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, 2).id == 9


def test_with_mig_off_an_instance_id_is_not_found(gpu: Any) -> None:
    assert code(lambda: pynvml.nvmlDeviceGetGpuInstanceById(gpu, 0)) == pynvml.NVML_ERROR_NOT_FOUND


def test_ids_of_a_mig_device_are_no_business_of_a_gpu(gpu: Any) -> None:
    for call in (
        pynvml.nvmlDeviceGetGpuInstanceId,
        pynvml.nvmlDeviceGetComputeInstanceId,
        pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle,
    ):
        assert code(lambda call=call: call(gpu)) == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_fields_say_that_mig_needs_no_reset_and_can_be_queried_while_off(gpu: Any) -> None:
    values = pynvml.nvmlDeviceGetFieldValues(gpu, [184, 199, 1])

    assert [(v.nvmlReturn, v.value.uiVal) for v in values] == [(0, 1), (0, 1), (3, 0)]


@pytest.mark.parametrize("number", [*range(31), 999, 12345])
@pytest.mark.usefixtures("gpu")
def test_the_library_has_words_for_every_code(number: int) -> None:
    words = pynvml.nvmlErrorString(number)

    assert words == {16: "GPU requires reset", 19: "In use by another client"}.get(number, words)
    assert (words == "Unknown Error") == (number > 30)


@pytest.mark.usefixtures("gpu")
def test_pynvml_finds_words_for_a_code_it_does_not_know() -> None:
    assert str(pynvml.NVMLError(23)) == "Insufficient Resources"

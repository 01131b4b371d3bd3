"""Whatever is asked for, in whatever order: the silicon's rules hold."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
from simulated import code, create, placements, profiles

from gres_mig import simulator

MIG_BOARDS = [name for name in simulator.board_names() if name != "l40"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    simulator.uninstall()


def open_gpu(folder: Path, board: str, *, half_swapped: bool) -> Any:
    simulator.create(folder, [(board, 1)], half_swapped=half_swapped)
    simulator.install(folder)
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByIndex(0)


@pytest.mark.parametrize("half_swapped", [False, True])
@pytest.mark.parametrize("board", MIG_BOARDS)
def test_no_sequence_of_calls_breaks_the_rules(folder: Path, board: str, half_swapped: bool) -> None:
    gpu = open_gpu(folder, board, half_swapped=half_swapped)
    node = simulator.Node(folder)
    offered = {p.id: p for p in profiles(gpu)}
    places = {id_: placements(gpu, id_) for id_ in offered}
    figures = simulator.board_data(board)
    whole = next((p for p in figures["profiles"] if p["size"] == figures["units"]), None)
    by_name = {p["name"]: p for p in figures["profiles"]}
    chance = random.Random(f"{board}{half_swapped}")

    for _ in range(150):
        before = node.instances()
        if before and chance.random() < 0.4:
            node.destroy(0, chance.choice(before).id)
            continue
        id_ = chance.choice(list(offered))
        remaining = pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, id_)
        start, size = chance.choice(places[id_]) if chance.random() < 0.5 else (None, None)
        answer = code(lambda id_=id_, start=start, size=size: create(gpu, id_, start, size))
        made = node.instances()

        slices = [s for i in made for s in range(i.start, i.start + i.size)]
        assert len(set(slices)) == len(slices)
        assert len({i.id for i in made}) == len(made)
        assert sum(by_name[i.profile]["slices"] for i in made) <= figures["compute_slices"]
        assert len(made) == len(before) + (answer == 0)
        assert answer in (0, pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
        assert start is not None or (answer == 0) == (remaining > 0)
        for name, profile in by_name.items():
            assert sum(i.profile == name for i in made) <= profile["instance_count"]
        for engine in ("decoders", "encoders", "jpeg", "ofa"):
            assert whole is None or sum(by_name[i.profile][engine] for i in made) <= whole[engine]


@pytest.mark.parametrize("board", MIG_BOARDS)
def test_remaining_capacity_is_what_can_really_be_made(folder: Path, board: str) -> None:
    gpu = open_gpu(folder, board, half_swapped=False)
    node = simulator.Node(folder)
    chance = random.Random(board)
    offered = [p.id for p in profiles(gpu)]

    for _ in range(15):
        for instance in node.instances():
            node.destroy(0, instance.id)
        for _ in range(chance.randrange(3)):
            code(lambda: create(gpu, chance.choice(offered)))
        id_ = chance.choice(offered)
        promised = pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, id_)
        made = sum(
            code(lambda start=start, size=size, id_=id_: create(gpu, id_, start, size)) == 0
            for start, size in placements(gpu, id_)
        )

        assert made == promised


@pytest.mark.parametrize("board", MIG_BOARDS)
def test_every_profile_can_be_made_as_often_as_it_says(folder: Path, board: str) -> None:
    gpu = open_gpu(folder, board, half_swapped=False)
    node = simulator.Node(folder)

    for profile in profiles(gpu):
        made = [code(lambda id_=profile.id: create(gpu, id_)) for _ in range(profile.instanceCount + 1)]
        for instance in node.instances():
            node.destroy(0, instance.id)

        assert made == [0] * profile.instanceCount + [pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES]

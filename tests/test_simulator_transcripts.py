"""Where real drivers put instances nobody placed, and what ids they gave them: 17 public logs, replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml
import pytest
from simulated import create

from gres_mig import simulator

A100 = {"1g": 19, "1g2": 15, "2g": 14, "3g": 9, "4g": 5, "7g": 0}
FOUR = {"1g": 14, "2g": 5, "4g": 0}

# (log, board, requests, halves swapped, ids; a set where the order is not known, None where refused)
LOGS: list[tuple[str, str, list[str], bool, Any]] = [
    ("A100 7x1g (MIG guide)", "a100-40", ["1g"] * 7, False, [13, 11, 12, 7, 8, 9, 10]),
    ("H100 7x1g", "h100-80", ["1g"] * 7, False, [13, 11, 12, 7, 8, 9, 10]),
    ("A100 AWS p4d 7x1g (dask-cuda#583)", "a100-40", ["1g"] * 7, True, [9, 7, 8, 11, 12, 13, 14]),
    ("H100 PCIe 7x1g", "h100-80", ["1g"] * 7, True, [9, 7, 8, 11, 12, 13, 14]),
    ("A100 14,19x5", "a100-40", ["2g"] + ["1g"] * 5, False, [5, 13, 7, 8, 9, 10]),
    ("A100 19,19,14,9", "a100-40", ["1g", "1g", "2g", "3g"], False, [13, 11, 3, None]),
    ("MIG guide 9,19,14,19", "a100-40", ["3g", "1g", "2g", "1g"], False, [2, 7, 4, 8]),
    ("ESXi page 9,19,14,19", "a100-40", ["3g", "1g", "2g", "1g"], True, [1, 11, 6, 12]),
    ("MIG guide 19,14,5", "a100-40", ["1g", "2g", "4g"], False, [13, 5, 1]),
    ("A100 5,14,19", "a100-40", ["4g", "2g", "1g"], True, [2, 3, 9]),
    ("A100 9,9", "a100-40", ["3g", "3g"], True, [1, 2]),
    ("nvitop PR#8 3x2g", "a100-40", ["2g"] * 3, True, {3, 5, 6}),
    ("DCGM#138 GPU 0", "a100-40", ["3g", "2g", "1g", "1g"], False, {9, 10, 3, 2}),
    ("DCGM#138 GPU 1", "a100-40", ["3g", "2g", "1g", "1g"], True, {13, 14, 5, 1}),
    ("H100 1g.20gb first", "h100-80", ["1g2"], False, [6]),
    ("RTX PRO 6000 4x1g", "rtx-pro-6000", ["1g"] * 4, False, [3, 4, 5, 6]),
    ("RTX PRO 6000 2g,1g,1g", "rtx-pro-6000", ["2g", "1g", "1g"], False, [1, 5, 6]),
    ("A30 1g,1g,2g", "a30", ["1g", "1g", "2g"], False, [3, 4, 2]),
]


@pytest.mark.parametrize(("log", "board", "requests", "swapped", "ids"), LOGS, ids=[row[0] for row in LOGS])
def test_the_driver_of_a_public_log_gave_the_same_ids(
    tmp_path: Path, log: str, board: str, requests: list[str], swapped: bool, ids: Any
) -> None:
    simulator.create(tmp_path, [(board, 1)], half_swapped=swapped)
    simulator.install(tmp_path)
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    profile_ids = FOUR if board in ("rtx-pro-6000", "a30") else A100

    given: list[int | None] = []
    for request in requests:
        try:
            given.append(int(pynvml.nvmlGpuInstanceGetInfo(create(gpu, profile_ids[request])).id))
        except pynvml.NVMLError_InsufficientResources:
            given.append(None)
    simulator.uninstall()

    assert (set(given) if isinstance(ids, set) else given) == ids


def test_swapped_halves_change_ids_but_not_places(tmp_path: Path) -> None:
    simulator.create(tmp_path, [("a100-40", 2)], half_swapped=[1])

    made = [[simulator.Node(tmp_path).make(gpu, 19, start) for start in (0, 4)] for gpu in (0, 1)]

    assert [[i.start for i in row] for row in made] == [[0, 4], [0, 4]]
    assert [[i.id for i in row] for row in made] == [[7, 11], [11, 7]]

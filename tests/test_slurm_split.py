"""No GPU is given out whole and in parts: what slurm.conf, gres.conf and cgroup.conf say, against what is managed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gres_mig.models import Gpu, Settings
from gres_mig_slurm import check_split

SLURM = "TaskPlugin=task/cgroup\nNodeName=n[1-2] Gres=gpu:2 CPUs=8\n"
GPUS = tuple(
    Gpu(f"GPU-{minor}", minor, minor, f"00000000:{minor + 16:02x}:00.0", "NVIDIA A30", 24576, True, True)
    for minor in range(4)
)
LAST_TWO = Settings("", "", managed=("GPU-2", "GPU-3"))


def said(
    etc: Path, gres: str, *, slurm: str = SLURM, settings: Settings = LAST_TWO, constrain: str = "yes", node: str = "n1"
) -> list[tuple[str, str]]:
    """Level and what to do of each finding."""
    for name, text in (("slurm", slurm), ("gres", gres), ("cgroup", f"ConstrainDevices={constrain}\n")):
        (etc / f"{name}.conf").write_text(text)
    found = check_split.on_this_node(str(etc / "slurm.conf"), settings, GPUS, node)
    return [(finding.level, finding.todo.replace(f"{etc}/", "")) for finding in found]


@pytest.mark.parametrize(
    "gres",
    [
        "Name=gpu File=/dev/nvidia[0-1]",
        "NodeName=n[1-9] Name=gpu Type=a30 File=/dev/nvidia0,/dev/nvidia1 Cores=0-7",
        "NodeName=n1 name=GPU file=/dev/nvidia0\nNodeName=n1 Name=gpu File=/dev/nvidia1",
        "AutoDetect=nvml\nNodeName=n1 AutoDetect=off Name=gpu File=/dev/nvidia[0-1]",
        "Name=gpu File=/dev/nvidia[0-1]\nName=shard Count=8",
        "Name=gpu File=/dev/nvidia[0-1]\nNodeName=n2 Name=gpu File=/dev/nvidia[2-3]",
        "Name=gpu MultipleFiles=/dev/nvidia0,/dev/nvidia-caps/nvidia-cap12\nName=migmem Flags=CountOnly",
    ],
)
def test_gpus_that_are_split_are_right(tmp_path: Path, gres: str) -> None:
    assert said(tmp_path, f"{gres}\n") == [("ok", "")]


@pytest.mark.parametrize(
    ("gres", "line"),
    [
        ("Name=gpu File=/dev/nvidia[0-2]", "Name=gpu File=/dev/nvidia0,/dev/nvidia1"),
        ("Name=gpu File=/dev/nvidia[2-3]  # two", "#Name=gpu File=/dev/nvidia[2-3]  # two"),
        ("Name=gpu Type=a30 File=/dev/nvidia1,/dev/nvidia3", "Name=gpu Type=a30 File=/dev/nvidia1"),
        ("Name=gpu MultipleFiles=/dev/nvidia2,/dev/nvidia-caps/nvidia-cap12",
         "#Name=gpu MultipleFiles=/dev/nvidia2,/dev/nvidia-caps/nvidia-cap12"),
        ("Name=gpu File=/dev/nvidia[0-1]\nName=shard File=/dev/nvidia3", "#Name=shard File=/dev/nvidia3"),
        ("Name=mps Count=100 File=/dev/nvidia2\nName=gpu File=/dev/nvidia0", "#Name=mps Count=100 File=/dev/nvidia2"),
        ("AutoDetect=nvml", "AutoDetect=off"),
        ("Name=gpu AutoDetect=nvidia File=/dev/nvidia0", "Name=gpu AutoDetect=off File=/dev/nvidia0"),
        ("AutoDetect=off\nNodeName=n1 AutoDetect=nvml", "NodeName=n1 AutoDetect=off"),
    ],
)  # fmt: skip
def test_a_line_that_takes_a_managed_gpu_is_shown_as_it_has_to_be(tmp_path: Path, gres: str, line: str) -> None:
    ((level, todo),) = said(tmp_path, f"{gres}\n")

    assert level == "problem"
    assert todo.partition(": ")[2] == line


def test_a_count_that_names_no_device_proves_nothing(tmp_path: Path) -> None:
    assert said(tmp_path, "Name=gpu Count=2\n") == [
        ("problem", "gres.conf: NodeName=n1 Name=gpu File=/dev/nvidia0,/dev/nvidia1")
    ]
    assert said(tmp_path, "", slurm="NodeName=n1 Gres=migmem:48000 CPUs=8\n") == []


def test_a_managed_gpu_before_one_of_gres_gpu_would_be_taken_for_it(tmp_path: Path) -> None:
    first = Settings("", "", managed=("GPU-0",))

    ((level, todo),) = said(tmp_path, "Name=gpu File=/dev/nvidia[1-3]\n", settings=first)

    assert (level, todo.rpartition("run: ")[2]) == ("problem", "gres-mig setup --gpus GPU-3")


@pytest.mark.parametrize(("constrain", "plugin"), [("no", "task/cgroup"), ("yes", "task/affinity")])
def test_where_slurm_does_not_number_anew_the_order_does_not_matter(
    tmp_path: Path, constrain: str, plugin: str
) -> None:
    first = Settings("", "", managed=("GPU-0",))
    slurm = SLURM.replace("task/cgroup", plugin)
    found = said(tmp_path, "Name=gpu File=/dev/nvidia[1-3]\n", settings=first, slurm=slurm, constrain=constrain)

    assert found == [("ok", "")]


def test_where_nothing_is_managed_slurm_may_have_all(tmp_path: Path) -> None:
    assert said(tmp_path, "AutoDetect=nvml\n", settings=Settings("", "")) == []


def test_files_that_are_not_there_are_no_fault(tmp_path: Path) -> None:
    assert list(check_split.on_this_node(str(tmp_path / "slurm.conf"), LAST_TWO, GPUS, "n1")) == []

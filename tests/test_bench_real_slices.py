"""bench/real_gpu.sh and bench/real_slices.py, rehearsed on simulated boards with the stand-in for HAMi-core.

Below the stand-in is a stand-in for the driver, which never refuses: whatever is refused, the limit refused.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Answer, here
from vgpu import built, require_compiler

from gres_mig.simulator.admin import Node
from gres_mig.simulator.program import environment

require_compiler()

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which libcuda.so.1 is the stand-in for a driver, and that of HAMi-core is linked with it."""
    folder = tmp_path_factory.mktemp("driver")
    shutil.copy(built(folder, "NO_LIMIT", "KEEPS_UMASK"), folder / "libcuda.so.1")
    return environment(
        # The probe of a slice gets no LD_LIBRARY_PATH.
        LDFLAGS=f"-Wl,--no-as-needed -L{folder} -l:libcuda.so.1 -Wl,-rpath,{folder}",
        LD_LIBRARY_PATH=str(folder),
        # It wants one, also where no slice gives it one.
        CUDA_DEVICE_MEMORY_SHARED_CACHE=str(folder / "cache"),
    )


def node(folder: Path, board: str) -> Node:
    """A node with one such board, whose records anybody may look at."""
    assert here("simulate", "create", folder, "--board", board).code == 0
    return Node(folder)


def ran(variables: dict[str, str], *words: object) -> Answer:
    """What a program of the bench answers."""
    done = subprocess.run([*map(str, words)], env=variables, capture_output=True, text=True, check=False)
    return Answer(done.returncode, done.stdout, done.stderr)


def slices(node: Node, variables: dict[str, str], library: object, **more: str) -> Answer:
    """bench/real_slices.py on that node."""
    words = (sys.executable, BENCH / "real_slices.py", library, "--programs", "driver")
    return ran({**variables, **more}, *words, "--simulated", node.store.folder)


def script(node: Node, variables: dict[str, str], out: Path, **more: str) -> Answer:
    """bench/real_gpu.sh on that node."""
    told = {**variables, "PYTHON": sys.executable, "OUT": str(out), **more}
    return ran(told, "sh", BENCH / "real_gpu.sh", "--simulated", node.store.folder)


def failures(answer: Answer) -> list[str]:
    """Its lines that say FAIL."""
    return [line for line in answer.out.splitlines() if line.startswith("FAIL")]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that anybody may enter, which pytest's own is not."""
    with tempfile.TemporaryDirectory(prefix="gres-mig-") as folder:
        os.chmod(folder, 0o711)
        yield Path(folder)


@pytest.fixture(scope="module")
def l40(place: Path) -> Node:
    return node(place / "l40", "l40")


@pytest.fixture(scope="module")
def answer(l40: Node, variables: dict[str, str], place: Path) -> Answer:
    """What the whole script says there."""
    return script(l40, variables, place, GRES_MIG_HAMI_CORE="stand-in")


class TestTheWholeScript:
    def test_nothing_fails_on_a_simulated_board(self, answer: Answer) -> None:
        assert failures(answer) == []
        assert (answer.code, answer.err) == (0, "")
        assert answer.out.count("PASS") > 25

    def test_it_names_the_file_that_holds_what_it_said(self, answer: Answer) -> None:
        *lines, last = answer.out.splitlines()

        said = Path(last.removeprefix("written to ")).read_text()

        assert said.splitlines() == [*lines, last]

    def test_each_program_is_held_to_its_own_slice(self, answer: Answer) -> None:
        # The stand-in counts a context as 640 MiB.
        for name, size, gets in (("a", "4,000", "3,360"), ("b", "6,000", "5,360")):
            assert f"PASS {name} is told of {size} MiB in all\n" in answer.out
            assert f"PASS {name} gets {gets} MiB of {size} MiB, then: out of memory\n" in answer.out

    def test_what_they_write_has_their_users_mode(self, answer: Answer) -> None:
        assert "PASS a writes a file of mode 0640 under umask 027\n" in answer.out

    def test_workers_that_come_and_go_share_the_limit(self, answer: Answer) -> None:
        kept = re.findall(
            r"^PASS 3 epochs .*: a holds ([0-9,]+) MiB of 4,000 MiB, .*: out of memory$", answer.out, re.MULTILINE
        )

        # Three contexts, then one.
        assert kept == ["2,080", "3,360"]

    def test_what_drops_its_limit_is_ended_and_nobody_else(self, answer: Answer) -> None:
        order = (
            "NOTE without LD_PRELOAD a gets 5,024 MiB of 4,000 MiB",
            "PASS the police see 5,024 MiB of 4,512 MiB, and say warn",
            "PASS the police name the process of no slice",
            'PASS with over_grant = "warn" a\'s program goes on',
            'PASS with over_grant = "end" they terminate, and it ends with -15',
            "PASS b's program goes on, and gets 512 MiB",
            "PASS the program of no slice goes on, and gets 512 MiB",
        )

        assert "\n".join(order) in answer.out

    def test_nothing_is_left_of_it(self, answer: Answer, l40: Node) -> None:
        seen = here("--node", l40.store.folder, "status", "--json").plain

        assert "PASS a is given back\n" in answer.out
        assert [gpu["holdings"] for gpu in seen["gpus"]] == [[]]
        assert list(Path(l40.store.folder).glob("run/slices/*")) == []


def test_without_a_library_it_only_looks(variables: dict[str, str], place: Path) -> None:
    h200 = node(place / "h200", "h200")
    before = h200.store.read()

    answer = script(h200, variables, place)

    assert (answer.code, failures(answer)) == (0, [])
    assert "NOTE slices were not tried: GRES_MIG_HAMI_CORE names no libvgpu.so\n" in answer.out
    assert h200.store.read() == before


def test_a_library_that_loses_count_is_a_finding_which_the_police_share(
    variables: dict[str, str], tmp_path: Path
) -> None:
    answer = slices(node(tmp_path / "node", "l40"), variables, "stand-in", CFLAGS="-DLOSES_COUNT")

    what = "3 epochs with 2 workers that use the GPU before it does"
    lost = "a holds 5,152 MiB of 4,000 MiB, NVML counts 5,152 MiB: the library lost count of a process that lives"
    assert f"NOTE {what}: {lost}\nPASS {what}: the police say warn\n" in answer.out
    assert (answer.code, failures(answer)) == (0, [])


def test_a_library_that_limits_nothing_fails(variables: dict[str, str], tmp_path: Path) -> None:
    answer = slices(node(tmp_path / "node", "l40"), variables, built(tmp_path, "NO_LIMIT"))

    (line,) = failures(answer)
    assert answer.code == 1
    assert "the limit of 4,000 MiB is not in force" in line


def test_a_library_that_is_not_there_is_one_line(variables: dict[str, str], tmp_path: Path) -> None:
    answer = slices(node(tmp_path / "node", "l40"), variables, tmp_path / "libvgpu.so")

    assert (answer.code, answer.out, answer.err) == (1, f"FAIL {tmp_path}/libvgpu.so is no file\n", "")


def test_a_gpu_that_somebody_uses_is_left_alone(variables: dict[str, str], tmp_path: Path) -> None:
    l40 = node(tmp_path / "node", "l40")
    l40.hold(0, memory_mib=100)

    answer = slices(l40, variables, "stand-in")

    assert failures(answer) == [f"FAIL {l40.uuids[0]} is in use by pid {os.getpid()}; name another with --gpu"]


def test_where_every_gpu_is_in_mig_mode_none_is_shared(variables: dict[str, str], tmp_path: Path) -> None:
    answer = slices(node(tmp_path / "node", "h200"), variables, "stand-in")

    assert failures(answer) == ["FAIL MIG mode is on for every GPU here: none can be shared"]

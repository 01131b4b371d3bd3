"""`gres-mig demo`: the story, and that it notices when something is not as told."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_line import Answer, here, run

from gres_mig.demo import jupyter
from gres_mig.demo.jupyter import JupyterDemo
from gres_mig.demo.node import Demo
from gres_mig.demo.slurm import SlurmDemo, left_out
from gres_mig.errors import NodeFault
from gres_mig.show import Paper
from gres_mig.simulator.admin import Node
from gres_mig.simulator.program import command, environment

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """The story, told once to something that is no terminal and takes ASCII only, where there is no Jupyter; its node
    is kept."""
    folder = tmp_path_factory.mktemp("demo")
    variables = without_jupyter(tmp_path_factory.mktemp("path"))
    return run("demo", "--keep", PYTHONIOENCODING="ascii", TMPDIR=str(folder), COLUMNS="80", **variables)


def without_jupyter(folder: Path) -> dict[str, str]:
    """An environment in which Python finds no Jupyter server."""
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['jupyter_server'] = None\n")
    return {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}


def test_the_story_holds_from_beginning_to_end(told: Answer) -> None:
    chapters = re.findall(r"^(\d+)\. ", told.out, re.MULTILINE)
    ending = re.search(r"^(\d+) checks held, in ([0-9.]+) s", told.out, re.MULTILINE)

    assert (told.code, told.err) == (0, "")
    assert chapters == [str(number) for number in range(1, 12)]
    assert ending is not None
    assert int(ending[1]) >= told.out.count("checked: ") > 15
    assert float(ending[2]) < 20


@pytest.mark.parametrize(
    "part",
    [
        "The GPUs are simulated",
        "GPU 0 is full: starts 0, 3, 6 and 9",
        "GPU 1 has a 1g.24gb and a 2g.48gb beside each other",
        "no room for 97,000 MiB",
        "$ gres-mig why 97000",
        "the program counted on from",
        "killed with SIGKILL in the middle",
        "nothing leaked",
        "(already)",
        "$ gres-mig adopt manual:frank",
        "is not managed by gres-mig; nothing on it is changed",
        "none of them was for GPU 2",
    ],
)
def test_the_story_tells(told: Answer, part: str) -> None:
    assert part in told.out


def test_each_step_is_followed_by_a_map_of_each_gpu(told: Answer) -> None:
    maps = re.findall(r"^GPU 0 .*?^GPU 1 .*?^GPU 2 ", told.out, re.MULTILINE | re.DOTALL)

    assert len(maps) >= 8
    assert "|1g.24gb =" in told.out
    assert "|intent 1g.24gb ~" in told.out
    assert "\x1b" not in told.out


def test_the_node_that_was_kept_can_be_gone_on_with(told: Answer) -> None:
    (folder,) = re.findall(r"^next: gres-mig --node (\S+) status$", told.out, re.MULTILINE)

    assert "24 of 24 memory slices free" in here("--node", folder, "status").out
    assert len(Node(folder).instances()) == 1


@pytest.fixture
def play(memory: Path) -> Callable[[str, Callable[[Node], object]], tuple[Demo, list[str]]]:
    """Tells the story, with something that happens as soon as a chapter begins; the demo, and what it said."""

    def tell(chapter: str, happens: Callable[[Node], object]) -> tuple[Demo, list[str]]:
        said: list[str] = []

        def say(text: str) -> None:
            said.append(text)
            if chapter in text and not any(chapter in earlier for earlier in said[:-1]):
                happens(Node(memory / "node"))

        demo = Demo(str(memory / "node"), say, Paper())
        with pytest.raises(NodeFault) as differs:
            demo.tell()
        said.append(str(differs.value))
        return demo, said

    return tell


def test_it_notices_that_a_place_is_not_the_one_it_told(play: Callable[..., tuple[Demo, list[str]]]) -> None:
    demo, said = play("Four people ask", lambda node: node.make(0, "2g.48gb", 6))

    assert said[-1] == "the demo differs from its story: GPU 0 is full: starts 0, 3, 6 and 9"
    assert demo.checks > 0


def test_it_notices_that_a_program_stops_counting(play: Callable[..., tuple[Demo, list[str]]]) -> None:
    def end_it(node: Node) -> None:
        (pid,) = [pid for instance in node.instances(1) for pid in instance.holders]
        os.kill(pid, signal.SIGKILL)

    _, said = play("A neighbour is reclaimed", end_it)

    assert said[-1] == "the program on the instance ended"


def test_it_notices_that_a_command_ends_otherwise_than_told(play: Callable[..., tuple[Demo, list[str]]]) -> None:
    _, said = play("A fifth spills over", lambda node: node.lose(1))

    assert re.search(r"allocate --owner manual:erin --memory 8000: exit code \d", said[-1])


def test_what_differs_ends_the_command_with_an_error_and_leaves_no_folder(tmp_path: Path) -> None:
    # No file may be larger than a block, and the hardware's is.
    words = ["sh", "-c", 'ulimit -f 1; exec "$@"', "sh", *command("demo", "--json")]
    done = subprocess.run(words, env=environment(TMPDIR=str(tmp_path)), capture_output=True, text=True, check=False)

    answer = Answer(done.returncode, done.stdout, done.stderr)
    assert answer.code == 4
    assert "simulate create" in answer.plain["error"]["message"]
    assert os.listdir(tmp_path) == []


def test_without_slurm_it_says_in_one_paragraph_what_is_left_out_and_what_to_type(told: Answer) -> None:
    """Here Slurm's accounts could not enter the folder, where there is Slurm at all."""
    said = re.findall(r"^Left out: .*?\n\n", told.out, re.MULTILINE | re.DOTALL)

    assert len(said) == 2
    assert "a Slurm cluster" in said[1]
    assert re.search(r" type: (\S+ )?\S+", " ".join(said[1].split()))
    assert "sbatch" not in told.out


def test_without_jupyter_it_says_in_one_line_what_is_left_out_and_what_to_type(told: Answer) -> None:
    (said,) = re.findall(r"^Left out: a Jupyter .*?\n\n", told.out, re.MULTILINE | re.DOTALL)

    assert " ".join(said.split()) == (
        "Left out: a Jupyter server, for there is no jupyter_server here; "
        "type in a clone of gres-mig: pip install '.[demo]'"
    )
    assert "/api/kernels" not in told.out


@pytest.fixture(scope="module")
def in_jupyter(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str]:
    """The part that a Jupyter server plays: how many checks held, and what it said."""
    said: list[str] = []
    demo = JupyterDemo(str(tmp_path_factory.mktemp("jupyter")), said.append, Paper(), 0)
    assert jupyter.left_out() == ""
    demo.tell()
    return demo.checks, "\n".join(said)


@pytest.mark.parametrize(
    "part",
    [
        "· GPU 40 GiB",
        "two kernels with GPU memory are in its launcher",
        "the server alone holds nothing",
        "each has an instance of its own, made as it started",
        "│1g.24gb ═════════│     ┊     ┊     │2g.48gb ═",
        "it is on the very same instance",
        "no room for 40,960 MiB",
        "nothing was made or destroyed for it",
        "the other two work on",
        "its instance is given back",
        "its kernels are gone, and no instance is left",
    ],
)
def test_jupyters_part_tells(in_jupyter: tuple[int, str], part: str) -> None:
    checks, said = in_jupyter

    assert checks >= said.count("checked: ") > 6
    assert part in said


def test_a_story_in_jupyter_that_differs_leaves_no_server(tmp_path: Path) -> None:
    def say(text: str) -> None:
        if "Two kernels" in text:
            Node(tmp_path / "node").make(0, "4g.96gb")

    demo = JupyterDemo(str(tmp_path), say, Paper(), 0)
    with pytest.raises(NodeFault, match="answered with 503"):
        demo.tell()

    assert running_with(f"GRES_MIG_NODE={tmp_path}/") == []


@pytest.fixture(scope="module")
def public() -> Iterator[Path]:
    """A folder that Slurm's accounts may enter, where a cluster can be brought up."""
    folder = Path(tempfile.mkdtemp(prefix="gres-mig-"))
    try:
        folder.chmod(0o755)
        if reason := left_out(str(folder / "demo")):
            pytest.skip(f"no Slurm: {reason}")
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def on_slurm(public: Path) -> Answer:
    """The whole story, with the part that Slurm plays."""
    return run("demo", TMPDIR=str(public), COLUMNS="80")


def test_where_slurm_is_there_it_plays_its_part(on_slurm: Answer) -> None:
    chapters = re.findall(r"^(\d+)\. ", on_slurm.out, re.MULTILINE)

    assert (on_slurm.code, on_slurm.err) == (0, "")
    assert chapters == [str(number) for number in range(1, 24)]
    assert "Left out" not in on_slurm.out


@pytest.mark.parametrize(
    "part",
    [
        "$ sbatch --job-name=alice --gres=migmem:8000 alice.sh",
        "migmem: 8,000 MiB counts as 24,320 MiB: what 1g.24gb (24,192 MiB) takes of a GPU",
        "four jobs share the one GPU of n1",
        "the fifth job and a bigger one are on n2",
        "dave's program beside it counted on from",
        "7 grace PENDING BeginTime",
        "slurm:lab:7 waits for 30,000 MiB",
        "no node is drained for it",
        "it has the place that opened",
        "no instance is left on either node",
        "nothing of it runs any more",
    ],
)
def test_slurms_part_tells(on_slurm: Answer, part: str) -> None:
    assert part in on_slurm.out


def test_slurms_part_draws_both_nodes(on_slurm: Answer) -> None:
    maps = re.findall(r"^on (n\d):\n.*\n\nGPU 0 ", on_slurm.out, re.MULTILINE)

    assert maps == ["n1", "n2", "n1", "n1"]
    assert "│1g.24gb ═════════│     ┊     ┊     │2g.48gb ═══════════════════════════│" in on_slurm.out


def test_nothing_of_it_is_left(on_slurm: Answer, public: Path) -> None:
    assert on_slurm.code == 0
    assert os.listdir(public) == []


def test_a_story_on_slurm_that_differs_leaves_no_daemon(public: Path) -> None:
    folder = public / "differs"

    def say(text: str) -> None:
        if "Jobs ask Slurm" in text:
            Node(folder / "n2").make(0, "1g.24gb")

    demo = SlurmDemo(str(folder), say, Paper(), 0)
    with pytest.raises(NodeFault, match="n2 is untouched"):
        demo.tell()
    left = demo._lab.processes()
    shutil.rmtree(folder)

    assert left == []


def test_a_demo_that_is_told_to_stop_leaves_no_daemon(public: Path, tmp_path: Path) -> None:
    variables = environment(TMPDIR=str(public), PYTHONUNBUFFERED="1", **without_jupyter(tmp_path))

    assert stopped_at("sinfo", variables) == 128 + signal.SIGTERM
    assert running_with(f"SLURM_CONF={public}/") == []
    assert os.listdir(public) == []


def test_a_demo_that_is_told_to_stop_leaves_no_server(tmp_path: Path) -> None:
    """While it waits for the server to answer."""
    assert (
        stopped_at("$ jupyter server", environment(TMPDIR=str(tmp_path), PYTHONUNBUFFERED="1")) == 128 + signal.SIGTERM
    )
    assert running_with(f"GRES_MIG_NODE={tmp_path}/") == []
    assert os.listdir(tmp_path) == []


def stopped_at(text: str, variables: dict[str, str]) -> int:
    """The exit code of a demo that is told to stop when it says that."""
    with subprocess.Popen(command("demo"), env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if text in line:
                break
        process.terminate()
        process.stdout.read()
    return process.returncode


def running_with(variable: str) -> list[Path]:
    """Processes that have that in their environment."""
    return [entry for entry in Path("/proc").glob("[0-9]*/environ") if variable.encode() in _read(entry)]


def _read(environ: Path) -> bytes:
    try:
        return environ.read_bytes()
    except OSError:
        return b""

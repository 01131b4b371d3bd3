"""`gres-mig demo`: the story, and that it notices when something is not as told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Answer, here, run

from gres_mig.demo import Demo
from gres_mig.errors import NodeFault
from gres_mig.show import Paper
from gres_mig.simulator.admin import Node
from gres_mig.simulator.program import command, environment


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """The story, told once to something that is no terminal and takes ASCII only; its node is kept."""
    folder = tmp_path_factory.mktemp("demo")
    return run("demo", "--keep", PYTHONIOENCODING="ascii", TMPDIR=str(folder), COLUMNS="80")


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

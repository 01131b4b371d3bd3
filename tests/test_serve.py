"""`gres-mig serve`: one a node, told by signals, telling systemd; what it does is done by its children."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import command_line
import pytest

from gres_mig import service, simulator
from gres_mig.errors import NodeFault
from gres_mig.models import Settings
from gres_mig.simulator.program import command, environment

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[socket.socket]:
    """systemd's end of NOTIFY_SOCKET."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "notify"))
        end.settimeout(20)
        yield end


@pytest.fixture
def start(node: simulator.Node, channel: socket.socket) -> Iterator[Start]:
    """Starts services of the node, ended with the test."""
    (Path(node.store.folder) / "config.toml").write_text('gpus = "*"\n')
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command("--node", node.store.folder, "serve", "--every", "0.2", *words),
            env=environment(NOTIFY_SOCKET=channel.getsockname()),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def hear(channel: socket.socket, wanted: str) -> str:
    """The next message with that word."""
    while wanted not in (said := channel.recv(4096).decode()):
        pass
    return said


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """How it ended by itself, and what it said."""
    _, said = process.communicate(timeout=20)
    return process.returncode, said


def test_it_tells_systemd_that_it_is_ready_that_it_lives_and_that_it_ends(start: Start, channel: socket.socket) -> None:
    process = start()
    heard = [hear(channel, "READY=1"), hear(channel, "WATCHDOG=1"), hear(channel, "WATCHDOG=1")]
    process.send_signal(signal.SIGTERM)
    heard.append(hear(channel, "STOPPING=1"))

    assert heard == ["READY=1", "WATCHDOG=1", "WATCHDOG=1", "STOPPING=1"]
    assert ended(process) == (0, "")


def test_a_second_one_on_the_node_refuses(start: Start, channel: socket.socket) -> None:
    first = start()
    hear(channel, "READY=1")

    code, said = ended(start())

    assert code == 3
    assert said == f"gres-mig: the service of this node runs already (pid {first.pid}); see: gres-mig status\n"


def test_when_it_is_killed_the_next_one_begins_at_once_whatever_its_children_do(
    start: Start, channel: socket.socket, node: simulator.Node
) -> None:
    here = command_line.run("--node", node.store.folder, "allocate", "--owner", "manual:a", "--memory", "8000")
    hang = node.plant("nvmlDeviceGetMigMode", "hangs", times=0)
    first = start()
    command_line.until(lambda: node.fired(hang))
    first.kill()
    first.communicate()

    second = start()
    node.mend()

    assert here.code == 0
    assert hear(channel, "WATCHDOG=1")
    assert second.poll() is None


def test_a_driver_that_does_not_answer_does_not_keep_it_from_ending(
    start: Start, channel: socket.socket, node: simulator.Node
) -> None:
    command_line.run("--node", node.store.folder, "allocate", "--owner", "manual:a", "--memory", "8000")
    hang = node.plant("nvmlDeviceGetMigMode", "hangs", times=0)
    process = start()
    command_line.until(lambda: node.fired(hang))
    process.send_signal(signal.SIGTERM)

    code, _ = ended(process)
    node.mend()

    assert code == 0


def test_a_changed_configuration_is_in_force_after_sighup_and_a_wrong_one_never(
    start: Start, channel: socket.socket, node: simulator.Node
) -> None:
    config = Path(node.store.folder) / "config.toml"
    process = start()
    hear(channel, "READY=1")
    config.write_text('gpus = "*"\nplacement = "spred"\n')
    process.send_signal(signal.SIGHUP)
    hear(channel, "RELOADING=1")
    hear(channel, "WATCHDOG=1")
    config.write_text('gpus = "*"\nplacement = "spread"\n')
    process.send_signal(signal.SIGHUP)
    hear(channel, "RELOADING=1")
    hear(channel, "READY=1")
    process.send_signal(signal.SIGTERM)

    code, said = ended(process)

    assert code == 0
    first, second = said.splitlines()
    assert re.fullmatch(
        r"gres-mig: the configuration stays as it was: .*config.toml:2: placement: found \"spred\".*", first
    )
    assert second == "gres-mig: the configuration was read again"


def test_it_gives_back_what_a_killed_maker_left(start: Start, channel: socket.socket, node: simulator.Node) -> None:
    node.plant("nvmlGpuInstanceCreateComputeInstance", "kills", after=True, count="node")
    killed = command_line.run("--node", node.store.folder, "allocate", "--owner", "manual:a", "--memory", "8000")
    left = len(node.instances())

    start()
    command_line.until(lambda: not node.instances())

    assert killed.code == 4
    assert left == 1


def test_once_is_one_pass_beside_a_service_or_without(start: Start, channel: socket.socket) -> None:
    start()
    hear(channel, "READY=1")

    assert ended(start("--once")) == (0, "")


def test_the_service_itself_loads_no_driver_library(node: simulator.Node) -> None:
    """What hangs in the driver or crashes in it is a child."""
    code = (
        "import sys\n"
        "from gres_mig.cli import Node\n"
        "from gres_mig.commands.serve import one_pass\n"
        "from gres_mig.service import Service\n"
        "settings = Node(sys.argv[1], None).settings\n"
        "Service(lambda: settings, lambda settings: one_pass(settings, '')).once()\n"
        "print(*sys.modules)\n"
    )
    (Path(node.store.folder) / "config.toml").write_text('gpus = "*"\n')
    done = subprocess.run(
        [sys.executable, "-c", code, node.store.folder],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )

    loaded = done.stdout.split()
    assert "gres_mig.service" in loaded
    assert {"pynvml", "gres_mig.nvml", "gres_mig.allocator"}.isdisjoint(loaded)


def test_a_pass_that_fails_is_told_and_the_next_one_is_made(
    settings: Settings, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(_: Settings) -> None:
        raise NodeFault("the driver is gone")

    with pytest.raises(NodeFault, match="the pass over this node failed"):
        service.Service(lambda: settings, fails).once()


def test_without_systemd_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)

    service.notify("READY=1")


def test_the_unit_starts_the_service_before_slurmd_and_restarts_it_when_it_is_silent() -> None:
    text = service.unit("/opt/gres-mig/bin/gres-mig serve")

    lines = text.splitlines()
    assert "ExecStart=/opt/gres-mig/bin/gres-mig serve" in lines
    assert {"Type=notify", "Restart=always", "WatchdogSec=120", "KillMode=process", "Before=slurmd.service"} <= set(
        lines
    )
    assert not re.search(r"^(Requires|BindsTo)=", text, re.MULTILINE)

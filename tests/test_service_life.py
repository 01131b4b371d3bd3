"""The service's own life: started, killed and replaced, with its disk full, its driver hanging, its foreman gone."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import command_line
import node_service
import pytest
from command_line import until
from node_service import FULL, OTHER, Service, at, kernel_id, make

from gres_mig import mounts, presence, service
from gres_mig.errors import StateError
from gres_mig.models import Process, Settings
from gres_mig.service import place, workshop
from gres_mig.simulator.admin import Node
from gres_mig.values import replace

Start = Callable[..., Service]
OLD_S = 20.0
"""Older than what counts as alive for being young."""


@pytest.fixture
def start(node: Node) -> Iterator[Start]:
    with node_service.services(node) as start:
        yield start


# The path


def test_everybody_may_connect_and_only_root_may_replace_the_socket(start: Start) -> None:
    served = start().ready()

    there, folder = os.stat(served.path), os.stat(os.path.dirname(served.path))

    assert stat.S_IMODE(there.st_mode) == 0o666
    assert stat.S_IMODE(folder.st_mode) == 0o755
    assert (there.st_uid, folder.st_uid) == (os.geteuid(), os.geteuid())


def test_on_a_fresh_node_it_tells_the_sizes_before_anything_was_made(start: Start) -> None:
    served = start().ready()

    answer = served.ask("GET", "/v1/sizes")

    assert {size["memory_mib"]: size["free"] for size in answer.plain["sizes"]} == {24192: 8, 48512: 4, 97280: 2}


def test_a_second_copy_refuses_and_leaves_the_path_to_the_first(start: Start) -> None:
    first = start().ready()

    code, said = start().end(0)

    assert code == 3
    assert said == f"gres-mig: the service of this node runs already (pid {first.process.pid}); see: gres-mig status\n"
    assert first.ask("GET", "/v1/service").plain["pid"] == first.process.pid


def test_a_killed_ones_path_is_taken_over_with_all_that_it_served(start: Start, node: Node) -> None:
    first = start().ready()
    kernel = make(first)
    before = os.stat(first.path).st_ino
    first.end(signal.SIGKILL)

    second = start().ready()
    answer = second.ask("GET", at(kernel))

    assert os.stat(second.path).st_ino != before
    assert (answer.status, answer.plain["state"]) == (200, "allocated")


def test_the_path_stays_when_the_service_ends_so_that_nobody_takes_the_node_for_one_without(start: Start) -> None:
    served = start().ready()

    code, said = served.end()

    assert (code, said) == (0, "")
    assert stat.S_ISSOCK(os.stat(served.path).st_mode)
    with pytest.raises(ConnectionRefusedError):
        node_service.connected(served.path)


def symlink(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def a_file(path: Path) -> None:
    path.write_text("mine")


def a_folder(path: Path) -> None:
    path.mkdir()


def another_users(path: Path) -> None:
    node_service.need_root()
    with socket.socket(socket.AF_UNIX) as planted:
        planted.bind(str(path))
    os.chown(path, OTHER, OTHER)


@pytest.mark.parametrize("plant", [symlink, a_file, a_folder, another_users])
@pytest.mark.parametrize("name", [presence.SOCKET, f"{presence.SOCKET}.new"])
def test_what_others_planted_at_the_path_is_refused_and_left(
    memory: Path, plant: Callable[[Path], None], name: str
) -> None:
    path = memory / name
    plant(path)
    before = os.lstat(path)

    with pytest.raises(StateError) as refused:
        place.listen(str(memory))

    assert re.fullmatch(rf"{path} is .*: it was not left by the service and stays as it is; .*", str(refused.value))
    assert os.path.samestat(before, os.lstat(path))
    assert os.stat("/etc/passwd").st_size


def test_another_program_that_answers_at_the_path_keeps_it(start: Start, node: Node) -> None:
    path = Path(node.store.folder) / "run" / presence.SOCKET
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        code, said = start().end(0)

    assert code == 3
    assert f"another program answers at {path}" in said


def test_a_folder_that_others_can_change_is_refused(start: Start, node: Node) -> None:
    folder = Path(node.store.folder) / "run"
    folder.chmod(0o777)

    code, said = start().end(0)

    assert code == 4
    assert "who can change it could answer in the service's place" in said


def test_a_path_longer_than_a_sockets_may_be_is_no_trouble(memory: Path) -> None:
    from gres_mig.simulator.assembly import create

    folder = memory / ("x" * 60) / ("y" * 60)
    create(folder, [("rtx-pro-6000", 1)])
    with node_service.services(Node(folder)) as start:
        served = start().ready()
        descriptor = os.open(folder / "run", os.O_RDONLY)
        answer = node_service.ask(f"/proc/self/fd/{descriptor}/{presence.SOCKET}", "GET", "/v1/service")
        os.close(descriptor)

    assert len(served.path) > 108
    assert answer.status == 200


def test_records_on_a_network_file_system_are_refused(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = mounts.file_system(settings.state_dir)
    monkeypatch.setattr(mounts, "NETWORK", frozenset({kind}))

    with pytest.raises(StateError, match=r"is on a network file system"):
        service.Service(lambda: settings, lambda _: None).run()


# Without its extra, and without a socket


def test_without_its_packages_it_runs_and_says_once_that_there_is_no_socket(
    start: Start, node: Node, tmp_path: Path
) -> None:
    missing = "raise ModuleNotFoundError(\"No module named 'tornado'\", name='tornado')\n"
    (tmp_path / "tornado").mkdir()
    (tmp_path / "tornado" / "__init__.py").write_text(missing)
    with_it = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    served = start("--every", "0.1", PYTHONPATH=f"{with_it}{os.pathsep}{Path(mounts.__file__).parent.parent}").ready()
    orphan(node)

    until(lambda: not node.instances())
    here = presence.running(str(served.folder / "run"))
    code, said = served.end()

    assert code == 0
    assert said.splitlines()[0] == (
        "gres-mig: the socket is off: tornado is not installed; run in a clone of gres-mig: pip install '.[service]'"
    )
    assert said.count("tornado") == 1
    assert here is not None
    assert here.socket == ""
    assert not os.path.exists(served.path)


def orphan(node: Node) -> None:
    """An instance whose owner, a process, is gone."""
    owner = f"jupyter:0:{kernel_id()}"
    answer = command_line.here("--node", node.store.folder, "allocate", "--owner", owner, "--memory", "8000")
    assert answer.code == 0
    node_service.change(node, lambda record: replace(record, witnesses=(Process(os.getpid(), 1),)))
    node_service.aged(node, OLD_S)


def test_a_node_of_slurms_alone_needs_no_socket(start: Start) -> None:
    served = start("--no-socket").ready()

    here = presence.running(str(served.folder / "run"))
    code, said = served.end()

    assert (code, said) == (0, "")
    assert here is not None
    assert here.socket == ""
    assert not os.path.exists(served.path)


# Upgrade, crashes, hangs


def test_starts_under_way_survive_an_upgrade_a_crash_and_every_pass(start: Start, node: Node) -> None:
    """A pass every tenth of a second, so that one falls into each step of a start."""
    served = start("--every", "0.1").ready()
    over, wrong, made = threading.Event(), list[object](), list[str]()

    def ask(method: str, path: str, body: object = None) -> node_service.Answer:
        while True:
            with contextlib.suppress(ConnectionError):
                return node_service.ask(served.path, method, path, body)
            # As a client does: not as fast as it can.
            over.wait(0.05)

    def live() -> None:
        while not over.is_set():
            kernel = kernel_id()
            answers = [
                ask("PUT", at(kernel), FULL),
                ask("POST", f"{at(kernel)}/process", {"pid": os.getpid()}),
                ask("PUT", at(kernel), FULL),
                ask("DELETE", at(kernel)),
            ]
            if [answer.status for answer in answers] not in ([201, 200, 200, 200], [200] * 4):
                wrong.append(answers)
            made.append(kernel)

    threads = [threading.Thread(target=live) for _ in range(4)]
    for thread in threads:
        thread.start()
    ended = []
    for number in (signal.SIGTERM, signal.SIGKILL):
        done = len(made)
        until(lambda done=done: len(made) > done + 2)  # type: ignore[misc]
        ended.append(served.end(number)[0])
        served = start("--every", "0.1").ready()
    over.set()
    for thread in threads:
        thread.join(60)

    assert ended == [0, -signal.SIGKILL]
    assert wrong == []
    until(lambda: node_service.records(node) == ())
    assert not node.instances()


def test_on_a_full_disk_nothing_is_made_and_all_can_be_given_back(start: Start, node: Node) -> None:
    node_service.need_root()
    folder = Path(node_service.settings_of(node).state_dir)
    folder.mkdir()
    small = f'mount -t tmpfs -o size=256k none {folder} && exec "$@"'
    served = start(before=("unshare", "--mount", "sh", "-c", small, "sh")).ready()
    kernel = make(served)
    # As the service sees the folder; for all others it is another one.
    rest = Path(f"/proc/{served.process.pid}/root{folder}/rest")
    with contextlib.suppress(OSError), rest.open("wb", buffering=0) as filling:
        while filling.write(bytes(4096)):
            pass

    refused = served.ask("PUT", at(kernel_id()), FULL)
    made = len(node.instances())
    seen = served.ask("GET", at(kernel))
    gone = served.ask("DELETE", at(kernel))
    left = len(node.instances())
    rest.unlink()
    again = served.ask("PUT", at(kernel_id()), FULL)

    assert (refused.status, refused.code, refused.message.count("\n")) == (500, "STATE", 0)
    assert "No space left on device" in refused.message
    assert (seen.status, gone.status, again.status) == (200, 200, 201)
    assert (made, left) == (1, 0)


def test_what_is_being_answered_comes_to_its_end(start: Start, node: Node) -> None:
    served = start().ready()
    hang = node.plant("nvmlDeviceCreateGpuInstanceWithPlacement", "hangs", count="node")
    answers: list[node_service.Answer] = []
    thread = threading.Thread(target=lambda: answers.append(served.ask("PUT", at(kernel_id()), FULL)))
    thread.start()
    until(lambda: node.fired(hang))

    served.process.send_signal(signal.SIGTERM)
    until(lambda: _refused(served.path))
    node.release(hang)
    thread.join(60)

    assert [answer.status for answer in answers] == [201]
    assert served.end(0)[0] == 0


def _refused(path: str) -> bool:
    try:
        node_service.connected(path).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_driver_that_hangs_keeps_one_caller_waiting_and_no_other(start: Start, node: Node) -> None:
    node_service.configure(node, "hardware_timeout = 0.5")
    served = start().ready()
    served.ask("GET", "/v1/health")
    hang = node.plant("nvmlDeviceCreateGpuInstanceWithPlacement", "hangs", times=0)
    answers: list[node_service.Answer] = []
    thread = threading.Thread(target=lambda: answers.append(served.ask("PUT", at(kernel_id()), FULL)))
    thread.start()
    until(lambda: node.fired(hang))

    others = [served.ask("GET", path).status for path in ("/v1/service", "/v1/kernels", "/v1/sizes")]
    waits = thread.is_alive()
    thread.join(60)
    node.mend()

    assert others == [200, 200, 200]
    assert waits
    assert [(answer.status, answer.code) for answer in answers] == [(500, "TIMEOUT")]


def test_when_the_process_that_starts_the_work_is_killed_another_one_does(start: Start, node: Node) -> None:
    served = start().ready()
    (foreman,) = node_service.children(served.process.pid)
    os.kill(foreman, signal.SIGKILL)
    until(lambda: foreman not in node_service.children(served.process.pid))

    kernel = make(served)
    (another,) = node_service.children(served.process.pid)

    assert another != foreman
    assert served.ask("DELETE", at(kernel)).status == 200


def test_no_child_of_the_service_has_its_sockets_or_its_lock(start: Start) -> None:
    served = start().ready()
    with node_service.connected(served.path):
        until(lambda: len(_sockets(served.process.pid)) > 2)
        (foreman,) = node_service.children(served.process.pid)
        shared = _sockets(served.process.pid) & _sockets(foreman)

    assert shared == set()


def _sockets(pid: int) -> set[str]:
    """What the process holds now; a descriptor that it closes while we look is not held."""
    links = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return {link for link in links if link.startswith("socket:") or link.endswith(".lock")}


def test_a_task_that_ends_by_itself_is_an_error_and_not_silence() -> None:
    import asyncio

    async def do() -> str:
        shop = workshop.Workshop(lambda: {"die": lambda: os.kill(os.getpid(), signal.SIGKILL), "live": lambda: "well"})
        with contextlib.closing(shop):
            with pytest.raises(Exception, match=r"ended by itself \(signal 9\)"):
                await shop.do("die", within_s=20)
            return str(await shop.do("live", within_s=20))

    assert asyncio.run(do()) == "well"

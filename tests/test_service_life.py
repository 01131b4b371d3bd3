"""The service's own life and that of the owners it serves: started, killed, replaced, reloaded; alive, gone."""

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
from node_service import FULL, OTHER, OWNER, Service, kernel_id

from gres_mig import __version__, machine, mounts, presence, service
from gres_mig.errors import BadRequest, StateError
from gres_mig.models import Process, Settings
from gres_mig.service import peer, workshop
from gres_mig.simulator.admin import Node
from gres_mig.values import replace
from gres_mig.witnesses import UNREPORTED_S

Start = Callable[..., Service]
OLD_S = 20.0
"""Older than what counts as alive for being young."""


@pytest.fixture
def start(node: Node) -> Iterator[Start]:
    with node_service.services(node) as start:
        yield start


def at(kernel: str) -> str:
    return f"/v1/kernels/{kernel}"


def make(served: Service) -> str:
    """A kernel with an instance."""
    kernel = kernel_id()
    assert served.ask("PUT", at(kernel), FULL).status == 201
    return kernel


# The path


def test_everybody_may_connect_and_only_root_may_replace_the_socket(start: Start) -> None:
    served = start().ready()

    there, folder = os.stat(served.path), os.stat(os.path.dirname(served.path))

    assert stat.S_IMODE(there.st_mode) == 0o666
    assert stat.S_IMODE(folder.st_mode) == 0o755
    assert (there.st_uid, folder.st_uid) == (os.geteuid(), os.geteuid())


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
    start: Start, node: Node, plant: Callable[[Path], None], name: str
) -> None:
    path = Path(node.store.folder) / "run" / name
    plant(path)
    before = os.lstat(path)

    code, said = start().end(0)

    assert code == 4
    assert re.fullmatch(rf"gres-mig: {path} is .*: it was not left by the service and stays as it is; .*\n", said)
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
        "gres-mig: the socket is off: tornado is not installed; run: pip install 'gres-mig[service]'"
    )
    assert said.count("tornado") == 1
    assert here is not None
    assert here.socket == ""
    assert not os.path.exists(served.path)


def orphan(node: Node) -> None:
    """An instance whose owner, a process, is gone."""
    owner = f"jupyter:0:{kernel_id()}"
    answer = command_line.run("--node", node.store.folder, "allocate", "--owner", owner, "--memory", "8000")
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


# Configuration


def test_reload_puts_a_changed_file_into_force_and_says_so(start: Start, node: Node) -> None:
    served = start().ready()
    before = served.ask("GET", "/v1/service").plain["config"]
    node_service.configure(node, "user_instances = 3")

    stale = command_line.run("--node", node.store.folder, "status")
    doctor = command_line.run("--node", node.store.folder, "doctor")
    answer = command_line.run("--node", node.store.folder, "reload", "--json")
    after = served.ask("GET", "/v1/service").plain
    fresh = command_line.run("--node", node.store.folder, "status", "--json").plain["service"]
    well = command_line.run("--node", node.store.folder, "doctor")

    assert "which changed since: gres-mig reload" in stale.flat
    assert "changed since the service read it" in doctor.flat
    assert answer.plain["sha256"] == after["config"]["sha256"] != before["sha256"]
    assert after["limits"]["user_instances"] == 3
    assert (fresh["version"], fresh["config"]["sha256"]) == (__version__, after["config"]["sha256"])
    assert "of this version, with this configuration" in well.flat


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('placement = "spred"', r"config.toml:2: placement: found \"spred\".*"),
        ('state_dir = "elsewhere"', r".*state_dir cannot change while the service runs; run: systemctl restart .*"),
    ],
)
def test_reload_refuses_a_wrong_file_and_the_old_one_stays(start: Start, node: Node, line: str, said: str) -> None:
    served = start().ready()
    before = served.ask("GET", "/v1/service").plain["config"]
    node_service.configure(node, line)

    answer = command_line.run("--node", node.store.folder, "reload")
    served.process.send_signal(signal.SIGHUP)
    until(lambda: served.ask("GET", "/v1/service").plain["config"]["error"])
    after = served.ask("GET", "/v1/service").plain["config"]
    kernel = make(served)

    assert answer.code == 4
    assert re.search(said, answer.err)
    assert (after["sha256"], after["loaded"]) == (before["sha256"], before["loaded"])
    assert re.search(said, after["error"])
    assert served.ask("GET", at(kernel)).status == 200


def test_reload_without_a_service_says_how_to_start_it(node: Node) -> None:
    node_service.configure(node, "")

    answer = command_line.run("--node", node.store.folder, "reload")

    assert answer.code == 2
    assert answer.err == "gres-mig: no service runs on this node; run: systemctl start gres-mig\n"


def test_doctor_says_when_the_service_is_of_another_version(start: Start, node: Node) -> None:
    served = start().ready()
    run_dir = str(served.folder / "run")
    here = presence.running(run_dir)
    assert here is not None
    presence.tell(run_dir, replace(here, version="0.0.1"))

    doctor = command_line.run("--node", node.store.folder, "doctor")
    status = command_line.run("--node", node.store.folder, "status")

    assert f"is gres-mig 0.0.1, installed is {__version__}" in doctor.flat
    assert "service 0.0.1 (installed is" in status.flat


# Upgrade, crashes, hangs


def test_an_upgrade_under_load_loses_nothing(start: Start, node: Node) -> None:
    served = start().ready()
    over, wrong, made = threading.Event(), list[object](), list[str]()

    def ask(method: str, kernel: str, body: object = None) -> node_service.Answer:
        while True:
            with contextlib.suppress(ConnectionError):
                return node_service.ask(served.path, method, at(kernel), body)
            # As a client does: not as fast as it can.
            over.wait(0.05)

    def live() -> None:
        while not over.is_set():
            kernel = kernel_id()
            answers = [ask("PUT", kernel, FULL), ask("PUT", kernel, FULL), ask("DELETE", kernel)]
            if answers[0].status not in (200, 201) or answers[1].status != 200 or answers[2].status != 200:
                wrong.append(answers)
            made.append(kernel)

    threads = [threading.Thread(target=live) for _ in range(4)]
    for thread in threads:
        thread.start()
    ended = []
    for number in (signal.SIGTERM, signal.SIGTERM):
        done = len(made)
        until(lambda done=done: len(made) > done + 2)  # type: ignore[misc]
        ended.append(served.end(number)[0])
        served = start().ready()
    over.set()
    for thread in threads:
        thread.join(60)

    assert ended == [0, 0]
    assert wrong == []
    assert node_service.records(node) == ()
    assert not node.instances()


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
    links = (os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd"))
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


# Owners


def test_a_server_that_ends_without_a_word_leaves_nothing(start: Start, node: Node) -> None:
    node_service.need_root()
    served = start("--every", "0.2").ready()
    with node_service.callers(served.path) as starts:
        server = starts(*node_service.user(OWNER))
        made = server.ask("PUT", at(kernel_id()), FULL)
    node_service.aged(node, OLD_S)

    until(lambda: not node.instances())

    assert made.status == 201
    until(lambda: not node_service.records(node))


def test_a_kernel_that_outlives_its_server_keeps_its_instance_until_it_ends(start: Start, node: Node) -> None:
    node_service.need_root()
    served = start().ready()
    with node_service.sleeping(*node_service.user(OWNER)) as process:
        with node_service.callers(served.path) as starts:
            server, kernel = starts(*node_service.user(OWNER)), kernel_id()
            server.ask("PUT", at(kernel), FULL)
            server.ask("POST", f"{at(kernel)}/process", {"pid": process.pid})
        node_service.aged(node, UNREPORTED_S + OLD_S)
        node_service.one_pass(node)
        kept = len(node.instances())
    node_service.one_pass(node)

    assert kept == 1
    assert not node.instances()


def test_a_server_whose_kernel_died_keeps_the_instance_for_its_restart(start: Start, node: Node) -> None:
    served = start().ready()
    kernel = make(served)
    with node_service.sleeping() as process:
        served.ask("POST", f"{at(kernel)}/process", {"pid": process.pid})
    node_service.aged(node, UNREPORTED_S + OLD_S)

    node_service.one_pass(node)
    again = served.ask("PUT", at(kernel), FULL)

    assert again.status == 200


@pytest.mark.parametrize("judge", ["the service", "gres-mig reconcile"])
def test_a_kernel_that_is_not_reported_within_a_minute_gets_no_more(start: Start, node: Node, judge: str) -> None:
    served = start().ready()
    make(served)

    def settle() -> None:
        if judge == "the service":
            node_service.one_pass(node)
        else:
            assert command_line.run("--node", node.store.folder, "reconcile").code == 0

    node_service.aged(node, UNREPORTED_S - OLD_S)
    settle()
    before = len(node.instances())
    node_service.aged(node, OLD_S)
    settle()

    assert before == 1
    assert not node.instances()


def test_asking_again_for_a_reported_kernel_makes_it_no_unreported_one(start: Start, node: Node) -> None:
    served = start().ready()
    kernel = make(served)
    served.ask("POST", f"{at(kernel)}/process", {"pid": os.getpid()})
    served.ask("PUT", at(kernel), FULL)
    node_service.aged(node, UNREPORTED_S + OLD_S)

    node_service.one_pass(node)

    assert served.ask("GET", at(kernel)).status == 200


def test_a_later_process_with_the_pid_of_a_witness_is_not_that_witness(start: Start, node: Node) -> None:
    served = start().ready()
    kernel = make(served)
    served.ask("POST", f"{at(kernel)}/process", {"pid": os.getpid()})
    other = Process(os.getpid(), machine.this_process().start - 1)
    node_service.change(node, lambda record: replace(record, witnesses=(other, other)))
    node_service.aged(node, OLD_S)

    node_service.one_pass(node)

    assert not node.instances()


def test_a_process_that_began_after_its_report_is_another_one() -> None:
    me = peer.Peer(os.getpid(), os.geteuid(), machine.this_process().start, owns=True)
    before_ns = machine.now_ns()
    # A process begins in a tick of 10 ms, and its start is rounded down.
    until(lambda: machine.now_ns() > before_ns + 20_000_000)

    with node_service.sleeping() as process:
        with pytest.raises(BadRequest, match="began after it was reported"):
            peer.reported(me, process.pid, before_ns)
        found = peer.reported(me, process.pid, machine.now_ns())

    assert found.pid == process.pid


def test_an_end_that_comes_while_the_instance_is_made_wins(start: Start, node: Node) -> None:
    served = start().ready()
    kernel = kernel_id()
    hang = node.plant("nvmlGpuInstanceCreateComputeInstance", "hangs", count="node")
    answers: list[node_service.Answer] = []
    thread = threading.Thread(target=lambda: answers.append(served.ask("PUT", at(kernel), FULL)))
    thread.start()
    until(lambda: node.fired(hang))
    ended: list[node_service.Answer] = []
    ending = threading.Thread(target=lambda: ended.append(served.ask("DELETE", at(kernel))))
    ending.start()
    until(lambda: any(type(record).__name__ == "Release" for record in node_service.records(node)))
    node.release(hang)
    thread.join(60)
    ending.join(60)

    assert [(answer.status, answer.code) for answer in answers] == [(503, "ENDED")]
    assert [answer.status for answer in ended] == [200]
    assert not node.instances()

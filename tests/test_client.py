"""The node service's caller: what it takes for an answer, and whom it takes for the service."""

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from notebook_server import OTHER_USER, PATIENCE_S, USER, Host, require_user, until

from gres_mig.client import Client
from gres_mig.errors import BadRequest, Conflict, Fault, GresMigError, NoCapacity, NodeFault, NotFound, TooBig

KERNEL = "a1111111-2222-4333-8444-555555555555"
NOBODYS = "c1111111-2222-4333-8444-555555555555"


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """A node with its service."""
    with Host() as host:
        host.serve()
        yield host


@pytest.fixture
def client(host: Host) -> Iterator[Client]:
    """Asks it; what its kernel has is given back."""
    client = Client(host.settings)
    yield client
    client.reclaim(KERNEL)


@contextmanager
def listener(path: Path, answers: Callable[[socket.socket], None]) -> Iterator[None]:
    """Somebody who listens there and does that with each connection."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def serve() -> None:
            while True:
                try:
                    channel, _ = listening.accept()
                except OSError:
                    return
                with channel:
                    answers(channel)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE_S)


def said(status: str, body: str) -> Callable[[socket.socket], None]:
    """Answer a request with that."""

    def answer(channel: socket.socket) -> None:
        channel.recv(65536)
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body.encode())}\r\nConnection: close\r\n\r\n"
        channel.sendall((head + body).encode())

    return answer


def mine(path: Path) -> Client:
    """A client that takes this very user for the service's, as on a simulated node of his own."""
    client = Client(str(path), timeout_s=5.0)
    client._trusted = {0, os.geteuid()}
    return client


def test_a_kernels_life(client: Client) -> None:
    made = client.allocate(KERNEL, memory="8000")
    again = client.allocate(KERNEL, memory="8000")
    reported = client.report(KERNEL, os.getpid())
    seen = client.kernel(KERNEL)
    (gone,) = client.reclaim(KERNEL)

    assert (made["created"], again["created"]) == (True, False)
    assert made["environment"]["CUDA_VISIBLE_DEVICES"] == made["mig_uuid"] == again["mig_uuid"]
    assert int(made["environment"]["GRES_MIG_SINCE"]) == int(made["since"])
    assert reported["server"] == reported["kernel"] == {"pid": os.getpid()}
    assert seen is not None
    assert seen["mig_uuid"] == made["mig_uuid"]
    assert gone["verdict"] == "released"
    assert client.kernel(KERNEL) is None
    assert client.reclaim(KERNEL) == []


def test_it_says_what_the_node_has(client: Client) -> None:
    client.allocate(KERNEL, profile="4g.96gb")

    assert [kernel["kernel_id"] for kernel in client.kernels()] == [KERNEL]
    assert client.service()["pid"] > 1
    assert {size["memory_mib"]: size["free"] for size in client.sizes()} == {24192: 0, 48512: 0, 97280: 0}
    assert client.why("8000")["text"].startswith("no room for 8,000 MiB on this node")


@pytest.mark.parametrize(
    ("ask", "kind", "code"),
    [
        (lambda client: client.allocate(KERNEL, memory="900G"), TooBig, "TOOBIG"),
        (lambda client: client.allocate("../../evil", memory="8G"), BadRequest, "BADREQ"),
        (lambda client: client.allocate(KERNEL, memory="8Q"), BadRequest, "BADREQ"),
        (lambda client: client.allocate(KERNEL), BadRequest, "BADREQ"),
        (lambda client: client.report(NOBODYS, os.getpid()), NotFound, "NOTFOUND"),
        (lambda client: client.why("x"), BadRequest, "BADREQ"),
    ],
    ids=["too big", "no kernel", "no size", "nothing", "unknown", "why nothing"],
)
def test_an_error_is_the_same_here_as_there(
    client: Client, ask: Callable[[Client], object], kind: type[GresMigError], code: str
) -> None:
    with pytest.raises(kind) as refused:
        ask(client)

    assert refused.value.code == code
    assert refused.value.message


def test_another_request_of_the_same_kernel_is_a_conflict_and_a_full_node_is_capacity(client: Client) -> None:
    client.allocate(KERNEL, profile="4g.96gb")

    with pytest.raises(Conflict):
        client.allocate(KERNEL, memory="8000")
    with pytest.raises(NoCapacity) as full:
        client.allocate(NOBODYS, memory="8000")
    assert full.value.fault is Fault.CAPACITY


@pytest.mark.parametrize(
    "answer",
    [
        said("200 OK", "[]"),
        said("200 OK", "not JSON"),
        said("503 Service Unavailable", "{}"),
        said("500 Internal Server Error", '{"error": {"fault": "mine", "code": "X", "message": "", "hint": ""}}'),
        lambda channel: channel.sendall(b"220 smtp.example ESMTP\r\n"),
    ],
    ids=["a list", "no JSON", "no error", "no fault", "no HTTP"],
)
def test_an_answer_that_is_none_is_the_nodes_fault(tmp_path: Path, answer: Callable[[socket.socket], None]) -> None:
    with listener(tmp_path / "s", answer), pytest.raises(NodeFault, match="answers what is no answer"):
        mine(tmp_path / "s").service()


def test_one_that_closes_the_connection_is_asked_again(tmp_path: Path) -> None:
    """So does a service that is restarted; every request may be repeated."""
    turns = iter([lambda channel: None, said("200 OK", json.dumps({"pid": 7}))])

    def one_after_the_other(channel: socket.socket) -> None:
        next(turns)(channel)

    with listener(tmp_path / "s", one_after_the_other):
        assert mine(tmp_path / "s").service() == {"pid": 7}


def test_one_that_never_answers_is_given_up(tmp_path: Path) -> None:
    over = threading.Event()

    def keeps_silent(_: socket.socket) -> None:
        over.wait(PATIENCE_S)

    with listener(tmp_path / "s", keeps_silent):
        # Not after the five seconds that an operation may take: it is asked first whether it is there at all.
        with pytest.raises(NodeFault, match=r"does not answer .*: nothing came within 3 s") as silent:
            mine(tmp_path / "s").allocate(KERNEL, memory="8000")
        over.set()

    assert silent.value.code == "TIMEOUT"


@pytest.mark.parametrize("left", ["nothing", "a file", "an old socket"])
def test_without_a_service_it_says_where_it_looked(tmp_path: Path, left: str) -> None:
    path = tmp_path / "service.sock"
    if left == "a file":
        path.touch()
    elif left == "an old socket":
        with socket.socket(socket.AF_UNIX) as ended:
            ended.bind(str(path))

    with pytest.raises(NodeFault) as down:
        mine(path).allocate(KERNEL, memory="8000")

    assert down.value.message.startswith(f"the node service of this node does not answer ({path}): ")
    assert down.value.code == "STATE"


def test_a_service_that_is_stopped_in_a_debugger_is_given_up(host: Host, client: Client) -> None:
    pid = client.service()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(NodeFault, match="nothing came within 3 s"):
            client.allocate(KERNEL, memory="8000")
    finally:
        os.kill(pid, signal.SIGCONT)

    assert host.record_of(KERNEL) is None


def test_who_listens_in_the_services_place_is_told_nothing() -> None:
    """Another user's socket, planted where the service's should be."""
    require_user(USER)
    with Host() as host:
        path = Path(host.settings.run_dir) / "service.sock"
        path.parent.mkdir(exist_ok=True)
        os.chown(path.parent, pwd.getpwnam(OTHER_USER).pw_uid, -1)
        code = (
            "import socket, sys\n"
            "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen()\n"
            "import os; os.chmod(sys.argv[1], 0o666)\n"
            "c, _ = s.accept(); print(len(c.recv(1)), flush=True)\n"
        )
        as_other = ["setpriv", f"--reuid={OTHER_USER}", "--clear-groups"]
        words = [*as_other, sys.executable, "-c", code, str(path)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as planted:
            until(lambda: path.exists() and path.stat().st_mode & 0o002, "it listens")
            with pytest.raises(NodeFault, match="is not the node service's: uid") as refused:
                Client(host.settings).service()
            heard, _ = planted.communicate(timeout=PATIENCE_S)

    assert refused.value.code == "NOPERM"
    assert heard.strip() == "0"


def test_root_is_trusted_on_everybodys_node(host: Host) -> None:
    if os.geteuid() != 0:
        pytest.skip("the service of this test is not root's")

    assert Client(str(host.socket)).service()["pid"] > 1

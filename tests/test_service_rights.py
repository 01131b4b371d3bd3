"""Who may do what at the service's socket: the table, and every cell of it tried by a process that is really that."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import node_service
import pytest
from node_service import FULL, OTHER, OWNER, Answer, Caller, Service, kernel_id

from gres_mig.service.peer import Users

IN_A_CONTAINER = ("unshare", "--user", "--map-root-user")
WITH_ITS_OWN_PIDS = (*IN_A_CONTAINER, "--pid", "--fork", "--mount-proc")

CALLERS: dict[str, tuple[tuple[str, ...], str]] = {
    "owner uid": (node_service.user(OWNER), "owner"),
    "other uid": (node_service.user(OTHER), "stranger"),
    "root": ((), "stranger"),
    "overflow uid": (node_service.user(65534), "nobody"),
    "owner in a rootless container": ((*node_service.user(OWNER), *IN_A_CONTAINER), "owner"),
    "owner in another pid namespace": ((*node_service.user(OWNER), *WITH_ITS_OWN_PIDS), "owner"),
    "other uid in a rootless container": ((*node_service.user(OTHER), *WITH_ITS_OWN_PIDS), "stranger"),
    "overflow uid in a rootless container": ((*node_service.user(65534), *IN_A_CONTAINER), "nobody"),
}
"""How each is started, and what it is to a kernel of the owner's."""


class Cell(NamedTuple):
    """What one of them gets for an operation."""

    status: int
    shows: str = ""
    """Of the owner's kernel: `it`, `nothing`, or `another` of the same id that is the caller's own."""


RIGHTS: dict[str, dict[str, Cell]] = {
    "GET /v1/service": dict.fromkeys(("owner", "stranger", "nobody"), Cell(200, "nothing")),
    "GET /v1/sizes": dict.fromkeys(("owner", "stranger", "nobody"), Cell(200, "nothing")),
    "GET /v1/why?memory=8000": dict.fromkeys(("owner", "stranger", "nobody"), Cell(200, "nothing")),
    "GET /v1/health": dict.fromkeys(("owner", "stranger", "nobody"), Cell(200, "nothing")),
    "GET /v1/openapi.json": dict.fromkeys(("owner", "stranger", "nobody"), Cell(200, "nothing")),
    "GET /metrics": dict.fromkeys(("owner", "stranger", "nobody"), Cell(200, "nothing")),
    "GET /v1/kernels": {"owner": Cell(200, "it"), "stranger": Cell(200, "nothing"), "nobody": Cell(403, "nothing")},
    "GET /v1/kernels/ID": {"owner": Cell(200, "it"), "stranger": Cell(404, "nothing"), "nobody": Cell(403, "nothing")},
    "PUT /v1/kernels/ID": {"owner": Cell(200, "it"), "stranger": Cell(201, "another"), "nobody": Cell(403, "nothing")},
    "POST /v1/kernels/ID/process": {
        "owner": Cell(200, "it"),
        "stranger": Cell(404, "nothing"),
        "nobody": Cell(403, "nothing"),
    },
    "DELETE /v1/kernels/ID": {
        "owner": Cell(200, "it"),
        "stranger": Cell(200, "nothing"),
        "nobody": Cell(403, "nothing"),
    },
}


@pytest.fixture(scope="module")
def running() -> Iterator[Service]:
    node_service.need_root()
    with node_service.shared("user_requests = 0") as service:
        yield service


service = node_service.cleaned


@pytest.fixture(scope="module")
def caller(running: Service) -> Iterator[Callable[[str], Caller]]:
    """Each started once."""
    with node_service.callers(running.path) as start:
        started: dict[str, Caller] = {}

        def get(name: str) -> Caller:
            if name not in started:
                started[name] = start(*CALLERS[name][0])
            return started[name]

        yield get


def kernel_of(owner: Caller) -> dict[str, Any]:
    """One that the owner has."""
    made = owner.ask("PUT", f"/v1/kernels/{kernel_id()}", FULL)
    assert made.status == 201, made
    return made.plain


@pytest.mark.parametrize("operation", RIGHTS)
@pytest.mark.parametrize("name", CALLERS)
def test_every_cell_of_the_table(service: Service, caller: Callable[[str], Caller], name: str, operation: str) -> None:
    kernel = kernel_of(caller("owner uid"))
    cell = RIGHTS[operation][CALLERS[name][1]]
    asking = caller(name)
    method, path = operation.replace("ID", kernel["kernel_id"]).split()
    body = {"PUT": FULL, "POST": {"pid": asking.own_pid}}.get(method)

    answer = asking.ask(method, path, body)
    after = caller("owner uid").ask("GET", f"/v1/kernels/{kernel['kernel_id']}")

    assert answer.status == cell.status, answer
    if method == "DELETE" and cell.shows == "it":
        assert [outcome["gpu_uuid"] for outcome in answer.plain["reclaimed"]] == [kernel["gpu_uuid"]]
        assert after.status == 404
    else:
        shown = str(answer.plain)
        assert (kernel["mig_uuid"] in shown) == (cell.shows == "it")
        assert ("mig_uuid" in shown) == (cell.shows in ("it", "another")) or "openapi" in operation
        assert f"jupyter:{OWNER}:" not in shown or cell.shows == "it"
        assert after.status == 200
        assert after.plain["mig_uuid"] == kernel["mig_uuid"]


def test_another_users_kernel_is_answered_as_one_that_does_not_exist(
    service: Service, caller: Callable[[str], Caller]
) -> None:
    theirs, none = kernel_of(caller("owner uid"))["kernel_id"], kernel_id()
    other = caller("other uid")

    def answers(kernel: str) -> list[Answer]:
        asked = [
            other.ask("GET", f"/v1/kernels/{kernel}"),
            other.ask("POST", f"/v1/kernels/{kernel}/process", {"pid": other.own_pid}),
            other.ask("DELETE", f"/v1/kernels/{kernel}"),
        ]
        return [Answer(a.status, {"said": str(a.plain).replace(kernel, "KERNEL")}) for a in asked]

    assert answers(theirs) == answers(none)


@pytest.mark.parametrize("name", [name for name, (_, kind) in CALLERS.items() if kind == "owner"])
def test_the_server_is_who_connected_as_this_host_counts_processes(
    service: Service, caller: Callable[[str], Caller], name: str
) -> None:
    asking = caller(name)

    kernel = kernel_of(asking)

    host_pid = kernel["server"]["pid"]
    assert Path(f"/proc/{host_pid}/status").read_text().split("NSpid:")[1].split("\n")[0].split()[-1] == str(
        asking.own_pid
    )
    assert kernel["owner"] == f"jupyter:{OWNER}:{kernel['kernel_id']}"


def test_a_kernel_in_a_container_is_reported_by_the_containers_own_number(
    service: Service, caller: Callable[[str], Caller]
) -> None:
    asking = caller("owner in another pid namespace")
    kernel = kernel_of(asking)

    answer = asking.ask("POST", f"/v1/kernels/{kernel['kernel_id']}/process", {"pid": asking.own_pid})

    assert asking.own_pid == 1
    assert answer.plain["kernel"] == kernel["server"]


@pytest.mark.parametrize("name", ["owner in a rootless container", "owner uid"])
def test_a_process_of_another_user_is_nobodys_kernel(
    service: Service, caller: Callable[[str], Caller], name: str
) -> None:
    asking = caller(name)
    kernel = kernel_of(asking)

    with node_service.sleeping(*node_service.user(OTHER)) as process:
        answer = asking.ask("POST", f"/v1/kernels/{kernel['kernel_id']}/process", {"pid": process.pid})

    assert (answer.status, answer.code) == (403, "NOPERM")
    assert answer.message == f"process {process.pid} is not your own"


def test_a_process_outside_the_callers_pid_namespace_does_not_exist_for_it(
    service: Service, caller: Callable[[str], Caller]
) -> None:
    asking = caller("owner in another pid namespace")
    kernel = kernel_of(asking)

    with node_service.sleeping(*node_service.user(OWNER)) as process:
        answer = asking.ask("POST", f"/v1/kernels/{kernel['kernel_id']}/process", {"pid": process.pid})

    assert (answer.status, answer.message) == (400, f"there is no process {process.pid}")


def test_a_passed_connection_is_still_that_of_who_connected(service: Service, caller: Callable[[str], Caller]) -> None:
    kernel = kernel_of(caller("owner uid"))
    with node_service.connected(service.path) as connection:
        code = "import os, sys; os.write(int(sys.argv[1]), b'GET /v1/kernels HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')"
        words = [*node_service.user(OWNER), node_service.SYSTEM_PYTHON, "-c", code, str(connection.fileno())]
        node_service.run(words, pass_fds=(connection.fileno(),))
        answer = b""
        while part := connection.recv(65536):
            answer += part

    assert b'"kernels":[]' in answer
    assert kernel["mig_uuid"].encode() not in answer


def test_subordinate_ids_are_no_users_of_their_own(tmp_path: Path) -> None:
    """Each would have limits of its own, and whoever starts a container has 65,536."""
    uid = 0
    lines = {
        "alice:0:65536": False,
        "alice:100000:65536": True,
        "alice:0:1": True,
        "root:0:1000000000": True,
        "nonsense": True,
    }

    found = {}
    for line in lines:
        (file := tmp_path / "subuid").write_text(line + "\n")
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        with ours, theirs:
            peer = Users(subordinate=str(file)).peer(ours)
        found[line] = peer.owns
        assert peer.uid == uid

    assert found == lines

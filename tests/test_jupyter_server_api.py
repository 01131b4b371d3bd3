"""What a real Jupyter server answers about GPU memory, to whom, and what it tells its event listeners."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import websocket
from notebook_server import PATIENCE_S, Host, Server, gpu_spec

SPECS: dict[str, Any] = {"gpu": gpu_spec(8000), "plain": {**gpu_spec(name="Python 3"), "metadata": {}}}
PATHS = ["status", "profiles", f"kernels/{uuid.UUID(int=0)}", "why?memory=8000"]
DENYING = """
from jupyter_server.auth import Authorizer

class Denying(Authorizer):
    def is_authorized(self, handler, user, action, resource):
        return (action, resource) != ("read", "gres-mig")

c.ServerApp.authorizer_class = Denying
"""


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """A node of one GPU, with a service."""
    with Host() as host:
        host.serve()
        yield host


@pytest.fixture(scope="module")
def server(host: Host) -> Server:
    """A server that the tests share."""
    return host.server(specs=SPECS)


def api(path: str) -> str:
    """The path of one of ours."""
    return f"/gres-mig/api/v1/{path}"


def test_the_status_names_the_way_and_what_this_server_holds(server: Server) -> None:
    kernel = server.kernel("gpu")
    told = kernel.environment()
    status = server.get(api("status"))
    kernel.shutdown()

    assert status["way"] == "service"
    assert status["share"] == "kernel"
    assert status["service"]["pid"] > 0
    assert [(each["kernel_id"], each["mig_uuid"]) for each in status["allocations"]] == [
        (kernel.id, told["GRES_MIG_UUID"])
    ]
    assert server.get(api("status"))["allocations"] == []


def test_profiles_are_the_sizes_with_how_many_are_free(server: Server) -> None:
    kernel = server.kernel("gpu")
    while_held = {each["profile"]: each for each in server.get(api("profiles"))["profiles"]}
    kernel.shutdown()

    assert while_held["1g.24gb"]["memory_mib"] == 24192
    assert while_held["1g.24gb"]["free"] == 3
    assert while_held["4g.96gb"]["free"] == 0


def test_a_kernels_own_path_says_what_it_has_and_nothing_of_it_when_it_is_gone(server: Server) -> None:
    kernel = server.kernel("gpu")
    held = server.get(api(f"kernels/{kernel.id}"))
    kernel.shutdown()
    gone = server.ask("GET", api(f"kernels/{kernel.id}"))

    assert held["error"] is None
    assert held["allocation"]["profile"]["name"] == "1g.24gb"
    assert gone.code == 404


def test_a_refused_kernels_own_path_says_why(host: Host, server: Server) -> None:
    kernels = [server.kernel("gpu") for _ in range(4)]
    wanted = str(uuid.uuid4())
    refused = server.ask("POST", "/api/kernels", {"name": "gpu", "kernel_id": wanted})
    told = server.get(api(f"kernels/{wanted}"))
    for kernel in kernels:
        kernel.shutdown()

    assert refused.code == 503
    error = {"message": refused.body["message"].replace("\n", " "), "fault": "capacity", "code": "NOCAP"}
    assert told == {"kernel_id": wanted, "allocation": None, "error": error}


def test_why_says_whether_a_size_would_find_a_place(server: Server) -> None:
    assert "8,000 MiB" in server.get(api("why?memory=8000"))["text"]


@pytest.mark.parametrize(("size", "code"), [("900G", 400), ("much", 400), ("", 400), ("--help", 400), ("-5", 400)])
def test_why_refuses_what_is_no_size_here(server: Server, size: str, code: int) -> None:
    reply = server.ask("GET", api(f"why?memory={size}"))

    assert reply.code == code
    assert reply.body["message"]
    assert reply.body["fault"] == "request"


@pytest.mark.parametrize("path", PATHS)
def test_nobody_is_answered_without_credentials(server: Server, path: str) -> None:
    assert server.ask("GET", api(path), token="").code == 403
    assert server.ask("GET", api(path), token="another").code == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_nothing_can_be_changed_over_it(server: Server, method: str) -> None:
    assert server.ask(method, api("status"), {}).code == 405


def test_a_server_whose_authorizer_denies_it_answers_nobody(host: Host) -> None:
    server = host.server(conf=DENYING)

    assert [server.ask("GET", api(path)).code for path in PATHS] == [403] * len(PATHS)
    assert server.ask("GET", "/api/kernels").code == 200


def test_polling_is_no_activity(server: Server) -> None:
    server.get("/api/kernels")
    before = server.get("/api/status")["last_activity"]
    for path in PATHS:
        server.ask("GET", api(path))

    assert server.get("/api/status")["last_activity"] == before


def test_listeners_are_told_of_instances_and_of_no_secret(host: Host, server: Server) -> None:
    url = f"ws://127.0.0.1:{server.port}/api/events/subscribe"
    channel = websocket.create_connection(url, timeout=PATIENCE_S, header=[f"Authorization: token {server.token}"])
    kernel = server.kernel("gpu")
    mig_uuid = kernel.environment()["GRES_MIG_UUID"]
    kernel.restart()
    kernel.shutdown()
    server.add_spec("too-big", gpu_spec("900G"))
    server.ask("POST", "/api/kernels", {"name": "too-big"})
    told: list[dict[str, Any]] = []
    while len(told) < 3:
        event = json.loads(channel.recv())
        if event["schema_id"] == "urn:gres-mig:jupyter:instances:v1":
            told.append({name: value for name, value in event.items() if not name.startswith("__")})
    channel.close()

    assert [event["action"] for event in told] == ["allocate", "reclaim", "refuse"]
    assert [event["kernel_id"] for event in told[:2]] == [kernel.id] * 2
    assert told[0]["mig_uuid"] == mig_uuid
    assert told[0]["memory_mib"] == 24192
    assert told[1]["verdict"] == "released"
    assert told[2]["code"] == "TOOBIG"
    assert server.token not in json.dumps(told)


def test_where_there_is_nothing_for_it_one_warning_says_so_and_other_kernels_start(host: Host) -> None:
    server = host.server(specs=SPECS, variables={"GRES_MIG_NODE": "/nonexistent"})
    refused = server.ask("POST", "/api/kernels", {"name": "gpu"})
    said = [line for line in server.log().splitlines() if "no GPU memory for kernels" in line]

    assert len(said) == 1
    assert server.kernel("plain").run("1 + 1") == "2"
    assert refused.code == 500
    reason = refused.body["message"].replace("\n", " ")
    assert reason in said[0]
    status = server.get(api("status"))
    assert (status["way"], status["reason"]) == ("none", reason)
    assert server.ask("GET", api("profiles")).code == 500

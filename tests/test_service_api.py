"""The service's socket: what each request answers, and what the OpenAPI document says of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import command_line
import node_service
import pytest
from node_service import FULL, Service, at, kernel_id

from gres_mig import __version__, machine, presence
from gres_mig.service import openapi
from gres_mig.service.endpoints import ENDPOINTS
from gres_mig.simulator.admin import Node

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def running() -> Iterator[Service]:
    with node_service.shared("user_requests = 0") as service:
        yield service


service, node = node_service.cleaned, node_service.of_service


def test_a_kernel_gets_an_instance_once_and_gives_it_back_once(service: Service, node: Node) -> None:
    kernel = kernel_id()

    made, again = (service.ask("PUT", at(kernel), FULL) for _ in range(2))
    there = len(node.instances())
    gone, gone_before = (service.ask("DELETE", at(kernel)) for _ in range(2))

    assert (made.status, made.plain["created"]) == (201, True)
    assert (again.status, again.plain["created"]) == (200, False)
    assert made.plain["mig_uuid"] == again.plain["mig_uuid"]
    assert there == 1
    assert [outcome["verdict"] for outcome in gone.plain["reclaimed"]] == ["released"]
    assert (gone_before.status, gone_before.plain["reclaimed"]) == (200, [])
    assert not node.instances()


@pytest.mark.parametrize("body", [{"memory": 8000}, {"memory": "8000"}, {"memory": "8000M"}, {"profile": "1g.24gb"}])
def test_a_size_is_a_number_or_has_a_unit_or_is_a_profile(service: Service, body: dict[str, object]) -> None:
    answer = service.ask("PUT", at(kernel_id()), body)

    assert answer.status == 201
    assert answer.plain["profile"]["name"] == "1g.24gb"


def test_the_answer_has_what_the_kernel_is_started_with(service: Service) -> None:
    answer = service.ask("PUT", at(kernel_id()), FULL)

    assert answer.plain["environment"]["CUDA_VISIBLE_DEVICES"] == answer.plain["mig_uuid"]
    assert answer.plain["environment"]["GRES_MIG_MEMORY_MIB"] == "24192"
    assert answer.plain["state"] == "allocated"
    assert answer.plain["kernel"] is None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (None, "the body"),
        ({}, "ask for a memory size or for a profile, one of the two"),
        ({"memory": 8000, "profile": "1g.24gb"}, "one of the two"),
        ({"memory": 0}, "memory size '0': nothing is asked for"),
        ({"memory": "8GB"}, "memory size '8GB': GB is not a unit"),
        ({"memory": True}, "the body, memory"),
        ({"memory": 8000.5}, "the body, memory"),
        ({"memory": 8000, "gpu": "GPU-1"}, "the body, gpu"),
        ({"profile": "1g 24gb"}, "is no name of a profile"),
        ([], "the body"),
        ({"memory": 10**7}, "the largest is 4g.96gb"),
    ],
)
def test_a_body_that_is_not_a_request_gets_one_line(service: Service, body: object, said: str) -> None:
    answer = service.ask("PUT", at(kernel_id()), body)

    assert answer.status == 400
    assert answer.plain["error"]["fault"] == "request"
    assert said in answer.message
    assert "\n" not in answer.message


@pytest.mark.parametrize("kernel", ["../../evil", "%2e%2e%2fevil", "KERNEL", "%00", "a" * 300])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_kernel_that_is_no_uuid_is_refused(service: Service, node: Node, method: str, kernel: str) -> None:
    answer = service.ask(method, at(kernel), FULL if method == "PUT" else None)

    assert answer.status in (400, 404)
    assert answer.plain["error"]["fault"] == "request"
    assert node_service.records(node) == ()


def test_the_same_kernel_cannot_have_something_else_as_well(service: Service) -> None:
    kernel = kernel_id()
    service.ask("PUT", at(kernel), FULL)

    answer = service.ask("PUT", at(kernel), {"memory": 30000})

    assert (answer.status, answer.code) == (400, "CONFLICT")
    assert "gres-mig reclaim" not in answer.plain["error"]["hint"]


def test_no_place_is_no_fault_of_the_node(service: Service) -> None:
    for _ in range(2):
        service.ask("PUT", at(kernel_id()), {"memory": 97000})

    answer = service.ask("PUT", at(kernel_id()), FULL)

    assert (answer.status, answer.plain["error"]["fault"], answer.code) == (503, "capacity", "NOCAP")
    assert "no room for 8,000 MiB" in answer.message


def test_the_sizes_say_how_many_could_be_made_now(service: Service) -> None:
    before = service.ask("GET", "/v1/sizes").plain["sizes"]
    service.ask("PUT", at(kernel_id()), FULL)
    after = service.ask("GET", "/v1/sizes").plain["sizes"]

    def free(sizes: list[dict[str, object]]) -> dict[object, object]:
        return {size["memory_mib"]: size["free"] for size in sizes}

    assert free(before) == {24192: 8, 48512: 4, 97280: 2}
    assert free(after) == {24192: 7, 48512: 3, 97280: 1}


def test_why_says_where_a_request_would_go_and_names_no_owner(service: Service, node: Node) -> None:
    fits = service.ask("GET", "/v1/why?memory=8G").plain
    for name in ("secret", "secrets"):
        command_line.here("--node", service.folder, "allocate", "--owner", f"manual:{name}", "--memory", "97000")
    full = service.ask("GET", "/v1/why?memory=8G").plain

    assert fits["fits"] is True
    assert fits["text"].startswith("8,192 MiB fits: 1g.24gb")
    assert (full["fits"], full["code"]) == (False, "NOCAP")
    assert "secret" not in json.dumps(full)


def test_looking_calls_no_driver(service: Service, node: Node) -> None:
    kernel = kernel_id()
    service.ask("PUT", at(kernel), FULL)
    service.ask("GET", "/v1/health")
    node.plant("nvmlInitWithFlags", "returns", times=0)

    answers = [
        service.ask("GET", path).status
        for path in ("/v1/service", "/v1/sizes", "/v1/why?memory=8G", "/v1/kernels", at(kernel), "/metrics")
    ]

    assert answers == [200] * 6


def test_health_is_a_look_at_the_hardware(service: Service, node: Node) -> None:
    well = service.ask("GET", "/v1/health")
    node.plant("nvmlDeviceGetCount_v2", "returns", times=0)
    command_line.until(lambda: service.ask("GET", "/v1/health").status != 200)
    ill = service.ask("GET", "/v1/health")
    node.mend()
    command_line.until(lambda: service.ask("GET", "/v1/health").status == 200)

    assert (well.status, well.plain["gpus"], well.plain["closed"]) == (200, 2, 0)
    assert (ill.status, ill.plain["error"]["fault"]) == (500, "node")


def test_the_service_says_which_it_is_and_what_is_in_force(service: Service) -> None:
    plain = service.ask("GET", "/v1/service").plain

    assert (plain["version"], plain["pid"]) == (__version__, service.process.pid)
    assert plain["config"]["sha256"] == presence.digest(str(service.folder / "config.toml"))
    assert plain["config"]["error"] is None
    assert plain["limits"] == {
        "user_memory_mib": 0, "user_instances": 0, "user_requests": 0, "user_connections": 8,
    }  # fmt: skip


def test_a_kernel_is_a_process_of_the_caller_that_began_before(service: Service) -> None:
    kernel = kernel_id()
    service.ask("PUT", at(kernel), FULL)

    with node_service.sleeping() as process:
        good = service.ask("POST", f"{at(kernel)}/process", {"pid": process.pid})
        other = service.ask("POST", f"{at(kernel)}/process", {"pid": 1})
        seen = service.ask("GET", at(kernel))
    missing = service.ask("POST", f"{at(kernel)}/process", {"pid": 2**22 + 1})
    unknown = service.ask("POST", f"{at(kernel_id())}/process", {"pid": 1})

    assert (good.status, good.plain["kernel"]) == (200, {"pid": process.pid})
    # Process 1 is root's as well, but the kernel that was reported still lives.
    assert (other.status, other.code) == (400, "CONFLICT")
    assert seen.plain["kernel"] == {"pid": process.pid}
    assert (missing.status, missing.message) == (400, f"there is no process {2**22 + 1}")
    assert unknown.status == 404


def test_a_restarted_kernel_takes_the_place_of_the_one_that_ended(service: Service) -> None:
    kernel = kernel_id()
    first = service.ask("PUT", at(kernel), FULL)
    with node_service.sleeping() as process:
        service.ask("POST", f"{at(kernel)}/process", {"pid": process.pid})

    second = service.ask("PUT", at(kernel), FULL)
    with node_service.sleeping() as process:
        reported = service.ask("POST", f"{at(kernel)}/process", {"pid": process.pid})

    assert second.plain["mig_uuid"] == first.plain["mig_uuid"] == reported.plain["mig_uuid"]
    assert reported.plain["kernel"] == {"pid": process.pid}


def test_one_instance_may_serve_all_kernels_of_a_server(service: Service) -> None:
    kernel = kernel_id()
    service.ask("PUT", at(kernel), FULL)

    answer = service.ask("POST", f"{at(kernel)}/process", {"pid": machine.this_process().pid})

    assert answer.plain["server"] == answer.plain["kernel"] == {"pid": machine.this_process().pid}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/v1", 404), ("POST", "/v1/service", 405), ("PATCH", "/v1/kernels", 405),
     ("DELETE", "/v1/kernels", 405), ("GET", "/v1/kernels/", 404), ("BREW", "/v1/service", 405),
     ("GET", "/v1/why", 400), ("GET", "/v1/why?memory=8GB", 400)],
)  # fmt: skip
def test_what_there_is_not_is_answered_as_json(service: Service, method: str, path: str, status: int) -> None:
    answer = service.ask(method, path)

    assert answer.status == status
    assert answer.plain["error"]["fault"] == "request"


def test_the_metrics_name_nobody(service: Service) -> None:
    kernel = kernel_id()
    service.ask("PUT", at(kernel), FULL)
    command_line.here("--node", service.folder, "allocate", "--owner", "manual:secret", "--memory", "8000")

    text = service.ask("GET", "/metrics").plain["text"]

    assert re.search(
        r'^gresmig_instances\{gpu="0",profile="1g.24gb",state="allocation",uuid="GPU-.*"\} 2.0$', text, re.MULTILINE
    )
    assert re.search(r'^gresmig_placements_free\{gpu="1",profile="4g.96gb",uuid="GPU-.*"\} 1.0$', text, re.MULTILINE)
    assert re.search(r'^gresmig_requests_total\{method="PUT",result="ok"\} [1-9]', text, re.MULTILINE)
    assert f'gresmig_build_info{{version="{__version__}"}} 1.0' in text
    assert kernel not in text
    assert "secret" not in text
    labels = {name for names in re.findall(r"\{(.*?)\}", text) for name in re.findall(r"(\w+)=", names)}
    assert labels == {"gpu", "uuid", "kind", "profile", "state", "method", "result", "op", "le", "version"}


def test_the_metrics_are_on_loopback_where_a_port_is_configured(service: Service, free_port: int) -> None:
    import urllib.error
    import urllib.request

    service.reload(f"user_requests = 0\nmetrics_port = {free_port}")
    with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics") as answer:
        text = answer.read().decode()
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{free_port}/v1/kernels")
    refused.value.close()
    service.reload("user_requests = 0")
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics")

    assert "gresmig_gpu_memory_bytes" in text


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_the_document_in_docs_is_that_of_the_code() -> None:
    assert (ROOT / "docs" / "openapi.json").read_text() == openapi.text()


def test_the_document_names_every_path_and_only_fields_that_answers_have(service: Service) -> None:
    kernel = kernel_id()
    asked: dict[str, Callable[[], node_service.Answer]] = {
        "allocate": lambda: service.ask("PUT", at(kernel), FULL),
        "report": lambda: service.ask("POST", f"{at(kernel)}/process", {"pid": machine.this_process().pid}),
        "kernel": lambda: service.ask("GET", at(kernel)),
        "kernels": lambda: service.ask("GET", "/v1/kernels"),
        "service": lambda: service.ask("GET", "/v1/service"),
        "sizes": lambda: service.ask("GET", "/v1/sizes"),
        "why": lambda: service.ask("GET", "/v1/why?memory=8G"),
        "health": lambda: service.ask("GET", "/v1/health"),
        "reclaim": lambda: service.ask("DELETE", at(kernel)),
    }
    document = service.ask("GET", "/v1/openapi.json").plain

    schemas = document["components"]["schemas"]
    assert document == openapi.document()
    assert {endpoint.does.__name__ for endpoint in ENDPOINTS} == set(asked)
    for endpoint in sorted(ENDPOINTS, key=lambda endpoint: list(asked).index(endpoint.does.__name__)):
        answer = asked[endpoint.does.__name__]()
        assert answer.status in (200, 201), answer
        assert set(answer.plain) == set(schemas[endpoint.answer.__name__]["properties"]), endpoint

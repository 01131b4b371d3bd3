"""Much at once: what is only read costs no process, keeps no ask waiting and is no reason to refuse one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import node_service
import pytest
from command_line import until
from node_service import FULL, OTHER, Answer, Service, at, kernel_id

from gres_mig.simulator.admin import Node
from gres_mig.simulator.program import environment

MAKES = "nvmlDeviceCreateGpuInstanceWithPlacement"
ASKS_OF_ONE = 4
"""Pieces of work on the hardware of one user at once."""
FRESH_S = 1.0
"""How old a look is that is not repeated."""


@pytest.fixture(scope="module")
def running() -> Iterator[Service]:
    with node_service.shared("user_requests = 0\nuser_connections = 64\nhardware_timeout = 60") as service:
        yield service


service, node = node_service.cleaned, node_service.of_service


def foreman(service: Service) -> int:
    """The process from which all work is forked."""
    (pid,) = node_service.children(service.process.pid)
    return pid


def send(service: Service, method: str, path: str, body: object = None) -> socket.socket:
    """A request on a connection of its own, whose answer is not read yet."""
    content = b"" if body is None else json.dumps(body).encode()
    connection = node_service.connected(service.path)
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def status(connection: socket.socket) -> int:
    """That of the answer, when it comes."""
    answer = b""
    with connection:
        while part := connection.recv(65536):
            answer += part
    return int(answer.split(b" ", 2)[1])


@contextlib.contextmanager
def hanging(node: Node, function: str = MAKES) -> Iterator[int]:
    """The driver does not return from that call, until the end of this."""
    fault = node.plant(function, "hangs", count="node", times=0)
    try:
        yield fault
    finally:
        node.mend()


def in_threads(work: list[Callable[[], Answer]]) -> list[Answer]:
    """What all of these get, asked at once."""
    answers: list[Answer] = []
    threads = [threading.Thread(target=lambda each=each: answers.append(each())) for each in work]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(answers) == len(work)
    return answers


def test_what_is_recorded_and_published_is_read_without_a_process(service: Service) -> None:
    kernel = kernel_id()
    service.ask("PUT", at(kernel), FULL)
    busy = foreman(service)
    os.kill(busy, signal.SIGSTOP)

    try:
        answers = [service.ask("GET", path) for path in ("/v1/sizes", "/v1/kernels", at(kernel), "/metrics")]
    finally:
        os.kill(busy, signal.SIGCONT)

    assert [answer.status for answer in answers] == [200] * 4
    assert {size["memory_mib"]: size["free"] for size in answers[0].plain["sizes"]}[24192] == 7


def test_what_is_read_brings_no_driver_into_the_service() -> None:
    code = "import sys, gres_mig.service.server; print(*sys.modules)"

    words = [sys.executable, "-c", code]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True)

    assert "gres_mig.service.shelf" in done.stdout.split()
    assert {"pynvml", "gres_mig.nvml", "gres_mig.allocator"}.isdisjoint(done.stdout.split())


def test_all_who_ask_how_the_node_is_wait_for_one_look(service: Service, node: Node) -> None:
    looked = service.ask("GET", "/v1/health").plain["looked"]
    # One that is this old is repeated.
    until(lambda: time.time() > looked + FRESH_S)

    with hanging(node, "nvmlInitWithFlags") as hang:
        asks = [send(service, "GET", "/v1/health") for _ in range(20)]
        # All that was sent before is read before this.
        service.ask("GET", "/v1/service")
        until(lambda: node.fired(hang))
        looks = len(node_service.children(foreman(service)))

    assert looks == 1
    assert {status(each) for each in asks} == {200}


def test_many_who_read_keep_nobody_from_an_instance(service: Service) -> None:
    paths = ("/v1/sizes", "/v1/why?memory=8000", "/v1/kernels", "/v1/health")
    reads = [lambda path=path: service.ask("GET", path) for path in paths for _ in range(30)]  # type: ignore[misc]
    asks = [lambda: service.ask("PUT", at(kernel_id()), FULL) for _ in range(6)]

    answers = in_threads(reads[:60] + asks + reads[60:])

    assert Counter(answer.status for answer in answers) == {200: len(reads), 201: len(asks)}


def test_what_needs_the_records_alone_does_not_wait_behind_asks_that_hang(service: Service, node: Node) -> None:
    node_service.need_root()
    kernel = kernel_id()
    service.ask("PUT", at(kernel), FULL)
    with hanging(node) as hang, node_service.callers(service.path) as starts:
        asks = [send(service, "PUT", at(kernel_id()), FULL) for _ in range(2 * ASKS_OF_ONE)]
        until(lambda: node.fired(hang))
        reported = service.ask("POST", f"{at(kernel)}/process", {"pid": os.getpid()})
        why = service.ask("GET", "/v1/why?memory=8000")
        others = starts(*node_service.user(OTHER)).ask("DELETE", at(kernel_id()))

    assert [reported.status, why.status, others.status] == [200] * 3
    assert sorted(map(status, asks)) == [201] * 7 + [503]


def test_who_asks_and_goes_away_has_no_more_done_at_once_than_who_waits(service: Service, node: Node) -> None:
    with hanging(node) as hang:
        for _ in range(2):
            asks = [send(service, "PUT", at(kernel_id()), FULL) for _ in range(2 * ASKS_OF_ONE)]
            # All that was sent before is read before this.
            service.ask("GET", "/v1/kernels")
            until(lambda: node.fired(hang) and len(node_service.children(foreman(service))) >= ASKS_OF_ONE)
            for connection in asks:
                connection.close()
        service.ask("GET", "/v1/kernels")
    until(lambda: not node_service.children(foreman(service)))

    # What has begun goes on to its end, and who asks again is given it.
    assert len(service.ask("GET", "/v1/kernels").plain["kernels"]) == len(node.instances()) == ASKS_OF_ONE

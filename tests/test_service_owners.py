"""Whose life an instance of a kernel has: the server's, the kernel's, and for how long neither is enough."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import command_line
import node_service
import pytest
from command_line import until
from node_service import FULL, OWNER, Service, at, kernel_id, make

from gres_mig import machine
from gres_mig.errors import BadRequest
from gres_mig.models import Process
from gres_mig.service import peer
from gres_mig.simulator.admin import Node
from gres_mig.values import replace
from gres_mig.witnesses import UNREPORTED_S

OLD_S = 20.0
"""Older than what counts as alive for being young."""


@pytest.fixture(scope="module")
def running() -> Iterator[Service]:
    with node_service.shared("user_requests = 0") as service:
        yield service


service, node = node_service.cleaned, node_service.of_service


def test_a_server_that_ends_without_a_word_leaves_nothing(service: Service, node: Node) -> None:
    node_service.need_root()
    with node_service.callers(service.path) as starts:
        server = starts(*node_service.user(OWNER))
        made = server.ask("PUT", at(kernel_id()), FULL)
    node_service.aged(node, OLD_S)

    node_service.one_pass(node)

    assert made.status == 201
    assert not node.instances()
    assert node_service.records(node) == ()


def test_a_kernel_that_outlives_its_server_keeps_its_instance_until_it_ends(service: Service, node: Node) -> None:
    node_service.need_root()
    with node_service.sleeping(*node_service.user(OWNER)) as process:
        with node_service.callers(service.path) as starts:
            server, kernel = starts(*node_service.user(OWNER)), kernel_id()
            server.ask("PUT", at(kernel), FULL)
            server.ask("POST", f"{at(kernel)}/process", {"pid": process.pid})
        node_service.aged(node, UNREPORTED_S + OLD_S)
        node_service.one_pass(node)
        kept = len(node.instances())
    node_service.one_pass(node)

    assert kept == 1
    assert not node.instances()


def test_a_server_whose_kernel_died_keeps_the_instance_for_its_restart(service: Service, node: Node) -> None:
    kernel = make(service)
    with node_service.sleeping() as process:
        service.ask("POST", f"{at(kernel)}/process", {"pid": process.pid})
    node_service.aged(node, UNREPORTED_S + OLD_S)

    node_service.one_pass(node)
    again = service.ask("PUT", at(kernel), FULL)

    assert again.status == 200


@pytest.mark.parametrize("judge", ["the service", "gres-mig reconcile"])
def test_a_kernel_that_is_not_reported_within_a_minute_gets_no_more(service: Service, node: Node, judge: str) -> None:
    make(service)

    def settle() -> None:
        if judge == "the service":
            node_service.one_pass(node)
        else:
            assert command_line.here("--node", node.store.folder, "reconcile").code == 0

    node_service.aged(node, UNREPORTED_S - OLD_S)
    settle()
    before = len(node.instances())
    node_service.aged(node, OLD_S)
    settle()

    assert before == 1
    assert not node.instances()


def test_asking_again_for_a_reported_kernel_makes_it_no_unreported_one(service: Service, node: Node) -> None:
    kernel = make(service)
    service.ask("POST", f"{at(kernel)}/process", {"pid": os.getpid()})
    service.ask("PUT", at(kernel), FULL)
    node_service.aged(node, UNREPORTED_S + OLD_S)

    node_service.one_pass(node)

    assert service.ask("GET", at(kernel)).status == 200


def test_a_later_process_with_the_pid_of_a_witness_is_not_that_witness(service: Service, node: Node) -> None:
    kernel = make(service)
    service.ask("POST", f"{at(kernel)}/process", {"pid": os.getpid()})
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


def test_an_end_that_comes_while_the_instance_is_made_wins(service: Service, node: Node) -> None:
    kernel = kernel_id()
    hang = node.plant("nvmlGpuInstanceCreateComputeInstance", "hangs", count="node")
    answers: list[node_service.Answer] = []
    thread = threading.Thread(target=lambda: answers.append(service.ask("PUT", at(kernel), FULL)))
    thread.start()
    until(lambda: node.fired(hang))
    ended: list[node_service.Answer] = []
    ending = threading.Thread(target=lambda: ended.append(service.ask("DELETE", at(kernel))))
    ending.start()
    until(lambda: any(type(record).__name__ == "Release" for record in node_service.records(node)))
    node.release(hang)
    thread.join(60)
    ending.join(60)

    assert [(answer.status, answer.code) for answer in answers] == [(503, "ENDED")]
    assert [answer.status for answer in ended] == [200]
    assert not node.instances()

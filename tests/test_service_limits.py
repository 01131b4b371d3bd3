"""How much of the service and of the node one user gets, and that the others are served whatever he does."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import command_line
import node_service
import pytest
from command_line import until
from node_service import FULL, OTHER, OWNER, Answer, Caller, Service, kernel_id

HEAD = b"GET /v1/service HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def running() -> Iterator[Service]:
    with node_service.shared() as service:
        yield service


@pytest.fixture(scope="module", autouse=True)
def half(running: Service) -> Iterator[socket.socket]:
    """A request whose end never comes; it is begun before all tests, so that none waits for what becomes of it."""
    with node_service.connected(running.path) as connection:
        connection.sendall(HEAD)
        yield connection


@pytest.fixture
def service(running: Service) -> Iterator[Service]:
    yield running
    node_service.clean(running)
    running.reload("")


@pytest.fixture
def caller(running: Service) -> Iterator[Callable[..., Caller]]:
    node_service.need_root()
    with node_service.callers(running.path) as start:
        yield start


def at_once(number: int, work: Callable[[int], Answer]) -> list[Answer]:
    """What so many threads get that start together."""
    answers: list[Answer] = []
    start = threading.Barrier(number)

    def one(index: int) -> None:
        start.wait()
        answers.append(work(index))

    threads = [threading.Thread(target=one, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == number
    return answers


@contextlib.contextmanager
def flood(service: Service, number: int, say: bytes) -> Iterator[list[socket.socket]]:
    """So many connections that say something and no more; those that the service closes are left out."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(number):
            connection = stack.enter_context(node_service.connected(service.path))
            connection.setblocking(False)
            with contextlib.suppress(OSError):
                connection.send(say)
            opened.append(connection)
        yield opened


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ("user_instances = 2", "you (uid 0) have 2 instances with 48,384 MiB on this node, and user_instances is 2"),
        (
            'user_memory = "48G"',
            (
                "you (uid 0) have 2 instances with 48,384 MiB on this node, 1g.24gb would add 24,192 MiB, "
                "and user_memory is 49,152 MiB"
            ),
        ),
    ],
)
def test_of_six_asks_at_once_those_beyond_the_limit_get_nothing(service: Service, limits: str, said: str) -> None:
    service.reload(limits)

    answers = at_once(6, lambda _: service.ask("PUT", f"/v1/kernels/{kernel_id()}", FULL))

    refused = [answer for answer in answers if answer.status != 201]
    assert Counter(answer.status for answer in answers) == {201: 2, 503: 4}
    assert {(answer.code, answer.plain["error"]["fault"]) for answer in refused} == {("QUOTA", "capacity")}
    assert {answer.message for answer in refused} == {said}
    assert len(service.node.instances()) == 2


def test_a_limit_counts_what_was_made_and_not_what_was_asked(service: Service) -> None:
    service.reload('user_memory = "10000"')

    answer = service.ask("PUT", f"/v1/kernels/{kernel_id()}", FULL)

    assert answer.code == "QUOTA"
    assert "1g.24gb would add 24,192 MiB, and user_memory is 10,000 MiB" in answer.message


def test_asking_again_for_what_one_has_meets_no_limit(service: Service) -> None:
    service.reload("user_instances = 1")
    path = f"/v1/kernels/{kernel_id()}"

    answers = [service.ask("PUT", path, FULL) for _ in range(2)]

    assert [answer.status for answer in answers] == [201, 200]


def test_a_limit_is_of_one_user_and_binds_no_other_owner(service: Service, caller: Callable[..., Caller]) -> None:
    service.reload("user_instances = 1")
    one, other = caller(*node_service.user(OWNER)), caller(*node_service.user(OTHER))
    second_server = caller(*node_service.user(OWNER))

    first = one.ask("PUT", f"/v1/kernels/{kernel_id()}", FULL)
    more = second_server.ask("PUT", f"/v1/kernels/{kernel_id()}", FULL)
    others = other.ask("PUT", f"/v1/kernels/{kernel_id()}", FULL)
    job = command_line.here("--node", service.folder, "allocate", "--owner", "slurm:c:1", "--memory", "8000")

    assert (first.status, others.status, job.code) == (201, 201, 0)
    assert more.code == "QUOTA"
    assert f"uid {OTHER}" not in more.message


def test_what_is_stuck_stays_on_its_owners_account(service: Service) -> None:
    service.reload("user_instances = 1\nin_use_wait = 0")
    kernel = kernel_id()
    service.ask("PUT", f"/v1/kernels/{kernel}", FULL)
    (instance,) = service.node.instances()
    service.node.hold(instance.gpu, instance.id, 0)

    gone = [service.ask("DELETE", f"/v1/kernels/{kernel}") for _ in range(2)]
    seen = service.ask("GET", f"/v1/kernels/{kernel}")
    more = service.ask("PUT", f"/v1/kernels/{kernel_id()}", FULL)
    service.node.let_go(instance.gpu, instance.id, 0)
    command_line.here("--node", service.folder, "reclaim", "--orphans")
    after = service.ask("PUT", f"/v1/kernels/{kernel_id()}", FULL)

    assert [answer.status for answer in gone] == [200, 200]
    assert [answer.plain["reclaimed"][0]["verdict"] for answer in gone] == ["stuck", "stuck"]
    assert seen.plain["state"] == "stuck"
    assert more.code == "QUOTA"
    assert after.status == 201


@pytest.mark.parametrize(
    "say",
    [
        b"",
        b"G",
        HEAD,
        b"PUT /v1/kernels/x HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"\0" * 1000,
        b"\r\n" * 50,
    ],
    ids=["silence", "a letter", "half a head", "half a body", "noise", "empty lines"],
)
def test_others_are_served_while_one_sends_half_of_something(
    service: Service, caller: Callable[..., Caller], say: bytes
) -> None:
    other = caller(*node_service.user(OTHER))

    with flood(service, 100, say):
        answer = other.ask("GET", "/v1/service")

    assert answer.status == 200


def test_others_are_served_beside_five_hundred_who_dribble(service: Service, caller: Callable[..., Caller]) -> None:
    other = caller(*node_service.user(OTHER))

    with flood(service, 500, HEAD) as connections:
        answers = []
        for index in range(20):
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.send(b"X-%d: y\r\n" % index)
            answers.append(other.ask("GET", "/v1/service").status)
        made = other.ask("PUT", f"/v1/kernels/{kernel_id()}", FULL)

    assert answers == [200] * 20
    assert made.status == 201


def test_others_are_served_while_one_asks_as_fast_as_it_can(service: Service, caller: Callable[..., Caller]) -> None:
    other = caller(*node_service.user(OTHER))
    over = threading.Event()
    served = Counter[int]()

    def ask_on() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                served[service.ask("GET", "/v1/sizes").status] += 1

    threads = [threading.Thread(target=ask_on) for _ in range(16)]
    for thread in threads:
        thread.start()
    answers = [other.ask("GET", "/v1/service").status for _ in range(30)]
    over.set()
    for thread in threads:
        thread.join(60)

    assert answers == [200] * 30
    assert served[200]


def test_more_connections_than_are_read_wait_for_their_turn(service: Service) -> None:
    service.reload("user_connections = 1")

    answers = at_once(30, lambda _: service.ask("GET", "/v1/service"))

    assert {answer.status for answer in answers} == {200}


@pytest.mark.parametrize(
    "head",
    [b"Content-Length: 65537\r\n\r\n", b"Content-Length: 99999999999999999999999\r\n\r\n",
     b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"],
)  # fmt: skip
def test_a_body_has_a_length_and_not_too_much_of_it(service: Service, head: bytes) -> None:
    with node_service.connected(service.path) as connection:
        connection.sendall(f"PUT /v1/kernels/{kernel_id()} HTTP/1.1\r\nHost: x\r\n".encode() + head)
        answer = b""
        while part := connection.recv(65536):
            answer += part

    first, _, rest = answer.partition(b"\r\n")
    assert first == b"HTTP/1.1 413 Content Too Large"
    assert b'"code": "TOOLARGE"' in rest


def test_the_largest_body_that_may_be_is_read(service: Service) -> None:
    room = 65536 - len(json.dumps({"profile": ""}))

    answer = service.ask("PUT", f"/v1/kernels/{kernel_id()}", {"profile": "x" * room})

    assert answer.status == 400
    assert "the body, profile" in answer.message


def test_a_head_without_end_is_given_up(service: Service) -> None:
    with node_service.connected(service.path) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(100):
                connection.sendall(b"X: " + b"y" * 10000)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(65536):
                pass

    assert service.ask("GET", "/v1/service").status == 200


def test_who_asks_too_often_is_answered_later_and_others_at_once(
    service: Service, caller: Callable[..., Caller]
) -> None:
    service.reload("user_requests = 5")
    other = caller(*node_service.user(OTHER))

    answers = at_once(12, lambda _: service.ask("GET", "/v1/service"))
    others = other.ask("GET", "/v1/service")

    assert {answer.status for answer in answers} == {200}
    assert others.status == 200


def test_the_service_goes_on_when_all_is_over(service: Service) -> None:
    with flood(service, 300, HEAD):
        pass

    def is_well() -> bool:
        # Of this user there may be too many left for a moment.
        with contextlib.suppress(ConnectionError):
            return service.ask("GET", "/v1/health").status == 200
        return False

    until(is_well)

    assert service.process.poll() is None


def test_a_request_that_does_not_come_to_its_end_is_given_up(half: socket.socket) -> None:
    assert half.recv(100) == b""

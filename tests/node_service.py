"""A real `gres-mig serve` in a process of its own, over a simulated node, and callers at its socket."""

from __future__ import annotations

import http.client
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import command_line
import pytest
from command_line import until

from gres_mig import config, machine, presence
from gres_mig.deadline import operate
from gres_mig.models import Record, Settings
from gres_mig.simulator.admin import Node
from gres_mig.simulator.assembly import create
from gres_mig.simulator.program import command, environment
from gres_mig.state import Store
from gres_mig.values import replace

OWNER, OTHER = 5, 6
"""`games` and `man`: accounts that every Debian has."""

SYSTEM_PYTHON = "/usr/bin/python3"
"""For callers of other users: that of the tests may be in a folder of root's."""

FULL = {"memory": 8000}

PLAIN = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
"""The environment of what is not ours."""


class Answer(NamedTuple):
    """What the service answered."""

    status: int
    plain: dict[str, Any]

    @property
    def code(self) -> str:
        """Of the error."""
        return str(self.plain["error"]["code"])

    @property
    def message(self) -> str:
        """Of the error."""
        return str(self.plain["error"]["message"])


class Service:
    """One service, until it is ended."""

    def __init__(self, node: Node, *words: str, before: Sequence[str] = (), **variables: str) -> None:
        self.node, self.folder = node, Path(node.store.folder)
        self.path = str(self.folder / "run" / presence.SOCKET)
        # Passes come when a test asks for one: an hour is longer than it lives.
        every = [] if "--every" in words else ["--every", "3600"]
        # A file and no pipe: with nobody reading, a service that has much to say would wait for room in it.
        self._log = self.folder / f"said-{kernel_id()}"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*before, *command("--node", str(self.folder), "serve", *every, *words)],
                env=environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def ready(self) -> Service:
        """Itself, once it answers."""
        until(lambda: self.is_up() or self.process.poll() is not None)
        assert self.process.poll() is None, self._log.read_text()
        return self

    def is_up(self) -> bool:
        """Whether this very one has taken the path over."""
        here = presence.running(str(self.folder / "run"))
        return here is not None and here.pid == self.process.pid

    def reload(self, settings: str) -> None:
        """Put those lines into force."""
        configure(self.node, settings)
        self.process.send_signal(signal.SIGHUP)
        wanted = presence.digest(str(self.folder / "config.toml"))
        until(lambda: (here := presence.running(str(self.folder / "run"))) and here.sha256 == wanted)

    def ask(self, method: str, path: str, body: object = None) -> Answer:
        """One request from this process."""
        return ask(self.path, method, path, body)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Its exit code, and what it said; with 0 for a signal it ends by itself."""
        if number and self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(30), self._log.read_text()


@contextmanager
def services(node: Node, settings: str = "") -> Iterator[Callable[..., Service]]:
    """Starts services of the node; all that still live are killed at the end."""
    configure(node, settings)
    (Path(node.store.folder) / "run").mkdir(mode=0o755, exist_ok=True)
    os.chmod(node.store.folder, 0o755)
    os.chmod(Path(node.store.folder).parent, 0o755)
    started: list[Service] = []

    def start(*words: str, **more: Any) -> Service:
        started.append(Service(node, *words, **more))
        return started[-1]

    yield start
    for service in started:
        service.process.kill()
        service.process.wait()


@contextmanager
def shared(settings: str = "") -> Iterator[Service]:
    """One service over a node of its own, for the tests of a module; `clean` is called between them."""
    shm = "/dev/shm"
    folder = Path(tempfile.mkdtemp(prefix="gres-mig-", dir=shm if os.access(shm, os.W_OK) else None))
    try:
        create(folder / "node", [("rtx-pro-6000", 2)])
        with services(Node(folder / "node"), settings) as start:
            yield start().ready()
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def cleaned(running: Service) -> Iterator[Service]:
    """A module's `service`: the one that it runs, without what another test left on it."""
    yield running
    clean(running)


@pytest.fixture
def of_service(service: Service) -> Node:
    """A module's `node`: that of its service."""
    return service.node


def clean(service: Service) -> None:
    """Give back what a test left."""
    service.node.mend()
    owners = {record.owner for record in records(service.node)}
    if owners:
        operate(settings_of(service.node), lambda allocator: [allocator.reclaim(owner) for owner in owners])
    assert not service.node.instances()


def configure(node: Node, settings: str) -> None:
    """Write the node's configuration: all GPUs, and those lines."""
    (Path(node.store.folder) / "config.toml").write_text(f'gpus = "*"\n{settings}\n')


def kernel_id() -> str:
    """A new one."""
    return str(uuid.uuid4())


def at(kernel: str) -> str:
    """Where a kernel is asked for."""
    return f"/v1/kernels/{kernel}"


def make(served: Service) -> str:
    """A kernel with an instance."""
    kernel = kernel_id()
    assert served.ask("PUT", at(kernel), FULL).status == 201
    return kernel


def ask(path: str, method: str, url: str, body: object = None) -> Answer:
    """One request over one connection."""
    connection = http.client.HTTPConnection("localhost", timeout=60)
    connection.sock = connected(path)
    try:
        connection.request(method, url, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    return Answer(answer.status, json.loads(text) if text.startswith("{") else {"text": text})


def connected(path: str) -> socket.socket:
    """A connection."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Blocking until here: with a time limit, Python's connect does not wait in a full queue.
        channel.connect(path)
        channel.settimeout(60)
    except BaseException:
        channel.close()
        raise
    return channel


_CALLER = """
import http.client, json, os, socket, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked[0] == "pid":
        print(json.dumps([os.getpid(), os.getuid()]), flush=True)
        continue
    path, method, url, body = asked
    connection = http.client.HTTPConnection("localhost", timeout=60)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(path)
    connection.request(method, url, None if body is None else json.dumps(body))
    answer = connection.getresponse()
    print(json.dumps([answer.status, answer.read().decode()]), flush=True)
    connection.close()
"""


class Caller:
    """A process that asks as somebody else: started with `before`, such as `setpriv --reuid=5`."""

    def __init__(self, path: str, *before: str) -> None:
        self._path = path
        self.process = subprocess.Popen(
            [*before, SYSTEM_PYTHON, "-c", _CALLER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=PLAIN,
            cwd="/",
        )
        self.own_pid, self.own_uid = self._say("pid")
        """As it counts itself."""

    def ask(self, method: str, url: str, body: object = None) -> Answer:
        """One request of its."""
        status, text = self._say(self._path, method, url, body)
        return Answer(status, json.loads(text) if text.startswith("{") else {"text": text})

    def end(self) -> None:
        """Kill it and all that it was started through."""
        if self.process.poll() is None:
            # Of an unshare that forked, the child is the one that asks.
            for child in children(self.process.pid):
                os.kill(child, signal.SIGKILL)
            self.process.kill()
        self.process.communicate()

    def _say(self, *words: object) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        assert select.select([self.process.stdout], [], [], 60)[0], "the caller does not answer"
        return json.loads(self.process.stdout.readline())


@contextmanager
def callers(path: str) -> Iterator[Callable[..., Caller]]:
    """Starts callers, ended with the test."""
    started: list[Caller] = []

    def start(*before: str) -> Caller:
        started.append(Caller(path, *before))
        return started[-1]

    yield start
    for caller in started:
        caller.end()


def user(uid: int) -> tuple[str, ...]:
    """What starts a process of that user."""
    return ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups")


def need_root() -> None:
    """Skip where other users cannot be played; CI makes that a failure."""
    if os.geteuid() != 0:
        pytest.skip("only root can be other users")


@contextmanager
def sleeping(*before: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that plays a kernel."""
    process = subprocess.Popen([*before, "sleep", "3600"], env=PLAIN)
    try:
        until(lambda: Path(f"/proc/{process.pid}/comm").read_text().strip() == "sleep")
        yield process
    finally:
        process.kill()
        process.wait()


def run(words: Sequence[str], **more: Any) -> None:
    """A command that has to succeed."""
    done = subprocess.run(words, env=PLAIN, capture_output=True, check=False, **more)
    assert done.returncode == 0, done.stderr


def children(pid: int) -> list[int]:
    """The processes that one has started itself."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def settings_of(node: Node) -> Settings:
    """The configuration of that node."""
    return config.load(node=node.store.folder)


def records(node: Node) -> tuple[Record, ...]:
    """What is recorded on it."""
    return _store(node).read().records


def change(node: Node, to: Callable[[Record], Record]) -> None:
    """Change all that is recorded."""
    with _store(node).transaction() as transaction:
        transaction.save(replace(transaction.state, records=tuple(map(to, transaction.state.records))))


def aged(node: Node, by_s: float) -> None:
    """Have all records be so much older: no test waits for a minute."""
    change(node, lambda r: replace(r, begin=r.begin - int(by_s * 1e9), since=r.since - by_s))


def one_pass(node: Node) -> None:
    """What the service does every ten seconds."""
    answer = command_line.here("--node", node.store.folder, "serve", "--once")
    assert answer.code == 0, answer.err


def _store(node: Node) -> Store:
    settings = settings_of(node)
    return Store(settings, machine.boot_id(settings.simulator))

"""What an instance costs a kernel's start, and how soon the node service answers, also beside somebody hostile.

    python bench/jupyter.py [--starts 15] [--seconds 15]

Kernels are started in real Jupyter servers, with an instance and without one in turn, and their starts are timed from
the request to the first answer of the kernel, which is what a person waits for. The hardware takes no time here. For
the service, users are processes of many uids, which only root can start. Of a user's hundred requests 95 look at what
there is, four ask for his kernel's instance again and one asks why; one client makes 25 requests a second, many make
256 together. The run fails when a bar, which is the project's own, is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "slurm"), str(ROOT / "jupyter_ext")]

from gres_mig import config  # noqa: E402
from gres_mig.client import SOCKET, Client  # noqa: E402
from gres_mig.demo import jupyter  # noqa: E402
from gres_mig.errors import GresMigError  # noqa: E402
from gres_mig.simulator.admin import Node  # noqa: E402
from gres_mig.simulator.assembly import create  # noqa: E402
from gres_mig.simulator.program import command, environment  # noqa: E402

MOST_TIMES, MOST_MS = 1.15, 200.0
PLAIN, SERVED, DIRECT = "without an instance", "through the service", "directly, as the node's owner"
CLIENTS = (1, 16, 256)
PATIENCE_S = 60.0
FIRST_UID = 3000
"""Of the users: no account is needed to be one."""
USERS = 32
KINDS = ("look", "why", "ask", "refused")
RETRY_S = 0.1
"""As gres-mig's client does where a connection is closed unanswered."""


def main() -> int:
    """Measure and print; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--starts", type=int, default=15, help="of each kind of kernel")
    parser.add_argument("--seconds", type=float, default=15.0, help="for each number of clients")
    given = parser.parse_args()
    # So that servers and services are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    one, _, fifteen = os.getloadavg()
    print(f"{os.cpu_count()} CPUs, load average {one:.1f}, of the last 15 minutes {fifteen:.1f}")
    return max(kernels(given.starts), service(given.seconds))


def kernels(starts: int) -> int:
    """The starts of kernels; 1 when the bar is missed."""
    if reason := jupyter.left_out():
        # Not a failure: `make bench` goes on with what can be measured here.
        print(f"starts of kernels are left out: {reason}")
        return 0
    from gres_mig_jupyter.lab import Server, gpu_spec

    specs = {"gpu": gpu_spec(8000), "plain": {**gpu_spec(), "metadata": {}}}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        nodes = {name: node(Path(folder, name), 1) for name in ("served", "direct")}
        with (
            served(nodes["served"]),
            Server(Path(folder, "one"), nodes["served"].store.folder, specs=specs) as one,
            Server(Path(folder, "two"), nodes["direct"].store.folder, specs=specs) as two,
        ):
            kinds = {PLAIN: (one, "plain"), SERVED: (one, "gpu"), DIRECT: (two, "gpu")}
            took: dict[str, list[float]] = {kind: [] for kind in kinds}
            # In turn, so that whatever else the machine does falls on all alike; the first of each does not count.
            for number in range(starts + 1):
                for kind, (server, spec) in kinds.items():
                    began = time.perf_counter()
                    kernel = server.kernel(spec)
                    kernel.run("1")
                    took[kind] += [time.perf_counter() - began] if number else []
                    kernel.shutdown()
                    until(lambda: not any(each.instances() for each in nodes.values()), "the instance is given back")
    for kind, times in took.items():
        spread = f"{1000 * min(times):.0f} to {1000 * max(times):.0f}"
        print(f"a kernel's start {kind}: {1000 * median(times):.0f} ms ({spread}, {len(times)} times)")
    ratio = median(took[SERVED]) / median(took[PLAIN])
    print(f"directly: {median(took[DIRECT]) / median(took[PLAIN]):.2f} x without an instance")
    return verdict(ratio <= MOST_TIMES, f"{SERVED}: {ratio:.2f} x without an instance, at most {MOST_TIMES:g}")


def service(seconds: float) -> int:
    """The service's answers, and what a hostile user makes of them; 1 when the bar is missed."""
    if os.geteuid() != 0:
        print("answers of the service are left out: only root can be many users")
        return 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        os.chmod(folder, 0o755)
        gpus = node(Path(folder, "node"), 8)
        with served(gpus) as socket:
            for clients in CLIENTS:
                report(f"{clients} client(s)", crowd(socket, clients, seconds))
            with hostile(socket):
                p99 = report("16 clients beside a hostile user", crowd(socket, 16, seconds))
    return verdict(p99 <= MOST_MS, f"beside a hostile user: p99 {p99:.0f} ms, at most {MOST_MS:g}")


def node(folder: Path, gpus: int) -> Node:
    """A simulated node, all of it managed."""
    create(folder, [("h200", gpus)])
    (folder / "config.toml").write_text('gpus = "*"\n')
    return Node(folder)


@contextmanager
def served(node: Node) -> Iterator[str]:
    """Its service; the socket."""
    folder = node.store.folder
    with open(os.path.join(folder, "service.log"), "wb") as log:
        process = subprocess.Popen(
            command("--node", folder, "serve"), env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    settings = config.load(node=folder)

    def listens() -> bool:
        assert process.poll() is None, Path(log.name).read_text()
        with suppress(GresMigError):
            return bool(Client(settings).service())
        return False

    try:
        until(listens, "the service listens")
        yield os.path.join(settings.run_dir, SOCKET)
    finally:
        process.terminate()
        process.wait()


def crowd(socket: str, clients: int, seconds: float) -> dict[str, list[float]]:
    """How long answers took, of looks and of asks, to so many clients, shared out among users."""
    users = min(clients, USERS)
    shares = [clients // users + (number < clients % users) for number in range(users)]
    # Within what the service lets one user ask for in a second, and more together than a machine's notebooks ask for.
    pause_s = max(0.04, clients / 256)
    together = get_context("fork").Barrier(users)
    pipes = [
        as_user(FIRST_UID + number, lambda share=share: user(socket, share, seconds, pause_s, together))
        for number, share in enumerate(shares)
    ]
    took: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for pid, pipe in pipes:
        with open(pipe, encoding="utf-8") as stream:
            told = stream.read()
        assert os.waitpid(pid, 0)[1] == 0, "a user failed"
        for kind, times in json.loads(told).items():
            took[kind] += times
    return took


async def user(socket: str, clients: int, seconds: float, pause_s: float, together: Barrier) -> dict[str, list[float]]:
    """One user's clients, who share a kernel; all users begin and end together."""
    took: dict[str, list[float]] = {kind: [] for kind in KINDS}
    kernel = f"/v1/kernels/{uuid.uuid4()}"
    await asked(socket, "PUT", kernel, {"memory": 8000})
    turns = count(random.randrange(100))
    together.wait(PATIENCE_S)
    ends = time.monotonic() + seconds

    async def client() -> None:
        await asyncio.sleep(random.random() * pause_s)
        while time.monotonic() < ends:
            turn, began = next(turns) % 100, time.perf_counter()
            if turn % 25 == 0:
                kind, status = "ask", await asked(socket, "PUT", kernel, {"memory": 8000})
            elif turn == 1:
                kind, status = "why", await asked(socket, "GET", "/v1/why?memory=8000")
            else:
                path = random.choice((kernel, "/v1/kernels", "/v1/sizes"))
                kind, status = "look", await asked(socket, "GET", path)
            took[kind if status == 200 else "refused"].append(time.perf_counter() - began)
            await asyncio.sleep(pause_s)

    await asyncio.gather(*(client() for _ in range(clients)))
    together.wait(PATIENCE_S)
    await asked(socket, "DELETE", kernel)
    return took


async def asked(socket: str, method: str, path: str, body: object = None) -> int:
    """One request on a connection of its own, as gres-mig's client makes it: the status."""
    while True:
        with suppress(ConnectionError):
            reader, writer = await asyncio.open_unix_connection(socket)
            try:
                writer.write(request(method, path, body))
                if answer := await reader.read():
                    return int(answer.split(b" ", 2)[1])
            finally:
                writer.close()
        await asyncio.sleep(RETRY_S)


def request(method: str, path: str, body: object = None) -> bytes:
    """Its bytes."""
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


@contextmanager
def hostile(socket: str) -> Iterator[None]:
    """A user with a thousand connections: half of them leave their request half sent, the others never stop asking."""
    pid, pipe = as_user(FIRST_UID + USERS, lambda: nuisance(socket))
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pipe)


async def nuisance(socket: str) -> None:
    """Until it is killed."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, most), most))
    whole = request("GET", "/v1/kernels").replace(b"Connection: close\r\n", b"")

    async def connection(number: int) -> None:
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_unix_connection(socket)
                try:
                    while True:
                        writer.write(whole[: len(whole) // 2] if number % 2 else whole * 20)
                        await writer.drain()
                        if not await reader.read(65536):
                            break
                finally:
                    writer.close()
            await asyncio.sleep(0)

    await asyncio.gather(*(connection(number) for number in range(1000)))


def as_user(uid: int, work: Callable[[], Awaitable[object]]) -> tuple[int, int]:
    """Begin it in a process of that uid: its pid, and where its result comes out as JSON."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    try:
        os.close(reading)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)

        async def done() -> object:
            return await work()

        with open(writing, "w", encoding="utf-8") as stream:
            stream.write(json.dumps(asyncio.run(done())))
        code = 0
    except Exception:  # noqa: BLE001 - the edge of a process
        traceback.print_exc()
    finally:
        os._exit(code)


def report(who: str, took: dict[str, list[float]]) -> float:
    """Print medians and 99th percentiles; that of all, ms."""
    everything = [each for times in took.values() for each in times]
    parts = [f"{len(t)} {kind} p50 {p(t, 50):.0f} p99 {p(t, 99):.0f} ms" for kind, t in took.items() if t]
    print(f"{who}: {', '.join(parts)}; together p50 {p(everything, 50):.0f} p99 {p(everything, 99):.0f} ms")
    return p(everything, 99)


def p(times: list[float], percent: int) -> float:
    """That percentile, ms."""
    # Of a single one, as in a very short run, there is nothing to divide.
    times = times if len(times) > 1 else 2 * times
    return 1000 * quantiles(times, n=100, method="inclusive")[percent - 1]


def verdict(holds: bool, claim: str) -> int:
    """Print whether a bar holds; 1 when it does not."""
    print(f"{'PASS' if holds else 'FAIL'} {claim}")
    return int(not holds)


def until(true: Callable[[], object], what: str) -> None:
    """Look until it is so; no event tells of what another process does."""
    ends = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < ends, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.002)


if __name__ == "__main__":
    sys.exit(main())

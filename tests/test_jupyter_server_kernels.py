"""A kernel's life in a real Jupyter server: its instance from the start to the end, whatever happens in between."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from notebook_server import USER, Host, Kernel, Server, gpu_spec, in_parallel, require_user, until

PLAIN: dict[str, Any] = {**gpu_spec(name="Python 3"), "metadata": {}}
SPECS = {
    "plain": PLAIN,
    "gpu": gpu_spec(8000),
    "half": gpu_spec("40G"),
    "profile": gpu_spec(profile="1g.24gb"),
    "culled": gpu_spec(8000, cull_idle_timeout=2),
    "absent": gpu_spec(8000, argv=["/nonexistent/kernel", "{connection_file}"]),
    "ends": gpu_spec(8000, argv=[sys.executable, "-c", "raise SystemExit(1)"]),
    "too-big": gpu_spec("900G"),
}
CONF = """
c.MappingKernelManager.cull_idle_timeout = 3600
c.MappingKernelManager.cull_interval = 1
c.KernelRestarter.restart_limit = 2
c.KernelRestarter.time_to_dead = 0.2
"""
PLACES = 4
"""For 8,000 MiB on the one GPU of the node."""

NO_ROOM = (
    "no room for 8,000 MiB on this node: 4 of 4 places for 1g.24gb are taken; "
    "shut down a GPU kernel, or try again later"
)
TOO_BIG = (
    "no instance on this node holds 921,600 MiB: the largest is 4g.96gb (97,280 MiB); "
    "sizes here: 24,192 MiB, 48,512 MiB, 97,280 MiB"
)
NO_OTHER = (
    "The 'half' kernel could not be started: \"shut this notebook's current kernel down first, it has 1g.24gb: no room "
)


@pytest.fixture(scope="module", params=["service", "direct"])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    """A node with one GPU, with a service, and as its owner's own machine."""
    with Host() as host:
        if request.param == "service":
            host.serve()
        host.log_calls()
        yield host


@pytest.fixture(scope="module")
def shared(host: Host) -> Server:
    """A server that the tests of this module share."""
    return host.server(conf=CONF, specs=SPECS)


@pytest.fixture
def server(host: Host, shared: Server) -> Iterator[Server]:
    """That server, without kernels; after each test nothing may be left of it."""
    yield shared
    for kernel_id in shared.kernels():
        shared.known(kernel_id).shutdown()
    host.until_free(log=shared.log)


@pytest.fixture
def full(server: Server) -> list[Kernel]:
    """Kernels on every place of the node."""
    return [server.kernel("gpu") for _ in range(PLACES)]


def refused(reply: tuple[int, Any], code: int) -> str:
    """The sentence of a refusal with that status."""
    assert reply[0] == code, reply
    lines = reply[1]["message"].split("\n")
    # Lab's dialog shows no more of a line (4.6); of a change of kernels jupyter_server makes one line.
    assert code == 501 or max(map(len, lines)) <= 122
    return " ".join(lines)


def test_a_kernel_that_asks_for_memory_has_an_instance_of_its_own_and_is_told_which(host: Host, server: Server) -> None:
    kernel = server.kernel("gpu")
    told = kernel.environment()

    (instance,) = host.instances()
    assert told["CUDA_VISIBLE_DEVICES"] == told["NVIDIA_VISIBLE_DEVICES"] == told["GRES_MIG_UUID"]
    assert (told["GRES_MIG_UUID"],) == instance.mig_uuids
    assert instance.profile == told["GRES_MIG_PROFILE"] == "1g.24gb"
    assert told["GRES_MIG_REQUESTED"] == "8000"
    assert host.record_of(kernel.id) is not None


def test_two_kernels_of_different_size_have_two_instances(host: Host, server: Server) -> None:
    told = [server.kernel(spec).environment()["GRES_MIG_UUID"] for spec in ("gpu", "half")]

    assert len(set(told)) == 2
    assert sorted(i.profile for i in host.instances()) == ["1g.24gb", "2g.48gb"]


def test_a_kernel_may_ask_for_a_profile_by_name(host: Host, server: Server) -> None:
    server.kernel("profile")

    assert [i.profile for i in host.instances()] == ["1g.24gb"]


def test_a_kernel_that_asks_for_nothing_uses_nothing(host: Host, server: Server) -> None:
    before = host.changes()
    told = server.kernel("plain").environment()

    assert not [name for name in told if name.startswith(("CUDA_", "NVIDIA_")) or name == "GRES_MIG_UUID"]
    assert host.changes() == before


def test_when_it_is_shut_down_its_instance_is_given_back(host: Host, server: Server) -> None:
    kernel = server.kernel("gpu")
    kernel.shutdown()

    host.until_free(log=server.log)


def test_an_interrupted_kernel_keeps_its_instance(host: Host, server: Server) -> None:
    kernel = server.kernel("gpu")
    before = host.instances()
    begun = kernel.send("print('begun', flush=True)\nimport time\ntime.sleep(600)")
    kernel.wait_for_output(begun)
    kernel.interrupt()

    assert kernel.wait(begun).error == "KeyboardInterrupt"
    assert host.instances() == before


def test_a_restart_keeps_the_very_instance_and_touches_no_hardware_also_when_the_gpu_is_full(
    host: Host, server: Server, full: list[Kernel]
) -> None:
    kernel = full[1]
    told, pid, before = kernel.environment(), kernel.pid(), host.changes()
    reply = kernel.restart()

    assert reply.code == 200
    assert kernel.pid() != pid
    assert {n: v for n, v in kernel.environment().items() if "VISIBLE" in n or "GRES_MIG" in n} == {
        n: v for n, v in told.items() if "VISIBLE" in n or "GRES_MIG" in n
    }
    assert host.changes() == before


def test_a_kernel_that_is_killed_comes_back_on_its_instance_each_time(host: Host, server: Server) -> None:
    kernel = server.kernel("gpu")
    told, before = kernel.environment()["GRES_MIG_UUID"], host.changes()
    for _ in range(2):
        pid = kernel.pid()
        kernel.disconnect()
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: _pid_of(host, kernel) not in (0, pid), "the kernel is back", log=server.log)

        assert kernel.environment()["GRES_MIG_UUID"] == told
    assert host.changes() == before


def _pid_of(host: Host, kernel: Kernel) -> int:
    """The process of a kernel that the node knows; its server's own is not it."""
    record = host.record_of(kernel.id)
    others = [w.pid for w in record.witnesses if w.pid != kernel.server.pid] if record else []
    return others[-1] if others else 0


def test_a_kernel_that_ends_again_and_again_is_given_up_and_its_instance_is_given_back(
    host: Host, server: Server
) -> None:
    kernel = server.kernel("ends")
    until(lambda: kernel.id not in server.kernels(), "the restarter gives up", log=server.log)

    host.until_free(log=server.log)


def test_a_kernel_that_cannot_be_launched_holds_nothing(host: Host, server: Server) -> None:
    reply = server.ask("POST", "/api/kernels", {"name": "absent"})

    assert reply.code == 500
    assert server.kernels() == []
    host.until_free(log=server.log)


@pytest.mark.usefixtures("full")
def test_a_start_without_room_is_refused_in_one_sentence_that_says_what_to_do(server: Server) -> None:
    body = {"path": "b.ipynb", "name": "", "type": "notebook", "kernel": {"name": "gpu"}}
    as_kernel = refused(server.ask("POST", "/api/kernels", {"name": "gpu"}), 503)
    as_session = refused(server.ask("POST", "/api/sessions", body), 500)

    assert as_kernel == as_session == NO_ROOM
    assert len(server.kernels()) == PLACES


def test_a_size_that_no_gpu_holds_is_refused_with_the_sizes_there_are(host: Host, server: Server) -> None:
    message = refused(server.ask("POST", "/api/kernels", {"name": "too-big"}), 400)

    assert message == TOO_BIG
    assert host.instances() == []


def test_another_kernel_for_a_notebook_on_a_full_gpu_leaves_it_the_one_it_has(
    server: Server, full: list[Kernel]
) -> None:
    full[0].shutdown()
    session, kernel = server.session("gpu")
    kernel.run("here = 'still'")
    reply = server.ask("PATCH", f"/api/sessions/{session}", {"kernel": {"name": "half"}})

    assert refused(reply, 501).startswith(NO_OTHER)
    assert kernel.run("print(here)") == "still"


def test_another_kernel_for_a_notebook_gives_back_what_the_first_one_had(host: Host, server: Server) -> None:
    session, first = server.session("gpu")
    reply = server.ask("PATCH", f"/api/sessions/{session}", {"kernel": {"name": "half"}})

    assert reply.code == 200
    until(lambda: [i.profile for i in host.instances()] == ["2g.48gb"], "only the second one's", log=server.log)
    assert host.record_of(first.id) is None


@pytest.mark.parametrize("kernel_id", ["../../evil", "x", "00000000-0000-0000-0000-00000000000g", ""])
def test_an_id_that_is_no_kernels_gets_nothing(host: Host, server: Server, kernel_id: str) -> None:
    before = sorted(host.base.parent.glob("*evil*"))
    body = {"path": "c.ipynb", "name": "", "type": "notebook", "kernel": {"name": "gpu", "id": kernel_id or " "}}
    for path, asked in (("/api/kernels", {"name": "gpu", "kernel_id": kernel_id or " "}), ("/api/sessions", body)):
        reply = server.ask("POST", path, asked)
        assert reply.code in (400, 500), reply

    assert host.records() == ()
    assert sorted(host.base.parent.glob("*evil*")) == before


def test_an_idle_kernel_is_culled_and_gives_its_instance_back_and_a_busy_one_is_not(host: Host, server: Server) -> None:
    busy, idle = server.kernel("culled"), server.kernel("culled")
    busy.wait_for_output(busy.send("print('begun', flush=True)\nimport time\ntime.sleep(600)"))
    idle.run("1")
    for kernel in (busy, idle):
        kernel.disconnect()
    server.until(lambda: idle.id not in server.kernels(), "culled")

    host.until_free(left=1, log=server.log)
    assert server.kernels() == [busy.id]


def test_of_thirty_starts_at_once_as_many_run_as_there_are_places_and_the_others_are_told_why() -> None:
    with Host([("h200", 1)]) as host:
        host.serve()
        server = host.server(specs=SPECS)
        replies = in_parallel([lambda: server.ask("POST", "/api/kernels", {"name": "gpu"})] * 30)
        started = [reply.body["id"] for reply in replies if reply.code == 201]
        told = [refused(reply, 503) for reply in replies if reply.code != 201]

        assert (len(started), len(told)) == (7, 23)
        assert all("no room for 8,000 MiB" in message for message in told)
        assert len(host.instances()) == len(host.records()) == 7
        for kernel_id in started:
            assert server.ask("DELETE", f"/api/kernels/{kernel_id}").code == 204
        host.until_free(log=server.log)


def test_a_server_that_is_not_roots_gets_instances_through_the_service() -> None:
    require_user()
    with Host() as host:
        host.serve()
        server = host.server(user=USER, specs=SPECS)
        kernel = server.kernel("gpu")
        told = kernel.run("import os; print(os.getuid(), os.environ['GRES_MIG_UUID'])").split()
        record = host.record_of(kernel.id)

        assert record is not None
        assert record.owner.name == f"jupyter:{told[0]}:{kernel.id}"
        assert host.instances()[0].mig_uuids == (told[1],)

"""However a real Jupyter server ends, it ends soon, and no instance of its kernels outlives them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from notebook_server import FREED_S, Host, Server, gpu_spec, until

from gres_mig import machine

SPECS: dict[str, Any] = {
    "gpu": gpu_spec(8000),
    "whole": gpu_spec("90G"),
    "plain": {**gpu_spec(name="Python 3"), "metadata": {}},
    # Whatever becomes of its server, this kernel goes on.
    "stays": gpu_spec(8000, argv=[sys.executable, "-c", "import signal; signal.pause()", "{connection_file}"]),
}
WORK = """
import subprocess, sys
words = [sys.executable, "-m", "gres_mig", "simulate", "work", {node!r}]
child = subprocess.Popen(words, start_new_session=True, stdout=open({output!r}, "w"))
print(child.pid)
"""


@pytest.fixture
def alone() -> Iterator[Host]:
    """A node without a service: what a server does not give back itself is left."""
    with Host() as host:
        yield host


@pytest.fixture
def served() -> Iterator[Host]:
    """A node with a service, which gives back what no server can any more."""
    with Host() as host:
        host.serve()
        yield host


def occupy(host: Host, **how: Any) -> Server:
    """A server with a kernel that has GPU memory, one that has none, and one that was refused."""
    server = host.server(specs=SPECS, **how)
    server.kernel("gpu")
    server.kernel("plain")
    server.expect(503, "POST", "/api/kernels", {"name": "whole"})
    return server


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda how: how.name)
def test_a_server_that_is_told_to_end_gives_everything_back_though_a_start_was_refused(
    alone: Host, how: signal.Signals
) -> None:
    server = occupy(alone)

    assert server.stop(how, within=FREED_S) == 0
    assert (alone.instances(), alone.records()) == ([], ())


def test_so_does_one_that_asks_on_its_terminal_whether_it_is_to_end(alone: Host) -> None:
    server = occupy(alone, tty=True)
    assert server.process is not None
    server.process.send_signal(signal.SIGINT)
    server.until(lambda: "Shut down this Jupyter server" in server.log(), "it asks")
    server.type("y\n")

    assert server.ended(within=FREED_S) == 0
    assert (alone.instances(), alone.records()) == ([], ())


def test_a_server_that_ends_while_a_kernel_starts_waits_for_no_start_and_leaves_nothing(alone: Host) -> None:
    server = alone.server(specs=SPECS)
    server.kernel("plain")
    alone.gpus.configure(create_s=2.0)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.ask, "POST", "/api/kernels", {"name": "gpu"})
        until(alone.records, "the start is under way", log=server.log)
        code = server.stop(within=FREED_S)

    assert code == 0
    assert isinstance(asked.exception(), ConnectionError | HTTPException) or asked.result().code != 201
    alone.until_free(log=server.log)


def test_what_a_killed_servers_kernels_had_is_given_back_by_the_service_alone(served: Host) -> None:
    server = occupy(served)
    server.stop(signal.SIGKILL)

    served.until_free(log=server.log)


def test_what_a_killed_servers_kernels_had_is_given_back_by_the_users_next_server(alone: Host) -> None:
    server = occupy(alone)
    server.stop(signal.SIGKILL)
    server.start()

    until(lambda: not alone.instances() and not alone.records(), "nothing left", log=server.log)


def test_a_kernel_that_outlives_its_killed_server_keeps_its_instance_until_it_ends(served: Host) -> None:
    server = served.server(specs=SPECS)
    kernel = server.kernel("stays")
    server.kernel("gpu")
    record = served.record_of(kernel.id)
    assert record is not None
    pid = record.witnesses[-1].pid
    server.stop(signal.SIGKILL)
    served.until_free(left=1, log=server.log)
    server.start()

    assert served.record_of(kernel.id) is not None
    assert machine.process(pid) is not None
    os.kill(pid, signal.SIGKILL)
    served.until_free(log=server.log)


@pytest.mark.parametrize("way", ["served", "alone"])
def test_a_child_that_outlives_its_kernel_keeps_the_place_withheld_and_nobody_waiting(
    request: pytest.FixtureRequest, way: str, tmp_path: Path
) -> None:
    host: Host = request.getfixturevalue(way)
    server, output = host.server(specs=SPECS), tmp_path / "output"
    kernel = server.kernel("gpu")
    pid = int(kernel.run(WORK.format(node=str(host.folder), output=str(output))))
    server.until(lambda: output.exists() and output.read_text().startswith("opened "), "it uses the instance")
    kernel.shutdown()
    (record,) = host.records()
    neighbour = server.kernel("gpu").environment()["GRES_MIG_UUID"]
    (kept,) = (i for i in host.instances() if neighbour not in i.mig_uuids)

    assert getattr(record, "stuck", None) is not None
    assert kept.holders == (pid,)
    os.kill(pid, signal.SIGTERM)
    until(lambda: len(host.instances()) == len(host.records()) == 1, "given back", log=server.log)


def test_a_server_whose_kernels_share_one_instance_has_it_from_its_start_to_its_end(alone: Host) -> None:
    server = alone.server(specs=SPECS, variables={"GRES_MIG_SHARE": "server", "GRES_MIG_SERVER_MEMORY": "8000"})
    (instance,) = alone.instances()
    told = {server.kernel("gpu").environment()["GRES_MIG_UUID"] for _ in range(2)}

    assert told == set(instance.mig_uuids)
    assert alone.instances() == [instance]
    assert server.stop(within=FREED_S) == 0
    assert (alone.instances(), alone.records()) == ([], ())


def test_what_a_killed_servers_kernels_shared_is_given_back_by_the_service(served: Host) -> None:
    server = served.server(specs=SPECS, variables={"GRES_MIG_SHARE": "server", "GRES_MIG_SERVER_MEMORY": "8000"})
    server.kernel("gpu")
    server.stop(signal.SIGKILL)

    served.until_free(log=server.log)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_a_service_that_is_started_again_takes_nothing_from_a_running_kernel(served: Host, how: signal.Signals) -> None:
    server = served.server(specs=SPECS)
    kernel = server.kernel("gpu")
    before = served.instances()
    served.stop_service(how)
    still = kernel.run("import os; print(os.environ['GRES_MIG_UUID'])")
    served.serve()

    assert (still,) == before[0].mig_uuids
    assert kernel.restart().code == 200
    assert served.instances() == before
    kernel.shutdown()
    served.until_free(log=server.log)


@pytest.mark.parametrize("how", ["restarted", "crashed"])
def test_a_kernel_that_is_restarted_while_the_service_is_away_keeps_its_instance(served: Host, how: str) -> None:
    server = served.server(specs=SPECS)
    kernel = server.kernel("gpu")
    before, first = served.instances(), kernel.pid()
    kernel.disconnect()
    served.stop_service(signal.SIGKILL)
    if how == "restarted":
        assert kernel.restart().code == 200
    else:
        os.kill(first, signal.SIGKILL)
        until(lambda: "keeps its instance" in server.log(), "started again", log=server.log)
    told, second = kernel.environment(), kernel.pid()
    served.serve()
    until(lambda: _pid_on_record(served) == second, "its pid on record", log=server.log)

    assert (told["GRES_MIG_UUID"],) == before[0].mig_uuids
    assert served.instances() == before
    kernel.shutdown()
    served.until_free(log=server.log)


def _pid_on_record(host: Host) -> int:
    (record,) = host.records()
    return record.witnesses[-1].pid


def test_without_its_service_a_node_refuses_kernels_with_gpu_memory_and_no_other(served: Host) -> None:
    server = served.server(specs=SPECS)
    kernel = server.kernel("gpu")
    served.stop_service(signal.SIGKILL)
    reply = server.ask("POST", "/api/kernels", {"name": "gpu"})

    assert reply.code == 500
    assert reply.body["message"].startswith("the node service of this node does not answer")
    assert server.kernel("plain").run("1 + 1") == "2"
    status = server.get("/gres-mig/api/v1/status")
    assert (status["way"], status["service"]) == ("service", None)
    assert status["reason"].startswith("the node service of this node does not answer")
    kernel.shutdown()
    served.serve()
    served.until_free(log=server.log)


def test_a_notebook_that_is_run_from_the_command_line_gives_its_instance_back_once(alone: Host, tmp_path: Path) -> None:
    """nbclient cleans its kernel up twice, and there is no server around it."""
    server = alone.server(specs=SPECS)
    cell = {"cell_type": "code", "execution_count": None, "id": "a", "metadata": {}, "outputs": [],
            "source": "import os\nprint(os.environ['GRES_MIG_UUID'])"}  # fmt: skip
    notebook = tmp_path / "a.ipynb"
    notebook.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    program = "from nbclient.cli import main; main()"
    words = [sys.executable, "-c", program, "--kernel_name=gpu", f"--output={tmp_path / 'done'}", str(notebook)]
    done = subprocess.run(words, env=server.environment(), capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    printed = json.loads((tmp_path / "done.ipynb").read_text())["cells"][0]["outputs"][0]["text"]
    assert "".join(printed).startswith("MIG-")
    assert (alone.instances(), alone.records()) == ([], ())

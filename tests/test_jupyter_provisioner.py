"""The provisioner under real kernel managers: what a start gets, and that no order of calls leaves anything."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.ioloop import AsyncIOLoopKernelManager
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager, KernelManager
from jupyter_client.multikernelmanager import AsyncMultiKernelManager
from jupyter_client.provisioning import local_provisioner
from nbclient import NotebookClient
from notebook_server import PATIENCE_S, Host, gpu_spec, until
from tornado.web import HTTPError
from traitlets.config import Config

from gres_mig import machine
from gres_mig.allocator import Allocator
from gres_mig.models import Owner, Request
from gres_mig.state import Store
from gres_mig_jupyter import node
from gres_mig_jupyter.provisioner import MigProvisioner

KERNEL = "a1111111-2222-4333-8444-555555555555"
OTHER = "b9999999-2222-4333-8444-555555555555"
PLACES = 4
"""For 8,000 MiB on the one GPU of the node."""

WRITES = "import json, os, sys, time; open(sys.argv[1], 'w').write(json.dumps(dict(os.environ))); time.sleep(600)"
"""A kernel that says nothing: it writes down its environment, and waits."""


@pytest.fixture(scope="module", params=["service", "direct"])
def there(request: pytest.FixtureRequest) -> Iterator[Host]:
    """A node with one GPU, with a service, and as its owner's own machine."""
    with Host() as host:
        if request.param == "service":
            host.serve()
        yield host


@pytest.fixture
def host(there: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """That node, as a server on it sees it; after each test nothing may be left on it, and no kernel."""
    _be_a_server(there, tmp_path, monkeypatch)
    yield there
    left = children()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    there.gpus.mend()
    there.until_free()
    assert not left


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A node of one's own without a service."""
    with Host() as host:
        _be_a_server(host, tmp_path, monkeypatch)
        yield host


@pytest.fixture(autouse=True)
def contexts() -> Iterator[None]:
    """What a manager whose start failed leaves open (jupyter_client 8.10) is no leak of ours."""
    yield
    while _made:
        made = _made.pop()
        if made._created_context:
            made.context.destroy(linger=0)


_made: list[KernelManager] = []


def _be_a_server(host: Host, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRES_MIG_SHARE", "GRES_MIG_UUID", "GRES_MIG_SERVER_MEMORY", "GRES_MIG_CONFIG", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GRES_MIG_NODE", str(host.folder))
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR", "HOME"):
        monkeypatch.setenv(name, str(folder / name.lower()))
    # Each test is a server of its own.
    monkeypatch.setattr(node, "_servers", {})


def children() -> list[int]:
    """Kernels of this process that still run; each begins a session of its own."""
    found = []
    for entry in os.listdir("/proc"):
        with suppress(OSError, IndexError, ValueError):
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid() and fields[0] != "Z" and "/kernel-" in _command(entry):
                found.append(int(entry))
    return found


def _command(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def quiet(out: Path, **asks: Any) -> dict[str, Any]:
    """A spec of a kernel that writes its environment into that file; the connection file's name marks its process."""
    return gpu_spec(argv=[sys.executable, "-c", WRITES, str(out), "{connection_file}"], **asks)


def manager(spec: dict[str, Any], kind: type[KernelManager] = AsyncKernelManager, **traits: Any) -> Any:
    """A real kernel manager with that spec."""
    made = kind(**traits)
    made._kernel_spec = KernelSpec(**spec)
    _made.append(made)
    return made


def told(out: Path) -> dict[str, str]:
    """What such a kernel was told, as soon as it has written it; the next one writes anew."""
    until(lambda: out.exists() and out.read_text().endswith("}"), "the kernel writes its environment")
    variables: dict[str, str] = json.loads(out.read_text())
    out.unlink()
    return variables


def fill(host: Host, places: int = PLACES) -> None:
    """Take that many places of the node's GPU."""
    allocator = _allocator(host)
    for number in range(places):
        allocator.allocate(Owner(f"manual:other-{number}"), Request(8000))


def empty(host: Host) -> None:
    """Give them back."""
    for number in range(PLACES):
        _allocator(host).reclaim(Owner(f"manual:other-{number}"))


def _allocator(host: Host) -> Allocator:
    settings, boot_id = host.settings, machine.boot_id(host.settings.simulator)
    return Allocator(settings, Store(settings, boot_id), boot_id)


def test_a_kernel_gets_an_instance_is_told_which_and_can_say_it(host: Host) -> None:
    async def life() -> tuple[str, Any]:
        kernel = manager(gpu_spec("8G"))
        await kernel.start_kernel(kernel_id=KERNEL)
        record = host.record_of(KERNEL)
        client = kernel.client()
        client.start_channels()
        try:
            await client.wait_for_ready(timeout=PATIENCE_S)
            said: list[str] = []
            code = "import os, gres_mig; print(os.environ['CUDA_VISIBLE_DEVICES']); print(gres_mig.current())"
            await client.execute_interactive(
                code, output_hook=lambda message: said.append(message["content"].get("text", "")), timeout=PATIENCE_S
            )
        finally:
            client.stop_channels()
            await kernel.shutdown_kernel(now=True)
        return "".join(said), record

    said, record = asyncio.run(life())

    assert record is not None
    assert said.splitlines()[0] == record.mig_uuid
    assert said.splitlines()[1].startswith("1g.24gb (24,192 MiB) for 8,192 MiB, 0 MiB in use, ")
    assert record.witnesses[0].pid == os.getpid()
    assert len(record.witnesses) == 2


@pytest.mark.parametrize("now", [False, True], ids=["asked", "killed"])
@pytest.mark.parametrize("kind", [AsyncKernelManager, AsyncIOLoopKernelManager])
def test_a_restart_keeps_the_very_same_instance_and_touches_no_hardware(
    host: Host, tmp_path: Path, kind: type[KernelManager], now: bool
) -> None:
    fill(host, PLACES - 1)

    async def life() -> tuple[list[str], list[Any], int]:
        kernel = manager(quiet(tmp_path / "out"), kind, shutdown_wait_time=0.1)
        await kernel.start_kernel(kernel_id=KERNEL)
        uuids, records = [told(tmp_path / "out")["GRES_MIG_UUID"]], [host.record_of(KERNEL)]
        host.log_calls()
        before = host.changes()
        for _ in range(2):
            await kernel.restart_kernel(now=now)
            uuids.append(told(tmp_path / "out")["GRES_MIG_UUID"])
            records.append(host.record_of(KERNEL))
        changes = host.changes() - before
        await kernel.shutdown_kernel(now=True)
        return uuids, records, changes

    uuids, records, changes = asyncio.run(life())
    empty(host)

    assert changes == 0
    assert len(set(uuids)) == len({record.nonce for record in records}) == 1
    assert len({record.witnesses[1] for record in records}) == 3
    assert {record.witnesses[0].pid for record in records} == {os.getpid()}


def test_a_kernel_manager_without_asyncio_does_it_too(host: Host, tmp_path: Path) -> None:
    kernel = manager(quiet(tmp_path / "out"), KernelManager, shutdown_wait_time=0.1)
    kernel.start_kernel(kernel_id=KERNEL)
    first = told(tmp_path / "out")
    kernel.restart_kernel(now=True)
    second = told(tmp_path / "out")
    kernel.shutdown_kernel(now=True)

    assert first["GRES_MIG_UUID"] == second["GRES_MIG_UUID"]
    assert host.record_of(KERNEL) is None


def test_a_kernel_whose_instance_was_lost_is_told_of_its_new_one(host: Host, tmp_path: Path) -> None:
    async def life() -> tuple[dict[str, str], dict[str, str], Any]:
        kernel = manager(quiet(tmp_path / "out"))
        await kernel.start_kernel(kernel_id=KERNEL)
        first = told(tmp_path / "out")
        (instance,) = host.instances()
        host.gpus.destroy(0, instance.id)
        # Something else in its place, which would give the same UUID again.
        host.gpus.make(0, "2g.48gb", 0)
        await kernel.restart_kernel(now=True)
        second, record = told(tmp_path / "out"), host.record_of(KERNEL)
        await kernel.shutdown_kernel(now=True)
        (foreign,) = host.instances()
        host.gpus.destroy(0, foreign.id)
        return first, second, record

    first, second, record = asyncio.run(life())

    assert second["CUDA_VISIBLE_DEVICES"] == record.mig_uuid != first["CUDA_VISIBLE_DEVICES"]


def test_a_restart_needs_no_gpu_that_takes_new_work(host: Host, tmp_path: Path) -> None:
    async def life() -> tuple[dict[str, str], dict[str, str]]:
        kernel = manager(quiet(tmp_path / "out"))
        await kernel.start_kernel(kernel_id=KERNEL)
        first = told(tmp_path / "out")
        (gpu,) = host.gpus.uuids
        _allocator(host).fence(gpu, "a test")
        try:
            await kernel.restart_kernel(now=True)
            second = told(tmp_path / "out")
        finally:
            _allocator(host).unfence(gpu)
            await kernel.shutdown_kernel(now=True)
        return first, second

    first, second = asyncio.run(life())

    assert first["GRES_MIG_UUID"] == second["GRES_MIG_UUID"]


def test_a_restart_that_gets_no_instance_any_more_is_refused_and_leaves_nothing(host: Host, tmp_path: Path) -> None:
    async def life() -> str:
        kernel = manager(quiet(tmp_path / "out"))
        await kernel.start_kernel(kernel_id=KERNEL)
        (instance,) = host.instances()
        host.gpus.destroy(0, instance.id)
        host.gpus.make(0, "4g.96gb", 0)
        try:
            with pytest.raises(node.Refused) as refused:
                await kernel.restart_kernel(now=True)
        finally:
            host.gpus.destroy(0, host.instances()[0].id)
        await kernel.shutdown_kernel(now=True)
        return refused.value.text

    assert asyncio.run(life()).startswith("no room for 8,000 MiB on this node: ")
    assert host.record_of(KERNEL) is None


def test_where_it_fits_nowhere_a_start_is_refused_in_one_sentence(host: Host, tmp_path: Path) -> None:
    fill(host)
    kernel = manager(quiet(tmp_path / "out"))

    with pytest.raises(HTTPError) as refused:
        asyncio.run(kernel.start_kernel(kernel_id=KERNEL))
    empty(host)

    sentence = (
        "no room for 8,000 MiB on this node: 4 of 4 places for 1g.24gb are taken; "
        "shut down a GPU kernel, or try again later"
    )
    assert (str(refused.value), refused.value.log_message, refused.value.status_code) == (sentence, sentence, 503)
    assert host.record_of(KERNEL) is None


@pytest.mark.parametrize(
    ("asks", "says"),
    [
        ({"memory": "8G", "gpu": "GPU-1"}, "the kernel spec's provisioner config says 'gpu': no such key; "),
        ({"memory": "8G", "node_config": "/tmp/mine.toml"}, "the kernel spec's provisioner config says 'node_config'"),
        ({"memory": "8G", "profile": "1g.24gb"}, "this kernel asks for a memory size and for a profile"),
        ({}, "this kernel does not say how much GPU memory it wants; "),
        ({"memory": "8Q"}, "memory size '8Q': Q is not a unit"),
        ({"memory": True}, "memory True is no size"),
        ({"memory": ["8G"]}, "memory ['8G'] is no size"),
        ({"memory": "900G"}, "no instance on this node holds 921,600 MiB: the largest is 4g.96gb (97,280 MiB); sizes "),
        ({"profile": "9g.999gb"}, "no profile 9g.999gb can be had on this node; there are: 1g.24gb, "),
        ({"profile": "--memory"}, "no profile --memory can be had on this node"),
        ({"profile": "a b"}, "profile 'a b' is no profile's name"),
    ],
    ids=str,
)
def test_what_a_kernel_spec_may_not_ask_is_refused_by_name(alone: Host, asks: dict[str, Any], says: str) -> None:
    spec = gpu_spec()
    spec["metadata"]["kernel_provisioner"]["config"] = asks
    kernel = manager(spec)

    with pytest.raises(node.Refused) as refused:
        asyncio.run(kernel.start_kernel())

    assert refused.value.text.startswith(says)
    assert refused.value.status_code == 400
    assert not alone.records()
    assert node.this_server().way == "direct"


@pytest.mark.parametrize(
    ("spec", "server", "environ", "gets"),
    [
        ("8G", "", "", "8192"),
        ("8G", "40G", "90G", "8192"),
        (None, "40G", "90G", "40960"),
        (None, 40000, "", "40000"),
        (None, "", "90G", "92160"),
    ],
)
def test_the_spec_counts_before_the_servers_configuration_and_that_before_its_environment(
    alone: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str | None, server: Any, environ: str, gets: str
) -> None:
    monkeypatch.setenv("GRES_MIG_SERVER_MEMORY", environ)
    configured = Config({"MigProvisioner": {"memory": server}}) if server else Config()

    async def life() -> dict[str, str]:
        kernel = manager(quiet(tmp_path / "out", memory=spec), config=configured)
        await kernel.start_kernel()
        variables = told(tmp_path / "out")
        await kernel.shutdown_kernel(now=True)
        return variables

    assert asyncio.run(life())["GRES_MIG_REQUESTED"] == gets
    assert not alone.records()


@pytest.mark.parametrize("how", ["the server's configuration", "its environment"])
def test_a_server_may_be_told_of_another_configuration_of_the_node(
    alone: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.delenv("GRES_MIG_NODE")
    file = tmp_path / "config.toml"
    file.write_text(f'gpus = "*"\nsimulator = "{alone.folder}"\n')
    configured = Config()
    if how == "its environment":
        monkeypatch.setenv("GRES_MIG_CONFIG", str(file))
    else:
        configured = Config({"MigProvisioner": {"node_config": str(file)}})

    async def life() -> int:
        kernel = manager(quiet(tmp_path / "out"), config=configured)
        await kernel.start_kernel()
        told(tmp_path / "out")
        number = len(alone.instances())
        await kernel.shutdown_kernel(now=True)
        return number

    assert asyncio.run(life()) == 1
    assert not alone.instances()


@pytest.mark.parametrize(
    "kernel_id", ["../../evil", "", "x", KERNEL.upper(), f"{KERNEL}\n", f"{KERNEL}:1", "jupyter:0:" + KERNEL], ids=repr
)
def test_an_id_that_is_no_kernels_gets_nothing_and_writes_nothing(alone: Host, tmp_path: Path, kernel_id: str) -> None:
    async def launch() -> None:
        await MigProvisioner(kernel_id=kernel_id, kernel_spec=KernelSpec(**gpu_spec())).pre_launch()

    with pytest.raises(node.Refused) as refused:
        asyncio.run(launch())

    assert "not a UUID in lower case" in refused.value.text
    assert "\n" not in refused.value.text
    assert not alone.records()
    assert not list(tmp_path.iterdir())


def test_the_callers_environment_stays_as_it_is_and_what_it_says_of_gpus_counts_for_nothing(
    host: Host, tmp_path: Path
) -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "0", "CUDA_MPS_PIPE_DIRECTORY": "/mine", "NVIDIA_X": "1", "MINE": "2"}
    before = dict(env)

    async def life() -> dict[str, str]:
        kernel = manager({**quiet(tmp_path / "out"), "env": {"CUDA_VISIBLE_DEVICES": "1", "CUDA_HOME": "/cuda"}})
        await kernel.start_kernel(env=env)
        variables = told(tmp_path / "out")
        await kernel.shutdown_kernel(now=True)
        return variables

    variables = asyncio.run(life())

    assert env == before
    assert variables["CUDA_VISIBLE_DEVICES"] == variables["NVIDIA_VISIBLE_DEVICES"] == variables["GRES_MIG_UUID"]
    assert (variables["MINE"], variables["CUDA_HOME"]) == ("2", "/cuda")
    assert {"CUDA_MPS_PIPE_DIRECTORY", "NVIDIA_X"}.isdisjoint(variables)


def _no_such_command(kernel: Any) -> None:
    kernel._kernel_spec.argv = ["/nonexistent/kernel", "{connection_file}"]


def _no_such_folder(kernel: Any) -> None:
    kernel._launch_in = "/nonexistent"


def _callback_fails(kernel: Any) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no callbacks today")

    kernel.add_restart_callback = fails


@pytest.mark.parametrize("fault", [_no_such_command, _no_such_folder, _callback_fails])
def test_a_start_that_fails_leaves_no_instance_and_no_process(host: Host, tmp_path: Path, fault: Any) -> None:
    async def start() -> None:
        kernel = manager(quiet(tmp_path / "out"), AsyncIOLoopKernelManager)
        fault(kernel)
        await kernel.start_kernel(kernel_id=KERNEL, cwd=getattr(kernel, "_launch_in", None))

    with pytest.raises((OSError, RuntimeError)):
        asyncio.run(start())

    host.until_free()
    assert not children()


@pytest.mark.parametrize("when", ["asked", "made", "launched"])
def test_a_start_that_is_given_up_leaves_no_instance_and_no_process(
    host: Host, tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked of the node then comes to its end, and is given back after it."""

    async def start() -> None:
        kernel = manager(quiet(tmp_path / "out"))
        starting = asyncio.ensure_future(kernel.start_kernel(kernel_id=KERNEL))
        if when == "launched":
            launch = local_provisioner.launch_kernel

            def launch_and_give_up(*arguments: Any, **more: Any) -> Any:
                starting.cancel()
                return launch(*arguments, **more)

            monkeypatch.setattr(local_provisioner, "launch_kernel", launch_and_give_up)
        else:
            made = "nvmlGpuInstanceCreateComputeInstance"
            hang = host.gpus.plant(made if when == "made" else "nvmlDeviceCreateGpuInstanceWithPlacement", "hangs")
            await asyncio.to_thread(until, lambda: host.gpus.fired(hang), f"it is {when}")
            starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(start())
    host.gpus.mend()

    host.until_free()
    assert not children()


def test_when_the_server_gives_a_kernel_up_its_instance_is_given_back(host: Host) -> None:
    ends = gpu_spec(argv=[sys.executable, "-c", "raise SystemExit(1)", "{connection_file}"])
    often = Config({"KernelRestarter": {"restart_limit": 2, "time_to_dead": 0.05}})

    async def life() -> int:
        kernel = manager(ends, AsyncIOLoopKernelManager, config=often)
        restarts: list[int] = []
        dead = asyncio.Event()
        await kernel.start_kernel(kernel_id=KERNEL)
        kernel.add_restart_callback(lambda: restarts.append(1), "restart")
        kernel.add_restart_callback(dead.set, "dead")
        await dead.wait()
        await asyncio.to_thread(until, lambda: host.record_of(KERNEL) is None, "it is given back")
        return len(restarts)

    assert asyncio.run(asyncio.wait_for(life(), PATIENCE_S)) == 2


def test_calls_in_any_order_raise_nothing_and_take_nothing_from_another_kernel(alone: Host, tmp_path: Path) -> None:
    """2,000 orders before there is a kernel, and as many after it has ended, with another kernel running meanwhile."""
    orders = random.Random(81)
    calls = {
        "cleanup": lambda p: p.cleanup(),
        "cleanup for a restart": lambda p: p.cleanup(restart=True),
        "kill": lambda p: p.kill(restart=False),
        "terminate": lambda p: p.terminate(restart=True),
        "poll": lambda p: p.poll(),
        "wait": lambda p: p.wait(),
        "interrupt": lambda p: p.send_signal(signal.SIGINT),
        "shutdown": lambda p: p.shutdown_requested(),
    }

    async def life() -> Any:
        neighbour = manager(quiet(tmp_path / "neighbour"))
        await neighbour.start_kernel(kernel_id=OTHER)
        told(tmp_path / "neighbour")
        kernel = manager(quiet(tmp_path / "out"))
        await kernel.start_kernel(kernel_id=KERNEL)
        await kernel.shutdown_kernel(now=True)
        for _ in range(2000):
            order = orders.choices(list(calls), k=orders.randint(1, 6))
            fresh = MigProvisioner(kernel_id=OTHER, kernel_spec=kernel.kernel_spec, parent=kernel)
            for name in order:
                await calls[name](fresh)
                await calls[name](kernel.provisioner)
        left = alone.record_of(OTHER), len(alone.records()), await neighbour.is_alive()
        await neighbour.shutdown_kernel(now=True)
        return left

    record, number, lives = asyncio.run(life())

    assert record is not None
    assert (number, lives) == (1, True)


def test_a_kernel_in_any_order_of_its_life_leaves_nothing(host: Host, tmp_path: Path) -> None:
    orders = random.Random(35)

    async def life() -> None:
        for _ in range(8):
            provisioner = MigProvisioner(kernel_id=KERNEL, kernel_spec=KernelSpec(**quiet(tmp_path / "out")))
            for step in orders.choices(["launch", "restart", "end"], k=5):
                await provisioner.kill()
                await provisioner.wait()
                if step == "launch":
                    kwargs = await provisioner.pre_launch()
                    await provisioner.launch_kernel(kwargs.pop("cmd"), **kwargs)
                    await provisioner.post_launch()
                else:
                    await provisioner.cleanup(restart=step == "restart")
            await provisioner.kill()
            await provisioner.wait()
            await provisioner.cleanup()
            assert host.record_of(KERNEL) is None

    asyncio.run(life())


def test_a_notebook_run_by_nbclient_gives_its_instance_back_though_it_cleans_up_twice(
    host: Host, tmp_path: Path
) -> None:
    place = Path(os.environ["JUPYTER_DATA_DIR"]) / "kernels" / "gpu"
    place.mkdir(parents=True)
    (place / "kernel.json").write_text(json.dumps(gpu_spec("8G")))
    cell = nbformat.v4.new_code_cell("import gres_mig; print(gres_mig.current().profile)")
    notebook = nbformat.v4.new_notebook(cells=[cell])

    NotebookClient(notebook, kernel_name="gpu", timeout=PATIENCE_S).execute()

    assert notebook.cells[0].outputs[0]["text"] == "1g.24gb\n"
    assert KernelSpecManager().get_kernel_spec("gpu").metadata["kernel_provisioner"]["provisioner_name"] == "gres-mig"
    assert not host.records()


def test_of_many_starts_at_once_as_many_run_as_there_are_places(host: Host, tmp_path: Path) -> None:
    async def life() -> list[Any]:
        kernels = AsyncMultiKernelManager()
        specs = Path(os.environ["JUPYTER_DATA_DIR"]) / "kernels"
        (specs / "gpu").mkdir(parents=True)
        (specs / "gpu" / "kernel.json").write_text(json.dumps(quiet(tmp_path / "out")))
        starts = (kernels.start_kernel(kernel_name="gpu") for _ in range(3 * PLACES))
        started = await asyncio.gather(*starts, return_exceptions=True)
        running = [each for each in started if isinstance(each, str)]
        uuids = {host.record_of(each).mig_uuid for each in running}  # type: ignore[union-attr]
        await asyncio.gather(*(kernels.shutdown_kernel(each, now=True) for each in running))
        return [len(running), len(uuids), *{str(each) for each in started if not isinstance(each, str)}]

    running, different, *refusals = asyncio.run(life())

    assert (running, different) == (PLACES, PLACES)
    assert refusals
    assert all(refusal.startswith("no room for 8,000 MiB on this node") for refusal in refusals)


def test_while_the_service_is_down_gpu_kernels_are_refused_soon_and_others_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Host() as host:
        host.serve()
        host.stop_service(signal.SIGKILL)
        _be_a_server(host, tmp_path, monkeypatch)

        async def life() -> tuple[str, int]:
            with pytest.raises(node.Refused) as refused:
                await asyncio.wait_for(manager(quiet(tmp_path / "out")).start_kernel(), 3.0)
            plain = manager({**quiet(tmp_path / "plain"), "metadata": {}})
            await plain.start_kernel()
            variables = told(tmp_path / "plain")
            await plain.shutdown_kernel(now=True)
            return refused.value.text, len([name for name in variables if name == "GRES_MIG_UUID"])

        sentence, uuids = asyncio.run(life())
        socket = host.socket

    assert sentence.startswith(f"the node service of this node does not answer ({socket}): ")
    assert uuids == 0
    assert not children()


def test_in_a_job_kernels_use_the_jobs_instance_and_none_of_their_own(
    alone: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"GRES_MIG_UUID": "MIG-1", "GRES_MIG_PROFILE": "1g.24gb", "GRES_MIG_MEMORY_MIB": "24192"}
    for name, value in {**job, "SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "0"}.items():
        monkeypatch.setenv(name, value)

    async def life() -> tuple[list[dict[str, str]], str]:
        seen = []
        for asks in ({"memory": "8G"}, {"profile": "1g.24gb"}):
            kernel = manager(quiet(tmp_path / "out", **asks))
            await kernel.start_kernel()
            seen.append(told(tmp_path / "out"))
            await kernel.shutdown_kernel(now=True)
        with pytest.raises(node.Refused) as refused:
            await manager(quiet(tmp_path / "out", memory="40G")).start_kernel()
        return seen, refused.value.text

    seen, refusal = asyncio.run(life())

    assert {each["CUDA_VISIBLE_DEVICES"] for each in seen} == {"MIG-1"}
    assert refusal.startswith("this kernel asks for 40,960 MiB, and this job's instance holds 24,192 MiB; ")
    assert not alone.records()
    assert not alone.instances()


def test_where_a_server_shares_one_instance_its_kernels_have_that_one(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRES_MIG_SHARE", "server")
    monkeypatch.setenv("GRES_MIG_SERVER_MEMORY", "8000")

    async def life() -> tuple[set[str], list[Any], list[Any]]:
        here = node.this_server()
        kernels = [manager(quiet(tmp_path / f"out{n}", memory=None)) for n in range(2)]
        await asyncio.gather(*(kernel.start_kernel() for kernel in kernels))
        uuids = {told(tmp_path / f"out{n}")["GRES_MIG_UUID"] for n in range(2)}
        for kernel in kernels:
            await kernel.shutdown_kernel(now=True)
        shared, records = here.shared, host.records()
        assert shared is not None
        await here.reclaim(shared["kernel_id"])
        return uuids, [record.mig_uuid for record in records], [w.pid for record in records for w in record.witnesses]

    uuids, recorded, witnesses = asyncio.run(life())

    assert uuids == set(recorded)
    assert witnesses == [os.getpid()] * 2


def test_a_kernel_for_a_notebook_that_has_one_is_told_to_end_that_first(host: Host, tmp_path: Path) -> None:
    fill(host, PLACES - 1)
    env = {**os.environ, "JPY_SESSION_NAME": "/home/me/a.ipynb"}

    async def life() -> str:
        first = manager(quiet(tmp_path / "out"))
        await first.start_kernel(env=env)
        with pytest.raises(node.Refused) as refused:
            await manager(quiet(tmp_path / "other")).start_kernel(env=env)
        await first.shutdown_kernel(now=True)
        return refused.value.text

    refusal = asyncio.run(life())
    empty(host)

    assert refusal.startswith("shut this notebook's current kernel down first, it has 1g.24gb: no room for ")


def test_a_share_that_is_none_is_not_taken_for_another(alone: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRES_MIG_SHARE", "Server")

    here = node.this_server()

    assert (here.way, here.reason) == ("none", "GRES_MIG_SHARE is 'Server'; write kernel or server")


def test_a_machine_that_is_not_set_up_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Host() as host:
        _be_a_server(host, tmp_path, monkeypatch)
        monkeypatch.setenv("GRES_MIG_NODE", str(tmp_path / "nothing"))

        here = node.this_server()
        with pytest.raises(node.Refused) as refused:
            asyncio.run(manager(quiet(tmp_path / "out")).start_kernel())

    assert here.way == "none"
    assert refused.value.text == here.reason
    assert here.reason.startswith(f"{tmp_path / 'nothing'} holds no simulated node")


def test_a_server_that_ends_does_not_wait_for_a_node_that_hangs(alone: Host) -> None:
    """Its threads are daemons: one that still asks keeps no interpreter from ending."""
    hang = alone.gpus.plant("nvmlDeviceGetMigMode", "hangs", times=0)
    code = (
        "import asyncio, sys\n"
        "from gres_mig.simulator.admin import Node\n"
        "from gres_mig_jupyter import node\n"
        "async def main():\n"
        f"    asking = asyncio.ensure_future(node.this_server().allocate({KERNEL!r}, memory='8000'))\n"
        f"    while not Node(sys.argv[1]).fired({hang}): await asyncio.sleep(0.01)\n"
        "asyncio.run(main())\n"
    )
    words = [sys.executable, "-c", code, str(alone.folder)]
    try:
        done = subprocess.run(words, timeout=PATIENCE_S, capture_output=True, text=True, check=False)
        hanging = alone.gpus.fired(hang)
    finally:
        alone.gpus.mend()

    assert (done.returncode, done.stderr) == (0, "")
    assert hanging


def test_no_thread_is_left_when_nothing_is_asked(host: Host, tmp_path: Path) -> None:
    async def life() -> None:
        kernel = manager(quiet(tmp_path / "out"))
        await kernel.start_kernel()
        await kernel.shutdown_kernel(now=True)

    asyncio.run(life())
    gc.collect()

    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "gres-mig"], "no thread is left")

"""Kernels on a machine that has only GPUs without MIG: each in a slice of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from notebook_server import PATIENCE_S, Host, gpu_spec
from vgpu import require_compiler, slicing

from gres_mig import answers, machine
from gres_mig.allocator import Allocator
from gres_mig.models import Owner, Request
from gres_mig.state import Store
from gres_mig_jupyter import node
from tests.command_line import here

require_compiler()

WHOLE = 44_173
"""The largest slice of an L40."""

SAYS = """\
import gres_mig, os
own = gres_mig.current()
print(own.profile, own.memory_mib, own.requested, own.isolation, own.uuid == os.environ["CUDA_VISIBLE_DEVICES"])
print(own)
print([path.rpartition("/")[2] for path in os.environ["LD_PRELOAD"].split(":")])
"""


@pytest.fixture(params=["service", "direct"])
def host(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """An L40 that is shared, as a server sees it: with a service, and as its owner's own machine."""
    monkeypatch.setattr(node, "_servers", {})
    for name in ("GRES_MIG_SHARE", "GRES_MIG_UUID", "GRES_MIG_SERVER_MEMORY", "GRES_MIG_CONFIG", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    with Host([("l40", 1)]) as host:
        shared = slicing(host.base)
        more = f'slices = "*"\nhami_core = "{shared.hami_core}"\nkeep_umask = "{shared.keep_umask}"\n'
        (host.folder / "config.toml").write_text(f'gpus = "*"\n{more}')
        monkeypatch.setenv("GRES_MIG_NODE", str(host.folder))
        if request.param == "service":
            host.serve()
        yield host
        host.until_free()


def manager(spec: dict[str, Any]) -> AsyncKernelManager:
    """A real kernel manager with that spec."""
    made = AsyncKernelManager()
    made._kernel_spec = KernelSpec(**spec)
    return made


async def said(kernel: AsyncKernelManager, code: str) -> str:
    """What the kernel prints."""
    client = kernel.client()
    client.start_channels()
    texts: list[str] = []
    try:
        await client.wait_for_ready(timeout=PATIENCE_S)
        await client.execute_interactive(
            code, output_hook=lambda message: texts.append(message["content"].get("text", "")), timeout=PATIENCE_S
        )
    finally:
        client.stop_channels()
    return "".join(texts)


@pytest.fixture
def own(tmp_path: Path) -> str:
    """A library that a user preloads himself."""
    source, library = tmp_path / "own.c", tmp_path / "own.so"
    source.write_text("int own;\n")
    subprocess.run(["cc", "-shared", "-o", str(library), str(source)], check=True)
    return str(library)


def test_a_kernel_runs_in_a_slice_and_keeps_what_its_user_preloads(host: Host, own: str) -> None:
    kernel = manager({**gpu_spec("4G"), "env": {"LD_PRELOAD": own}})

    async def life() -> list[str]:
        await kernel.start_kernel(kernel_id=str(uuid.uuid4()))
        try:
            first = await said(kernel, SAYS)
            await kernel.restart_kernel(now=True)
            return [first, await said(kernel, SAYS)]
        finally:
            await kernel.shutdown_kernel(now=True)

    first, again = (each.splitlines() for each in asyncio.run(life()))

    assert first[0] == "slice 4096 4096 cooperative True"
    assert first[1].startswith("slice (4,096 MiB) for 4,096 MiB, 0 MiB in use, ")
    assert first[2] == f"of {host.gpus.uuids[0]}, isolation=cooperative"
    assert first[3] == again[3] == "['keep_umask.so', 'libvgpu.so', 'own.so']"


def test_kernels_of_a_jobs_server_share_its_slice_and_its_limit(
    host: Host, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Owner("slurm:c:7")
    allocator = Allocator(host.settings, Store(host.settings, boot := machine.boot_id(str(host.folder))), boot)
    variables = answers.environment(allocator.allocate(job, Request(4096)).allocation)
    for name, value in {**variables, "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    kernel = manager({**gpu_spec("2G"), "env": {"LD_PRELOAD": own}})

    async def life() -> list[str]:
        await kernel.start_kernel(kernel_id=str(uuid.uuid4()))
        try:
            return (await said(kernel, SAYS + "print(os.environ['CUDA_DEVICE_MEMORY_LIMIT'])")).splitlines()
        finally:
            await kernel.shutdown_kernel(now=True)

    told = asyncio.run(life())
    monkeypatch.undo()
    allocator.reclaim(job)

    assert told[0] == "slice 4096 4096 cooperative True"
    assert told[3:] == ["['keep_umask.so', 'libvgpu.so', 'own.so']", "4096m"]


def test_the_hub_shows_sizes_of_slices_that_a_cluster_has(tmp_path: Path) -> None:
    pytest.importorskip("batchspawner")
    from gres_mig_jupyter.hub_slurm import MigSlurmSpawner

    file = tmp_path / "sizes"
    file.write_text("format 1\ntype a\nboard 1 44685 NVIDIA L40\nslices 512\n")
    sizes = asyncio.run(MigSlurmSpawner(gpu_sizes_file=str(file)).gpu_sizes())

    assert [(size.memory_mib, size.profiles) for size in sizes] == [
        (mib, ("slice",)) for mib in (4096, 10240, 21504, WHOLE)
    ]


def test_who_finds_no_room_reads_how_much_is_left(host: Host) -> None:
    first, second = manager(gpu_spec("40G")), manager(gpu_spec("8G"))

    async def life() -> str:
        await first.start_kernel(kernel_id=str(uuid.uuid4()))
        try:
            with pytest.raises(node.Refused) as refused:
                await second.start_kernel(kernel_id=str(uuid.uuid4()))
        finally:
            await first.shutdown_kernel(now=True)
        return refused.value.text

    text = asyncio.run(life())

    # 40 GiB and their overhead are gone, and so is the overhead of the next.
    assert text.endswith(": the largest that is free is 2,701 MiB, on GPU 0")


def test_the_sizes_to_choose_from_are_parts_of_the_card_and_what_is_free(host: Host) -> None:
    async def life() -> tuple[Any, Any]:
        here_ = node.this_server()
        before = await here_.sizes()
        await here_.allocate(str(uuid.UUID(int=1)), memory="20000")
        # A service counts anew when it hears of it.
        during = await here_.sizes()
        await here_.reclaim(str(uuid.UUID(int=1)))
        return before, during

    before, during = asyncio.run(life())

    assert [(each["profile"], each["memory_mib"], each["free"]) for each in before] == [
        ("slice", 4096, 9),
        ("slice", 10240, 4),
        ("slice", 21504, 2),
        ("slice", WHOLE, 1),
    ]
    assert {each["memory_mib"]: each["free"] for each in during} == {4096: 5, 10240: 2, 21504: 1, 23661: 1, WHOLE: 0}


def test_a_kernel_for_each_size_is_installed(host: Host, tmp_path: Path) -> None:
    words = ("kernelspec", "install", "--all-profiles", "--prefix", tmp_path)

    made = here("--node", host.folder, *words, "--json").plain["kernelspecs"]
    refused = here("--node", host.folder, "kernelspec", "install", "--memory", "44G", "--prefix", tmp_path)

    assert [each["memory_mib"] for each in made] == [4096, 10240, 21504, WHOLE]
    assert all(json.loads(Path(each["path"], "kernel.json").read_text())["argv"] for each in made)
    assert (refused.code, "its sizes: 4,096 MiB, 10,240 MiB, 21,504 MiB, 44,173 MiB" in refused.err) == (2, True)


def test_a_node_whose_slices_nothing_limits_says_why_it_has_no_sizes(host: Host, tmp_path: Path) -> None:
    Path(host.folder, "config.toml").write_text('gpus = "*"\nslices = "*"\n')

    refused = here("--node", host.folder, "kernelspec", "install", "--all-profiles", "--prefix", tmp_path)

    assert refused.code == 4
    assert "no sizes to offer: nothing limits slices: hami_core names no library" in refused.err

"""`gres_mig.current()`: what a process says of its own instance."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gres_mig
from gres_mig import config, machine, simulator
from gres_mig.allocator import Allocator
from gres_mig.answers import environment
from gres_mig.models import Owner, Request, Settings
from gres_mig.own import NoInstance
from gres_mig.simulator import Node
from gres_mig.state import Store
from tests.command_line import here


@pytest.fixture
def inside(allocator: Allocator, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of an owner's process, which this one is for the time of a test."""
    allocation = allocator.allocate(Owner("manual:me"), Request(8000)).allocation
    variables = {**environment(allocation), "GRES_MIG_NODE": settings.simulator}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return variables


def test_it_says_what_it_is_what_was_asked_and_how_old_it_is(inside: dict[str, str]) -> None:
    own = gres_mig.current()

    assert own.uuid == inside["CUDA_VISIBLE_DEVICES"]
    assert (own.profile, own.memory_mib, own.requested) == ("1g.24gb", 24192, "8000")
    assert own.since is not None
    assert abs(time.time() - own.since) < 60
    assert own.age_s is not None


def test_it_says_how_much_of_it_is_in_use_now(inside: dict[str, str], node: Node) -> None:
    (instance,) = node.instances()
    before = gres_mig.current().used_mib
    node.hold(instance.gpu, instance.id, 0, pid=os.getpid(), memory_mib=512)

    assert (before, gres_mig.current().used_mib) == (0, 512)


def test_it_prints_for_a_person(inside: dict[str, str]) -> None:
    first, second = str(gres_mig.current()).splitlines()

    assert first.startswith("1g.24gb (24,192 MiB) for 8,000 MiB, 0 MiB in use, ")
    assert first.endswith("s old")
    assert second == f"{inside['GRES_MIG_UUID']} of {inside['GRES_MIG_GPU_UUID']}"
    assert repr(gres_mig.current()).startswith("1g.24gb")


def test_where_the_driver_does_not_say_it_the_rest_is_said(inside: dict[str, str], node: Node) -> None:
    (instance,) = node.instances()
    node.destroy(instance.gpu, instance.id)

    own = gres_mig.current()

    assert own.used_mib is None
    assert own.note.startswith(f"reading the memory of {own.uuid}: ")
    assert f"use not known ({own.note})" in str(own)


def test_of_a_slice_only_its_own_processes_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "node"
    assert here("simulate", "create", folder, "--board", "l40", "--driver", "615.10.04").code == 0
    (folder / "config.toml").write_text('slices = "*"\nexperimental_driver_limit = true\n')
    settings = config.load(node=folder)
    boot_id, node = machine.boot_id(settings.simulator), Node(folder)
    allocator = Allocator(settings, Store(settings, boot_id), boot_id)
    mine, other = (allocator.allocate(Owner(f"manual:{name}"), Request(4000)).allocation for name in ("me", "other"))
    for name, value in {**environment(mine), "GRES_MIG_NODE": str(folder)}.items():
        monkeypatch.setenv(name, value)
    before = gres_mig.current()
    programs = [
        subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, env=environment(each))
        for each in (mine, other)
    ]
    for program, used_mib in zip(programs, (512, 3000), strict=True):
        node.hold(0, pid=program.pid, memory_mib=used_mib)

    own = gres_mig.current()
    for program in programs:
        program.communicate()
    simulator.uninstall()

    assert (before.used_mib, own.used_mib, own.memory_mib, own.isolation) == (0, 512, 4000, "driver-limit")
    assert str(own).startswith("slice (4,000 MiB) for 4,000 MiB, 512 MiB in use, ")
    assert str(own).endswith(f"\nof {node.uuids[0]}, isolation=driver-limit")


def test_a_profile_that_was_asked_for_by_name_is_no_size(
    allocator: Allocator, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocation = allocator.allocate(Owner("manual:me"), Request(0, "2g.48gb")).allocation
    for name, value in {**environment(allocation), "GRES_MIG_NODE": settings.simulator}.items():
        monkeypatch.setenv(name, value)

    assert str(gres_mig.current()).startswith("2g.48gb (48,512 MiB), 0 MiB in use, ")


def test_a_process_without_an_instance_is_told_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRES_MIG_UUID", raising=False)

    with pytest.raises(NoInstance) as nothing:
        gres_mig.current()

    assert str(nothing.value).startswith("this process has no GPU instance: GRES_MIG_UUID is not set; ")


def test_a_notebook_shows_just_that_line() -> None:
    code = "import IPython; IPython.InteractiveShell.instance().run_cell('import gres_mig; gres_mig.current()')"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GRES_MIG_")}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)

    shown = (done.stdout + done.stderr).strip().splitlines()
    assert len(shown) == 1
    assert shown[0].startswith("this process has no GPU instance: ")


def test_the_package_itself_imports_nothing_for_it() -> None:
    code = "import sys, gres_mig; print([name for name in sys.modules if name.startswith('gres_mig.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"

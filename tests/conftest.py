"""Fixtures of the tests: a simulated node, its settings and its allocator."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gres_mig import config, log, machine, simulator
from gres_mig.allocator import Allocator
from gres_mig.models import Settings
from gres_mig.simulator.admin import Node
from gres_mig.simulator.assembly import create
from gres_mig.state import Store
from gres_mig.values import replace


@pytest.fixture(autouse=True)
def _log() -> Iterator[None]:
    """A test that runs a hook in its own process sends the log elsewhere; the next test has it back."""
    yield
    log.send_to(log.to_logging)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory where there is one: what is tested syncs a file at every step."""
    shared = "/dev/shm"
    folder = tempfile.mkdtemp(prefix="gres-mig-", dir=shared if os.access(shared, os.W_OK) else None)
    yield Path(folder)
    shutil.rmtree(folder)


@pytest.fixture
def boards() -> list[tuple[str, int]]:
    """The boards of `node`; a test that wants others parametrizes `boards`, a module overrides it."""
    return [("rtx-pro-6000", 2)]


@pytest.fixture
def node(memory: Path, boards: list[tuple[str, int]]) -> Iterator[Node]:
    """A simulated node: its folder is `settings.simulator`, itself the admin's hands on it."""
    folder = memory / "node"
    create(folder, boards)
    yield Node(folder)
    simulator.uninstall()


@pytest.fixture
def settings(node: Node) -> Settings:
    """The node's settings: all GPUs managed."""
    return replace(config.defaults(node=node.store.folder), managed=("*",))


@pytest.fixture
def allocator(settings: Settings) -> Allocator:
    """The node's allocator, in this process."""
    boot_id = machine.boot_id(settings.simulator)
    return Allocator(settings, Store(settings, boot_id), boot_id)

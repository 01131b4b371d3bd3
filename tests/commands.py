"""The looking commands on one node: as its owner, and as somebody who may not read its records."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gres_mig import simulator

# Loaded while everything can be read: as another user, the interpreter's own files may not be.
from gres_mig.commands import doctor, profiles, status, why  # noqa: F401
from gres_mig.models import Settings
from tests.command_line import Answer, here

NOBODY = 65534


def run(node: simulator.Node, *words: str, columns: int = 80) -> Answer:
    """`gres-mig --node DIR WORDS` as on a terminal of so many columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        return here("--node", node.store.folder, *words)


@contextmanager
def nobody(node: simulator.Node, settings: Settings) -> Iterator[None]:
    """Be somebody who may neither read the records nor list instances: another user, or as good as one."""
    if os.geteuid() == 0:
        # The node's folder may be in one that is root's alone.
        os.chmod(os.path.dirname(node.store.folder), 0o755)
        os.seteuid(NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)
        return
    node.configure(permission="no-one")
    os.chmod(settings.state_dir, 0)
    try:
        yield
    finally:
        os.chmod(settings.state_dir, 0o700)
        node.configure(permission="owner")

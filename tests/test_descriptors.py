"""A caller without standard descriptors, as a daemon may be."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from gres_mig.simulator import Node
from gres_mig.simulator.program import command, environment


def test_an_instance_is_made_for_a_caller_whose_descriptors_are_all_closed(node: Node) -> None:
    words = ("--node", node.store.folder, "allocate", "--owner", "manual:a", "--memory", "8000")
    (Path(node.store.folder) / "config.toml").write_text('gpus = "*"\n')
    closed = f"exec {shlex.join(command(*words))} 0<&- 1>&- 2>&-"
    code = subprocess.run(["/bin/sh", "-c", closed], env=environment(), check=False).returncode

    assert code == 0
    assert [instance.profile for instance in node.instances()] == ["1g.24gb"]

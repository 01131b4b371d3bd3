"""Who holds a lock of the node, read from /proc/locks: to ask by taking it would keep others waiting."""

from __future__ import annotations

import os
from pathlib import Path


def lock_holders(run_dir: str, proc: Path = Path("/proc")) -> dict[str, int]:
    """The GPUs whose lock is held, and `node` if that one is, each with the pid of its holder."""
    names = {}
    try:
        with os.scandir(run_dir) as entries:
            for entry in entries:
                if entry.name == "node.lock" or (entry.name.startswith("gpu-") and entry.name.endswith(".lock")):
                    status = entry.stat(follow_symlinks=False)
                    inode = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
                    names[inode] = entry.name.removeprefix("gpu-").removesuffix(".lock")
        table = (proc / "locks").read_text()
    except OSError:
        return {}
    held = {}
    for line in table.splitlines():
        # 2: FLOCK  ADVISORY  WRITE 14528 fe:00:2197413 0 EOF; one that only waits has an arrow after its number.
        fields = line.split()
        if len(fields) == 8 and fields[1] == "FLOCK" and fields[5] in names:
            held[names[fields[5]]] = int(fields[4])
    return held

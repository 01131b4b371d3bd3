"""Which file system a folder is on, and whether other machines share it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from gres_mig.errors import StateError

NETWORK = frozenset(
    {
        *("9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs2", "gpfs", "lustre", "ncpfs", "nfs"),
        *("nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs"),
        *("fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs", "fuse.sshfs"),
    }
)
"""File systems of other machines: a record there outlives what it is about, and a lock may not be one."""


def file_system(folder: str, proc: Path = Path("/proc")) -> str:
    """The type of the file system that holds that folder, or will; empty where /proc does not tell."""
    try:
        table = (proc / "self" / "mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return ""
    path = os.path.realpath(folder)
    best = kind = ""
    for line in table.splitlines():
        before, _, after = line.partition(" - ")
        # Spaces and such in a name are written in octal.
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4])
        # Of two mounts at one place the later one is on top.
        if os.path.commonpath([path, point]) == point and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind


def refuse_a_network_file_system(folder: str, proc: Path = Path("/proc")) -> None:
    """`StateError` where the folder is on a disk of other machines."""
    kind = file_system(folder, proc)
    if kind in NETWORK:
        raise StateError(
            f"{folder} is on a network file system ({kind}): a node's records belong on its own disk",
            hint="name another folder in the configuration: state_dir",
            code="CONFIG",
        )

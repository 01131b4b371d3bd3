"""Records to write and read, and the bytes of a record file with any content."""

from __future__ import annotations

import json
from binascii import crc32
from typing import Any

from gres_mig.models import (
    Allocation,
    Fence,
    Intent,
    Owner,
    Placement,
    Process,
    Record,
    Release,
    Request,
    State,
    Stuck,
    Tombstone,
)

CAROL = Owner("slurm:alpha:4711", 1000, 1_700_000_000)


def record(kind: type[Record], nonce: str, start: int, **more: Any) -> Record:
    """A record of Carol's on a GPU that no node has."""
    return kind(
        nonce=nonce, owner=CAROL, request=Request(5_000, gpus=("GPU-1",)), begin=7, boot_id="boot", gpu_uuid="GPU-1",
        profile_id=14, profile_name="1g.6gb", memory_mib=5952, placement=Placement(start, 1), since=1.5,
        witnesses=(Process(4711, 99),), **more,
    )  # fmt: skip


FULL = State(
    "boot",
    (
        record(Intent, "i", 0, maker=Process(1, 2), creating=True, gi_id=3),
        record(Allocation, "a", 1, gi_id=4, ci_id=0, mig_uuid="MIG-1"),
        record(Release, "r", 2, gi_id=5, ci=True, stuck=Stuck(1.0, 2, 3.0, ("pid 1 init (root)",))),
    ),
    (Tombstone("manual:gone", 6),),
    {"GPU-2": Fence("hangs", 2.5)},
    generation=8,
)
"""One of everything."""


def sealed(plain: dict[str, Any]) -> bytes:
    """Those values as a gres-mig that has them would write them."""
    body = json.dumps({key: value for key, value in plain.items() if key != "crc32"}).encode()
    return b'{"crc32": "%08x", ' % crc32(body) + body[1:]

"""Puts a simulated node together: boards in slots, addresses, a first boot."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from gres_mig.errors import BadRequest

from . import boards as catalogue
from .hardware import FORMAT, Store
from .schema import Driver, Gpu, Hardware, Settings


def create(
    folder: Path | str,
    boards: Sequence[tuple[str, int]],
    *,
    mig: bool = True,
    half_swapped: bool | Collection[int] = False,
    minors: Sequence[int] = (),
    uuids: Sequence[str] = (),
    pci: Sequence[str] = (),
    create_s: float = 0.0,
    destroy_s: float = 0.0,
    compute_s: float = 0.0,
    custom: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Make a node of so many of each board; `half_swapped` is all, none or these indexes.

    `custom` describes boards that do not come with the package, in the form of `board_data`.
    """
    store = Store(folder)
    if os.path.exists(store.path):
        raise BadRequest(f"{store.folder} already holds a simulated node", hint="choose another folder, or remove it")
    kinds = [name for name, count in boards for _ in range(count)]
    for name in set(kinds) - set(custom or {}):
        catalogue.data(name)
    if not kinds or len(kinds) > 32:
        raise BadRequest(f"a node has 1 to 32 GPUs, not {len(kinds)}")
    os.makedirs(os.path.join(store.folder, "boards"), exist_ok=True)
    for name, figures in (custom or {}).items():
        Path(store.folder, "boards", f"{name}.json").write_text(json.dumps(figures), encoding="utf-8")
    for path in (os.path.join(store.folder, "nvidiactl"), *store.lock_paths(len(kinds))):
        Path(path).touch()
        os.chmod(path, 0o644)
    swapped = range(len(kinds) if half_swapped else 0) if isinstance(half_swapped, bool) else half_swapped
    gpus: list[Gpu] = []
    for index, name in enumerate(kinds):
        board = catalogue.board(name, store.folder)
        on = int(mig and board.mig)
        gpus.append(
            {
                "board": name,
                "uuid": uuids[index] if uuids else gpu_uuid(store.folder, index),
                "pci": pci[index] if pci else f"00000000:{0x17 + 4 * index:02X}:00.0",
                "minor": minors[index] if minors else index,
                "half_swapped": index in swapped,
                "mig": on,
                "pending": on,
                "survives_reboot": board.mode_survives_reboot,
                "lost": "",
                "holders": [],
                "instances": [],
            }
        )
    store.write(_hardware(gpus, create_s, destroy_s, compute_s))


def gpu_uuid(folder: str, index: int) -> str:
    """Of the slot: the same when the node is made again, another on another node."""
    digits = hashlib.sha1(f"{os.path.abspath(folder)}\0{index}".encode()).hexdigest()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:32]}"


def new_boot_id() -> str:
    """A random UUID, as the kernel makes one at each boot."""
    digits = os.urandom(16).hex()
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"


def _hardware(gpus: list[Gpu], create_s: float, destroy_s: float, compute_s: float) -> Hardware:
    driver: Driver = {
        # As measured on the H200; a virtualization mode of 1 would be a pass-through machine, 2 a vGPU guest.
        "driver": "580.159.04",
        "nvml": "13.580.159.04",
        "cuda": 13000,
        "gpu_profiles": 17,
        "compute_profiles": 8,
        "virtualization": 0,
        "missing": [],
    }
    settings: Settings = {
        "create_s": create_s,
        "destroy_s": destroy_s,
        "compute_s": compute_s,
        "permission": "owner",
        "monitor": True,
        "stale_sessions": False,
        "log": "off",
    }
    return {
        "format": FORMAT,
        "generation": 1,
        "boot_id": new_boot_id(),
        "load": 1,
        "loaded": True,
        "mismatch": False,
        "epoch": 1,
        "driver": driver,
        "settings": settings,
        "gpus": gpus,
        "faults": [],
    }

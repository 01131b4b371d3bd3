"""A node without GPUs that behaves as one with them: stands in for libnvidia-ml.so.1 below the real pynvml."""

from __future__ import annotations

from .hardware import boot_id, module_instance
from .library import install, uninstall

__all__ = ["Node", "board_data", "board_names", "boot_id", "create", "install", "module_instance", "uninstall"]


def __getattr__(name: str) -> object:
    # A hook only installs: what makes a node or plays with it is loaded when asked for.
    if name == "Node":
        from .admin import Node

        return Node
    if name == "create":
        from .assembly import create

        return create
    if name in ("board_names", "board_data"):
        from . import boards

        return boards.names if name == "board_names" else boards.data
    raise AttributeError(name)

"""Jupyter's side of gres-mig: one MIG instance for each kernel that asks for GPU memory."""

from __future__ import annotations

from gres_mig import __version__

__all__ = ["__version__"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    # Loaded only by a server: a provisioner is imported by every process that starts a kernel.
    from gres_mig_jupyter.extension import GresMig

    return [{"module": "gres_mig_jupyter.extension", "app": GresMig}]

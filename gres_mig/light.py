"""Imports the real `pynvml` without what it brings along and never uses.

nvidia-ml-py 13.615.71 imports `ctypes.util.find_library` and never calls it; `ctypes.util` imports subprocess,
shutil and tempfile, which costs a hook as much as pynvml's own code.
"""

from __future__ import annotations

import sys
from types import ModuleType

if "ctypes.util" in sys.modules:
    import pynvml
else:

    def find_library(name: str) -> str | None:
        """The real one, for whoever calls it after all."""
        from ctypes import util

        return util.find_library(name)

    _stand_in = ModuleType("ctypes.util")
    _stand_in.find_library = find_library  # type: ignore[attr-defined]
    sys.modules["ctypes.util"] = _stand_in
    try:
        import pynvml
    finally:
        del sys.modules["ctypes.util"]

__all__ = ["pynvml"]

"""What a check found."""

from __future__ import annotations

from typing import Literal

from gres_mig.values import Value

Level = Literal["ok", "warning", "problem"]
"""problem: gres-mig cannot do its work, or will not for long · warning: somebody should know."""


class Finding(Value):
    """One thing that is right or wrong with a node."""

    check: str
    level: Level
    text: str
    todo: str = ""
    """The line to type or the thing to do next."""

"""GPU memory on demand for Slurm and Jupyter, through NVIDIA MIG."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gres_mig.own import Own

__version__ = "0.1.0"


def current() -> Own:
    """The instance that this process was given, as a notebook prints it: what it is, what of it is in use, its age."""
    # Only here: a hook imports this package at every job.
    from gres_mig.own import own

    return own()

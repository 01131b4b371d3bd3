"""Checks of a node: each is a function that is told where to read, and gives what it found with the next step."""

from gres_mig.doctor.finding import Finding

__all__ = ["Finding"]

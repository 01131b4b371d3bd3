"""What the configuration says of the node service: how much one user gets of it, and where its metrics are."""

from __future__ import annotations

from gres_mig.values import Value


class Serving(Value):
    """How much one user gets of the node through the service; nothing here binds Slurm or root's commands."""

    memory_mib: int = 0
    """What the instances of one user's kernels may hold together; 0: no limit."""
    instances: int = 0
    """How many instances one user's kernels may have; 0: no limit."""
    requests: int = 50
    """How many requests of one user are answered in a second; 0: no limit."""
    connections: int = 8
    """From how many connections of one user is read at once."""
    metrics_port: int = 0
    """Where on 127.0.0.1 the metrics are shown as well as on the socket; 0: nowhere."""

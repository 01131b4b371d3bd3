"""The node's service: a loop whose work is done in processes of its own; it may end at any moment without harm."""

from gres_mig.service.loop import EVERY_S, Service
from gres_mig.service.systemd import notify, unit

__all__ = ["EVERY_S", "Service", "notify", "unit"]

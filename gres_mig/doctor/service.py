"""Checks of the node service: whether it runs, and whether it is what is installed and configured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gres_mig import __version__, presence
from gres_mig.doctor.finding import Finding
from gres_mig.doctor.systemd import Units
from gres_mig.models import Settings

UNIT = "gres-mig.service"


def service(settings: Settings, etc: Path) -> Iterator[Finding]:
    """What runs is of this version and has this file in force."""
    running = presence.running(settings.run_dir)
    if running is None:
        if Units(etc.parent).starts_at_boot(UNIT):
            text = f"{UNIT} starts at boot, but does not run"
            yield Finding("service", "problem", text, f"run: systemctl restart {UNIT}; see: journalctl -u {UNIT}")
        elif os.path.lexists(path := os.path.join(settings.run_dir, presence.SOCKET)):
            text = f"nobody answers at {path}: notebook servers wait for a service, and refuse kernels with GPU memory"
            yield Finding(
                "service", "problem", text, f"run: systemctl restart {UNIT}; or, if there is to be none: rm {path}"
            )
        return
    good = True
    if running.version != __version__:
        good = False
        text = f"the service (pid {running.pid}) is gres-mig {running.version}, installed is {__version__}"
        yield Finding("service", "warning", text, f"run: systemctl restart {UNIT}")
    if running.error:
        good = False
        yield Finding("service", "warning", f"its last reload changed nothing: {running.error}", "run: gres-mig reload")
    elif running.config != settings.config_path:
        good = False
        text = f"the service reads {running.config}, this command {settings.config_path}"
        yield Finding("service", "warning", text, f"name the same file in both; see: systemctl cat {UNIT}")
    elif presence.is_outdated(running):
        good = False
        text = f"{settings.config_path} changed since the service read it"
        yield Finding("service", "warning", text, "run: gres-mig reload")
    if good:
        where = f", at {running.socket}" if running.socket else ", without a socket"
        yield Finding("service", "ok", f"pid {running.pid}, of this version, with this configuration{where}")

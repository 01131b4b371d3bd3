"""The systemd unit that runs `gres-mig boot` before Slurm starts."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence

NAME = "gres-mig-boot.service"
FOLDER = "/etc/systemd/system"

_UNIT = """\
# Written by: gres-mig setup
[Unit]
Description=gres-mig: settle what the last boot left, turn MIG on where mig_at_boot says so
# Only an order: a node whose GPUs do not answer still starts its other services.
# persistenced loads the driver, the fabric manager brings GPUs up that NVSwitches join, and another MIG manager may
# have GPUs of its own; DCGM would keep a GPU from changing its mode.
After=local-fs.target systemd-modules-load.service nvidia-persistenced.service nvidia-fabricmanager.service \\
    nvidia-mig-manager.service
Before=nvidia-dcgm.service dcgm-exporter.service nvidia-dcgm-exporter.service slurmd.service
StartLimitIntervalSec=600
StartLimitBurst=3

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart={command}
TimeoutStartSec=60

[Install]
WantedBy=multi-user.target
"""


def render(options: Sequence[str] = ()) -> str:
    """The unit's text; `options` come before `boot` on its command line, to name a node or a configuration."""
    return _UNIT.format(command=command_line(*options, "boot"))


def command_line(*words: str) -> str:
    """This very gres-mig with those words, as a unit's ExecStart has it."""
    return " ".join(_word(word) for word in (*_program(), *words))


def _program() -> tuple[str, ...]:
    """How this very installation is started, whatever PATH a service has."""
    script = os.path.join(os.path.dirname(os.path.abspath(sys.executable)), "gres-mig")
    if os.access(script, os.X_OK):
        return (script,)
    found = shutil.which("gres-mig")
    return (os.path.abspath(found),) if found else (sys.executable, "-m", "gres_mig")


def _word(text: str) -> str:
    """The word as systemd reads it: specifiers and variables are expanded in quotes too."""
    escaped = text.replace("%", "%%").replace("$", "$$")
    if re.fullmatch(r"[\w@%+=:,./$-]+", escaped):
        return escaped
    return '"' + escaped.replace("\\", "\\\\").replace('"', '\\"') + '"'

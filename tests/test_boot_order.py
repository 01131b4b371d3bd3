"""The boot unit among the others: after the driver, before Slurm, never for ever; as systemd itself reads it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gres_mig.commands import boot_unit
from gres_mig.doctor.systemd import Units

BEFORE = ("nvidia-persistenced.service", "nvidia-fabricmanager.service", "nvidia-mig-manager.service")
AFTER = ("slurmd.service", "nvidia-dcgm.service", "dcgm-exporter.service", "nvidia-dcgm-exporter.service")
_OTHER = """\
[Unit]
Description={name}
{order}

[Service]
ExecStart=/bin/true

[Install]
WantedBy=multi-user.target
"""

needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine on which the boot unit and all its neighbours start at boot."""
    folder = tmp_path / "etc/systemd/system"
    folder.mkdir(parents=True)
    (folder / boot_unit.NAME).write_text(boot_unit.render())
    for name in (*BEFORE, *AFTER):
        (folder / name).write_text(_OTHER.format(name=name, order="After=basic.target"))
    return tmp_path


def verified(root: Path) -> tuple[int, str]:
    """What systemd says of all these units together."""
    folder = root / "etc/systemd/system"
    # Ours first, then those of systemd itself, which every machine has.
    variables = {**os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:"}
    command = ["systemd-analyze", "verify", "--man=no", *sorted(folder.glob("*.service"))]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@needs_systemd
def test_systemd_has_nothing_to_say_about_the_units_together(root: Path) -> None:
    assert verified(root) == (0, "")


@needs_systemd
def test_systemd_would_say_that_an_order_is_a_circle(root: Path) -> None:
    """The test above would pass on what nobody reads."""
    slurmd = root / "etc/systemd/system/slurmd.service"
    slurmd.write_text(
        _OTHER.format(name="slurmd.service", order=f"Before={BEFORE[0]}\nWants={boot_unit.NAME} {BEFORE[0]}")
    )

    code, said = verified(root)

    assert "cycle" in said, code


@pytest.mark.parametrize("first", BEFORE)
def test_it_starts_after_what_brings_the_gpus_up(root: Path, first: str) -> None:
    assert Units(root).comes_after(boot_unit.NAME, first)


@pytest.mark.parametrize("then", AFTER)
def test_it_starts_before_what_uses_the_gpus(root: Path, then: str) -> None:
    assert Units(root).comes_after(then, boot_unit.NAME)


def test_nothing_waits_for_it_longer_than_a_minute_and_nothing_needs_it(root: Path) -> None:
    unit = Units(root)

    assert unit.value(boot_unit.NAME, "TimeoutStartSec") == "60"
    for key in ("Requires", "Requisite", "BindsTo", "PartOf", "RequiredBy", "Wants"):
        assert unit.value(boot_unit.NAME, key) == ""

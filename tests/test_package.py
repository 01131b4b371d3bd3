"""What is installed."""

from __future__ import annotations

import configparser
import importlib
import json
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from hatchling.builders.wheel import WheelBuilder
from jupyter_client.provisioning import LocalProvisioner

import gres_mig

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    """The wheel, as pip would build it."""
    return ZipFile(next(iter(WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel"))))))


def test_it_claims_no_other_top_level_name(wheel: ZipFile) -> None:
    top = {name.partition("/")[0] for name in wheel.namelist()}
    itself = f"gres_mig-{gres_mig.__version__}"

    assert top == {"gres_mig", "gres_mig_slurm", "gres_mig_jupyter", f"{itself}.dist-info", f"{itself}.data"}


def test_of_other_files_it_has_the_one_that_switches_its_server_extension_on(wheel: ZipFile) -> None:
    data = f"gres_mig-{gres_mig.__version__}.data/data/"
    (name,) = (name for name in wheel.namelist() if name.startswith(data))

    assert name.removeprefix(data) == "etc/jupyter/jupyter_server_config.d/gres_mig_jupyter.json"
    assert json.loads(wheel.read(name)) == {"ServerApp": {"jpserver_extensions": {"gres_mig_jupyter": True}}}


def test_jupyter_finds_its_provisioner(wheel: ZipFile) -> None:
    points = configparser.ConfigParser()
    points.read_string(wheel.read(f"gres_mig-{gres_mig.__version__}.dist-info/entry_points.txt").decode())
    module, _, name = points["jupyter_client.kernel_provisioners"]["gres-mig"].partition(":")

    assert issubclass(getattr(importlib.import_module(module), name), LocalProvisioner)


def test_it_has_every_file_of_its_packages(wheel: ZipFile) -> None:
    sources = {
        str(path.relative_to(folder))
        for folder in (ROOT, ROOT / "slurm", ROOT / "jupyter_ext")
        for package in folder.glob("gres_mig*")
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }

    assert sources <= set(wheel.namelist())
    assert "gres_mig/py.typed" in sources


def test_its_command_exists(wheel: ZipFile) -> None:
    scripts = configparser.ConfigParser()
    scripts.read_string(wheel.read(f"gres_mig-{gres_mig.__version__}.dist-info/entry_points.txt").decode())
    module, _, function = scripts["console_scripts"]["gres-mig"].partition(":")

    assert callable(getattr(importlib.import_module(module), function))


def test_it_needs_nvidias_own_binding_and_not_the_deprecated_one(wheel: ZipFile) -> None:
    metadata = Parser().parsestr(wheel.read(f"gres_mig-{gres_mig.__version__}.dist-info/METADATA").decode())
    needs = {line.partition(";")[0].partition(">")[0].strip() for line in metadata.get_all("Requires-Dist", [])}

    assert "nvidia-ml-py" in needs
    assert "pynvml" not in needs
    assert metadata.get_all("License-File") == ["LICENSE"]

"""The shape of the source: what imports what, how long a module is, what no file may say."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PACKAGES = (ROOT / "gres_mig", ROOT / "slurm" / "gres_mig_slurm", ROOT / "jupyter_ext" / "gres_mig_jupyter")
MODULES = sorted(module for package in PACKAGES for module in package.rglob("*.py"))
NOT_SOURCE = {".git", ".hypothesis", ".venv", "__pycache__", "build", "dist", "node_modules"}


def names(modules: list[Path]) -> list[str]:
    return [str(module.relative_to(ROOT)) for module in modules]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """What import-linter says of the packages in a folder, under the contracts of its pyproject.toml."""
    paths = os.pathsep.join(str(folder / name) for name in ("", "slurm", "jupyter_ext"))
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    command = [sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what is linted, to be broken."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        shutil.copytree(package, tmp_path / package.relative_to(ROOT), ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_imports_go_down_only() -> None:
    report = lint(ROOT)

    assert report.returncode == 0, report.stdout
    assert re.search(r"Contracts: 4 kept, 0 broken", report.stdout)


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("gres_mig/errors.py", "from gres_mig import models", "Imports go down only"),
        ("gres_mig/allocator.py", "import gres_mig_slurm", "Imports go down only"),
        ("gres_mig/state.py", "from gres_mig.placement import choose", "Imports go down only"),
        ("gres_mig/models.py", "import pynvml", "Only nvml and the simulator know NVML"),
        ("gres_mig/cli.py", "import pynvml", "Only nvml and the simulator know NVML"),
        ("gres_mig/placement.py", "import pydantic", "A hook loads no pydantic"),
        ("gres_mig/config.py", "import tornado", "The core knows no Jupyter"),
        ("gres_mig/cli.py", "import jupyter_client", "The core knows no Jupyter"),
    ],
)
def test_an_import_that_goes_up_or_out_is_noticed(copy: Path, module: str, line: str, contract: str) -> None:
    with (copy / module).open("a") as stream:
        stream.write(f"\n{line}\n")

    report = lint(copy)

    assert report.returncode == 1
    assert re.search(rf"{contract} +BROKEN", report.stdout)


def test_every_module_has_its_layer() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = " ".join(settings["contracts"][0]["layers"])
    placed = set(re.findall(r"gres_mig\.(\w+)", layers))
    there = {
        path.stem for path in (ROOT / "gres_mig").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }

    assert there - placed == {"__init__"}, "a new module goes into the layers in pyproject.toml"


def test_no_hook_loads_what_it_does_not_need() -> None:
    """Measured on the interpreter itself: pydantic alone takes longer to import than a hook may take."""
    hot = [
        f"gres_mig.{name}"
        for name in ("__main__", "allocator", "answers", "config", "deadline", "owners", "quick", "sizes")
    ]
    code = f"import sys, {', '.join(hot)}; print(*sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    loaded = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout

    assert not {"pydantic", "tomllib", "tomli", "click", "dataclasses", "tornado"} & set(loaded.split())


@pytest.mark.parametrize("module", MODULES, ids=names(MODULES))
def test_a_module_is_one_idea_read_in_one_sitting(module: Path) -> None:
    text = module.read_text()

    assert text.count("\n") <= 400
    assert ast.get_docstring(ast.parse(text)), "its first line says what it alone does"
    assert module.stem not in {"utils", "util", "helpers", "helper", "common", "base", "manager", "misc"}


def texts() -> Iterator[tuple[Path, str]]:
    """Every text file of the project."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in NOT_SOURCE and not name.endswith(".egg-info")]
        folders[:] = [name for name in folders if not name.startswith(".") or name == ".ci"]
        for name in files:
            content = (Path(folder) / name).read_bytes()
            if b"\0" not in content:
                yield Path(folder) / name, content.decode(errors="replace")


def test_no_file_names_a_folder_of_one_machine_or_the_host_of_a_registry() -> None:
    # Put together here, so that this file passes too.
    folders = ["/" + "work/main", "/" + "work/shared", ".." + "/shared", "/" + "tmp/v/"]
    hosts = ["pypi" + ".org", "pythonhosted" + ".org", "debian" + ".org", "npmjs" + ".org", "proxy.golang" + ".org"]

    found = [f"{path}: {word}" for path, text in texts() for word in (*folders, *hosts) if word in text]

    assert found == []
    assert any(path.name == "README.md" for path, _ in texts())

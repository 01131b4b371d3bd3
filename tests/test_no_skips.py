"""What tests/no_skips.py does to skipped tests, seen from outside of a pytest that has it loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[[str, str], tuple[int, str]]

ROOT = Path(__file__).parent.parent

WAYS_TO_SKIP = {
    "mark": "import pytest\n@pytest.mark.skip(reason='for want of Slurm')\ndef test_it(): pass\n",
    "call": "import pytest\ndef test_it(): pytest.skip('for want of Slurm')\n",
    "fixture": "import pytest\n@pytest.fixture\ndef it(): pytest.skip('for want of Slurm')\ndef test_it(it): pass\n",
    "module": "import pytest\npytest.skip('for want of Slurm', allow_module_level=True)\n",
    "import": "import pytest\npytest.importorskip('no_such_module', reason='for want of Slurm')\n",
}


@pytest.fixture
def outcome(tmp_path: Path) -> Run:
    """Runs pytest on a test file of that text; gives its exit code and output."""

    def run(text: str, ci: str) -> tuple[int, str]:
        file = tmp_path / "test_sample.py"
        file.write_text(text + "\ndef test_other(): pass\n")
        # A configuration of its own, so that pytest does not find this project's.
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", "-p", "tests.no_skips", "-p", "no:cacheprovider", "-rs", str(file)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "GRES_MIG_CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        return ended.returncode, ended.stdout

    return run


@pytest.mark.parametrize("way", WAYS_TO_SKIP)
def test_in_ci_a_skip_fails_and_says_why(outcome: Run, way: str) -> None:
    code, output = outcome(WAYS_TO_SKIP[way], "1")

    assert code != 0
    assert "for want of Slurm: nothing may be skipped" in output
    assert " skipped" not in output.splitlines()[-1]


def test_elsewhere_a_skip_is_named_and_passes(outcome: Run) -> None:
    code, output = outcome(WAYS_TO_SKIP["call"], "")

    assert code == 0
    assert "SKIPPED" in output
    assert "1 skipped" in output.splitlines()[-1]


def test_in_ci_an_expected_failure_stays_one(outcome: Run) -> None:
    code, output = outcome("import pytest\n@pytest.mark.xfail\ndef test_it(): assert False\n", "1")

    assert code == 0
    assert "1 xfailed" in output.splitlines()[-1]

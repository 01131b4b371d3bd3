"""A pytest plugin (`-p tests.no_skips`): where GRES_MIG_CI is set, a test or module that is skipped fails.

On a developer's machine a test may be skipped for want of a package; in CI that would let it rot unseen.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Outermost, so that pytest has already told an expected failure (`wasxfail`) from a skip."""
    report = yield
    if not hasattr(report, "wasxfail"):
        _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A whole module, skipped while it was imported."""
    report = yield
    _fail_if_skipped(report)
    return report


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.outcome != "skipped" or os.environ.get("GRES_MIG_CI", "") in {"", "0"}:
        return
    where, line, reason = report.longrepr if isinstance(report.longrepr, tuple) else ("", 0, str(report.longrepr))
    report.outcome = "failed"
    report.longrepr = f"{where}:{line}: {reason}: nothing may be skipped where GRES_MIG_CI is set"

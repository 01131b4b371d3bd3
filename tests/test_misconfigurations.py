"""Every planted misconfiguration is found, by one finding that says what to type; a good node has none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from misconfigurations import MISCONFIGURATIONS, Place, Planted

from gres_mig import simulator
from gres_mig.doctor import Finding
from tests.commands import run

PAGE = Path(__file__).parent.parent / "docs" / "coexistence.md"

TO_TYPE = re.compile(r"\brun(?: as root)?: \S|^/\S+:\d+: \S|^/\S+: \w+=")
"""A command, or a line of a file with its place."""


@pytest.fixture
def place(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    place = Place(memory / "node")
    monkeypatch.setenv("SLURM_CONF", place.slurm_conf)
    yield place
    simulator.uninstall()


def found(place: Place) -> list[Finding]:
    """What is not right with it, as the command says it."""
    plain = run(place.node, "doctor", "--json").plain["findings"]
    told = [Finding(each["check"], each["level"], each["text"], each["todo"] or "") for each in plain]
    # A node for notebooks beside gres/gpu counts no migmem: that it could is no fault of it.
    return [each for each in told if each.level != "ok" and each.check != "Slurm"]


def test_a_good_node_has_no_finding(place: Place) -> None:
    assert found(place) == []


def test_a_good_node_at_work_has_no_finding(place: Place) -> None:
    place.allocate("manual:alice", "slurm:c:1", "jupyter:1000:0b5a0e36-7c4e-4f0a-8d2c-9d1f3a5b7c9e")

    assert found(place) == []


@pytest.mark.parametrize("planted", MISCONFIGURATIONS, ids=lambda planted: planted.what)
def test_what_is_planted_is_found_once_and_says_what_to_type(place: Place, planted: Planted) -> None:
    planted.plant(place)

    findings = found(place)

    assert [(each.check, planted.text in each.text) for each in findings] == [(planted.check, True)]
    assert TO_TYPE.search(findings[0].todo), findings[0].todo


def test_the_page_lists_them_all() -> None:
    _, _, section = PAGE.read_text(encoding="utf-8").partition("\n## What doctor finds\n")
    rows = re.findall(r"^\| ([^|]+?) \| `([^`|]+)` \|", section, re.MULTILINE)

    assert [(planted.what, planted.check) for planted in MISCONFIGURATIONS] == rows

"""`gres-mig profiles`: what each model of GPU offers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gres_mig import config_text, simulator
from gres_mig.commands.profiles import most_at_once
from gres_mig.models import Placement, Profile, Settings
from gres_mig.values import replace
from tests.commands import nobody, run

ROOT = Path(__file__).parent.parent
A100 = "NVIDIA A100-SXM4-40GB"


@pytest.fixture
def settings(node: simulator.Node) -> Settings:
    """The node's settings, in its config.toml as well: all GPUs managed."""
    return config_text.write_node_config(node.store.folder)


def row(text: str, name: str) -> list[str]:
    """The words in the line of that profile."""
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


def models(node: simulator.Node) -> list[dict[str, Any]]:
    """What `--json` says of each model."""
    found: list[dict[str, Any]] = run(node, "profiles", "--json").plain["models"]
    return found


def test_each_profile_has_a_line_with_its_figures(node: simulator.Node, settings: Settings) -> None:
    ran = run(node, "profiles")

    assert ran.code == 0
    assert ran.out.splitlines()[0] == "NVIDIA RTX PRO 6000 Blackwell Server Edition, 97,887 MiB, 12 memory slices"
    assert row(ran.out, "1g.24gb") == ["1g.24gb", "14", "24,192", "3", "1", "46", "4", "by", "size", "0,3,6,9:3"]
    assert row(ran.out, "1g.24gb+me") == ["1g.24gb+me", "21", "24,192", "3", "1", "46", "1", "by", "name", "0,3,6,9:3"]


@pytest.mark.parametrize("boards", [[("h200", 1)]])
def test_with_mig_off_anybody_may_see_them(node: simulator.Node, settings: Settings) -> None:
    node.set_mig(0, False)
    (settings_folder := Path(settings.state_dir)).chmod(0o700)
    with nobody(node, settings):
        ran = run(node, "profiles")

    assert settings_folder.is_dir()
    assert ran.code == 0
    assert row(ran.out, "1g.18gb") == ["1g.18gb", "19", "16,384", "1", "1", "16", "7", "by", "size", "0,1,2,3,4,5,6:1"]
    assert row(ran.out, "7g.141gb")[:4] == ["7g.141gb", "0", "143,360", "8"]


@pytest.mark.parametrize("boards", [[("h200", 1)]])
def test_no_line_is_wider_than_a_terminal(node: simulator.Node, settings: Settings) -> None:
    assert max(map(len, run(node, "profiles").out.splitlines())) <= 80


@pytest.mark.parametrize("boards", [[("a100-40", 1), ("rtx-pro-6000", 1), ("a100-40", 1), ("l40", 1)]])
def test_gpus_of_one_model_share_a_table_and_each_says_whether_it_is_managed(node: simulator.Node) -> None:
    config_text.write_node_config(node.store.folder, (node.uuids[2],))

    a100, rtx, l40 = models(node)

    assert [(gpu["index"], gpu["managed"]) for gpu in a100["gpus"]] == [(0, False), (2, True)]
    assert [gpu["index"] for gpu in rtx["gpus"]] == [1]
    assert (l40["profiles"], l40["gpus"][0]["trouble"]) == ([], "this board has no MIG")


@pytest.mark.parametrize("boards", [[("a100-40", 1)]])
def test_what_the_configuration_does_not_allow_is_said_to_be_so(node: simulator.Node, settings: Settings) -> None:
    config_text.write(replace(settings, allowed={A100: ("1g.5gb", "1g.5gb+me")}))

    (model,) = models(node)

    asked = {profile["name"]: profile["asked"] for profile in model["profiles"]}
    assert (asked["1g.5gb"], asked["2g.10gb"]) == ("by size", "not allowed")


@pytest.mark.parametrize("boards", [[("a30", 1)]])
def test_as_many_fit_as_can_be_made(node: simulator.Node, settings: Settings) -> None:
    (model,) = models(node)

    for profile in model["profiles"]:
        made = []
        for place in profile["placements"]:
            if len(made) < profile["most_at_once"] and not any(place["start"] < m.start + m.size for m in made):
                made.append(node.make(0, profile["name"], place["start"]))
        assert len(made) == profile["most_at_once"]
        for instance in made:
            node.destroy(0, instance.id)


@pytest.mark.parametrize(("instance_count", "fit"), [(8, 4), (4, 4), (1, 1)])
def test_no_more_fit_than_there_are_places_nor_than_the_driver_says(instance_count: int, fit: int) -> None:
    places = tuple(Placement(start, 2) for start in (0, 2, 4, 6, 1))

    assert most_at_once(Profile(1, "1g", 100, 1, 10, instance_count, places)) == fit


def test_a_node_without_driver_has_none(node: simulator.Node, settings: Settings) -> None:
    node.unload_driver()

    ran = run(node, "profiles")

    assert ran.code == 0
    assert ran.out.splitlines()[0] == "0 GPUs"


def test_every_field_of_the_json_is_documented(node: simulator.Node, settings: Settings) -> None:
    documented = (ROOT / "docs/json.md").read_text(encoding="utf-8")

    (model,) = models(node)

    fields = {*model["profiles"][0], *model["gpus"][0], *(f"models[].{name}" for name in model)}
    assert not {name for name in fields if f"`{name}`" not in documented}

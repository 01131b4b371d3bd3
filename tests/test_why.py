"""`gres-mig why`: where a request would go, who is in the way, and whose end would make room."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from gres_mig import config_text, explain, simulator
from gres_mig.allocator import Allocator
from gres_mig.errors import GresMigError, NoCapacity
from gres_mig.look import look
from gres_mig.models import Owner, Request, Settings
from gres_mig.values import replace
from tests.commands import nobody, run

ALICE, BOB, CAROL = Owner("manual:alice"), Owner("slurm:alpha:4711"), Owner("manual:carol")
ROOT = Path(__file__).parent.parent


@pytest.fixture
def settings(node: simulator.Node) -> Settings:
    """The node's settings, in its config.toml as well: all GPUs managed, a busy instance is stuck at once."""
    settings = replace(config_text.write_node_config(node.store.folder), in_use_wait_s=0.0)
    config_text.write(settings)
    return settings


def fill(allocator: Allocator, size_mib: int) -> list[str]:
    """Owners that hold all places for that size."""
    owners: list[str] = []
    while True:
        name = f"manual:user-{len(owners)}"
        try:
            allocator.allocate(Owner(name), Request(size_mib))
        except NoCapacity:
            return owners
        owners.append(name)


def offers(node: simulator.Node, *words: str) -> list[dict[str, Any]]:
    """What each GPU says."""
    found: list[dict[str, Any]] = run(node, "why", *words, "--json").plain["gpus"]
    return found


def test_the_first_line_says_where_it_would_go_and_there_it_goes(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    allocator.allocate(BOB, Request(8000))

    ran = run(node, "why", "8000")
    allocation = allocator.allocate(ALICE, Request(8000)).allocation

    assert ran.code == 0
    where = f"{allocation.placement} of {allocation.gpu_uuid}"
    assert ran.out.splitlines()[0] == f"8,000 MiB fits: 1g.24gb (24,192 MiB) at {where}"


@pytest.mark.parametrize("text", ["8G", "8192", "8GiB"])
def test_a_size_may_have_a_unit(node: simulator.Node, settings: Settings, text: str) -> None:
    assert run(node, "why", text).out.startswith("8,192 MiB fits: ")


def test_each_gpu_names_its_profile_and_its_free_places(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    allocator.allocate(BOB, Request(8000))

    ran = run(node, "why", "8000")

    assert "would take 1g.24gb, 24,192 MiB: 3 of 4 places free: 3:3 6:3 9:3\n" in ran.out
    assert "would take 1g.24gb, 24,192 MiB: 4 of 4 places free: 0:3 3:3 6:3 9:3\n" in ran.out


def test_where_there_is_no_room_it_says_what_an_ask_would_hear_and_exits_3(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    fill(allocator, 8000)

    ran = run(node, "why", "8000")

    assert ran.code == 3
    with pytest.raises(NoCapacity) as refused:
        allocator.allocate(ALICE, Request(8000))
    assert ran.out.splitlines()[0] == refused.value.message
    assert ran.err == ""


def test_who_is_in_the_way_has_a_line_with_owner_and_age(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    owners = fill(allocator, 8000)

    ran = run(node, "why", "8000")

    for owner in owners:
        assert re.search(rf"^    \d:3  1g\.24gb   24,192 MiB  +\d+s  {owner}$", ran.out, re.MULTILINE)


def test_the_end_that_would_make_room_is_the_one_that_costs_least(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    only = ("--gpu", node.uuids[0])
    allocator.allocate(BOB, Request(8000, gpus=(node.uuids[0],)))
    allocator.allocate(CAROL, Request(30000, gpus=(node.uuids[0],)))

    ran = run(node, "why", "30000", *only)

    assert ran.code == 3
    assert ran.out.splitlines()[-1] == "  room when this ends: slurm:alpha:4711 (1g.24gb at 0:3)"


def test_several_that_have_to_end_are_all_named(node: simulator.Node, allocator: Allocator, settings: Settings) -> None:
    allocator.allocate(BOB, Request(8000, gpus=(node.uuids[0],)))
    allocator.allocate(CAROL, Request(30000, gpus=(node.uuids[0],)))

    ran = run(node, "why", "90000", "--gpu", node.uuids[0], columns=120)

    expected = "  room when these end: slurm:alpha:4711 (1g.24gb at 0:3) and manual:carol (2g.48gb at 6:6)"
    assert ran.out.splitlines()[-1] == expected


@pytest.mark.parametrize("boards", [[("a100-40", 1), ("rtx-pro-6000", 1), ("a30", 1)]])
@pytest.mark.parametrize("seed", range(6))
def test_when_those_named_end_there_is_room_and_with_fewer_there_is_not(
    node: simulator.Node, allocator: Allocator, settings: Settings, seed: int
) -> None:
    chance = random.Random(seed)
    for number in range(14):
        try:
            allocator.allocate(Owner(f"manual:user-{number}"), Request(chance.choice([4000, 9000, 20000, 45000])))
        except GresMigError:
            continue
    request = Request(chance.choice([4000, 9000, 19000]))

    answer = explain.why(look(settings), request, settings)

    blocked = [offer for offer in answer.offers if offer.profiles and not offer.fits]
    assert blocked or answer.choice
    for offer in blocked:
        assert offer.makes_room
        here = Request(request.memory_mib, gpus=(offer.gpu.uuid,))
        for ending in offer.makes_room[1:]:
            allocator.reclaim(ending.owner)
        if len(offer.makes_room) > 1:
            assert explain.why(look(settings), here, settings).choice is None
        allocator.reclaim(offer.makes_room[0].owner)
        assert explain.why(look(settings), here, settings).choice is not None


@pytest.mark.parametrize("boards", [[("a100-40", 1)]])
def test_profiles_that_serve_a_request_alike_are_all_named_and_so_is_who_is_in_the_way_of_any(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    owners = fill(allocator, 4000)[:5]
    for extra in ("manual:user-5", "manual:user-6"):
        allocator.reclaim(Owner(extra))

    ran = run(node, "why", "19000", columns=120)

    assert "would take 4g.20gb or 3g.20gb, 19,968 MiB: 0 of 2 places free\n" in ran.out
    assert [owner for owner in owners if f"  {owner}\n" in ran.out] == owners
    assert ran.out.splitlines()[-1] == "  room when this ends: manual:user-4 (1g.5gb at 4:1)"


def test_a_foreign_instance_in_the_way_is_named_and_nobodys_end_is_promised(
    node: simulator.Node, settings: Settings
) -> None:
    made = node.make(0, "1g.24gb", 0)

    ran = run(node, "why", "90000", "--gpu", node.uuids[0])

    assert ran.code == 3
    assert f"foreign: GPU instance {made.id}" in ran.out
    assert f"  run: gres-mig reclaim --foreign {node.uuids[0]}:{made.id} --yes" in ran.out.splitlines()
    assert "room when" not in ran.out


def test_a_stuck_instance_in_the_way_says_so(node: simulator.Node, allocator: Allocator, settings: Settings) -> None:
    allocation = allocator.allocate(ALICE, Request(8000)).allocation
    node.hold(0, allocation.gi_id, 0)
    run(node, "reclaim", "manual:alice")

    ran = run(node, "why", "90000", "--gpu", node.uuids[0])

    assert "stuck: manual:alice" in ran.out


def test_of_two_ends_the_one_that_waits_for_no_hardware_is_named(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    here = (node.uuids[0],)
    allocation = allocator.allocate(ALICE, Request(8000, gpus=here)).allocation
    allocator.allocate(BOB, Request(30000, gpus=here))
    node.hold(0, allocation.gi_id, 0)
    run(node, "reclaim", "manual:alice")

    (offer,) = offers(node, "30000", "--gpu", node.uuids[0])

    assert [record["owner"] for record in offer["makes_room"]] == ["slurm:alpha:4711"]


def test_a_gpu_that_takes_no_new_work_says_why(node: simulator.Node, allocator: Allocator, settings: Settings) -> None:
    allocator.fence(node.uuids[0], "a driver call did not return")

    ran = run(node, "why", "8000")

    assert ran.code == 0
    assert "takes no new work: fenced: a driver call did not return" in ran.out


def test_where_no_gpu_takes_new_work_it_is_the_nodes_fault(node: simulator.Node, settings: Settings) -> None:
    node.set_mig(0, False)
    node.set_mig(1, False)

    ran = run(node, "why", "8000")

    assert ran.code == 4
    assert "MIG mode is off" in ran.err


def test_a_gpu_whose_profiles_are_all_too_small_is_told_from_one_that_is_full(
    memory: Path, node: simulator.Node
) -> None:
    folder = memory / "mixed"
    simulator.create(folder, [("a30", 1), ("h200", 1)])
    config_text.write_node_config(folder)

    small, large = offers(simulator.Node(folder), "60000")

    assert (small["profiles"], small["fits"]) == ([], False)
    assert ([profile["name"] for profile in large["profiles"]], large["fits"]) == (["4g.71gb"], True)


def test_more_than_any_board_holds_is_the_requests_fault(node: simulator.Node, settings: Settings) -> None:
    ran = run(node, "why", "200000")

    assert ran.code == 2
    assert "no instance on this node holds 200,000 MiB: the largest is 4g.96gb (97,280 MiB)" in ran.err


@pytest.mark.parametrize(("text", "said"), [("8.5", "not a whole number"), ("-1", "sign"), ("", "empty"), ("1.5g", "")])
def test_what_is_no_size_is_refused_as_a_size(node: simulator.Node, settings: Settings, text: str, said: str) -> None:
    ran = run(node, "why", "--", text)

    assert ran.code == 2
    assert f"memory size '{text}'" in ran.err
    assert said in ran.err


def test_a_profile_is_asked_for_by_name(node: simulator.Node, settings: Settings) -> None:
    ran = run(node, "why", "1G.24GB+me")

    assert ran.code == 0
    assert "would take 1g.24gb+me, 24,192 MiB: 4 of 4 places free" in ran.out


def test_a_profile_of_which_a_gpu_can_have_one_says_that_its_number_is_up(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    for owner, gpu in ((ALICE, 0), (BOB, 1)):
        allocator.allocate(owner, Request(0, "1g.24gb+me", (node.uuids[gpu],)))

    ran = run(node, "why", "1g.24gb+me")
    first, _ = offers(node, "1g.24gb+me")

    assert ran.code == 3
    assert "3 of 4 places free: 3:3 6:3 9:3, but the driver has none left" in ran.out.replace("\n  ", " ")
    assert [record["owner"] for record in first["makes_room"]] == ["manual:alice"]


def test_a_profile_that_no_gpu_has_is_answered_with_those_there_are(node: simulator.Node, settings: Settings) -> None:
    ran = run(node, "why", "1g.99gb")

    assert ran.code == 2
    assert "there are: 1g.24gb" in ran.err


def test_a_reserve_that_leaves_no_memory_is_said(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    config_text.write(replace(settings, reserve_mib=30000))
    allocator.allocate(ALICE, Request(30000, gpus=(node.uuids[0],)))

    (offer,) = offers(node, "30000", "--gpu", node.uuids[0])

    assert offer["but"] == "the reserve of 30,000 MiB leaves no memory"
    assert [record["owner"] for record in offer["makes_room"]] == ["manual:alice"]


def test_an_owner_is_told_with_what_it_holds(node: simulator.Node, allocator: Allocator, settings: Settings) -> None:
    allocation = allocator.allocate(ALICE, Request(8000)).allocation

    ran = run(node, "why", "manual:alice")

    assert ran.code == 0
    assert ran.out.startswith(f"manual:alice has 1g.24gb (24,192 MiB) for 8,000 MiB: {allocation.mig_uuid} at 0:3 of ")


def test_an_owner_whose_instance_is_stuck_is_told_with_what_holds_it(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    allocation = allocator.allocate(ALICE, Request(8000)).allocation
    node.hold(0, allocation.gi_id, 0)
    run(node, "reclaim", "manual:alice")

    ran = run(node, "why", "manual:alice")

    assert ran.out.startswith("manual:alice, stuck: 1g.24gb (24,192 MiB) for 8,000 MiB at 0:3 of ")
    assert re.search(r"; pid \d+ ", ran.out)


def test_an_owner_that_holds_nothing_is_said_to_with_the_end_of_its_work(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    allocator.allocate(ALICE, Request(8000))
    allocator.reclaim(ALICE)

    ended, never = run(node, "why", "manual:alice"), run(node, "why", "manual:bob")

    assert (ended.code, never.code) == (0, 0)
    assert re.fullmatch(r"manual:alice holds nothing on this node; its work ended \ds ago\n", ended.out)
    assert never.out == "manual:bob holds nothing on this node\n"


def test_a_word_with_a_colon_that_is_no_owner_is_refused_as_an_owner(node: simulator.Node, settings: Settings) -> None:
    ran = run(node, "why", "slurm:4711")

    assert ran.code == 2
    assert "slurm takes 2 parts" in ran.err


def test_a_gpu_that_is_not_managed_is_refused(node: simulator.Node, settings: Settings) -> None:
    ran = run(node, "why", "8000", "--gpu", "GPU-00000000-0000-0000-0000-000000000000")

    assert ran.code == 2
    assert "is no managed GPU of this node" in ran.err


def test_others_learn_whether_it_fits_but_no_owner(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    fill(allocator, 8000)
    run(node, "status")
    with nobody(node, settings):
        size, owner = run(node, "why", "8000"), run(node, "why", "manual:user-0")

    assert size.code == 3
    assert "room when this ends: 1g.24gb at 0:3" in size.out
    assert "user-" not in size.out
    assert (owner.code, "shown to root only" in owner.err) == (2, True)


def test_every_field_of_the_json_is_documented(node: simulator.Node, allocator: Allocator, settings: Settings) -> None:
    fill(allocator, 30000)
    documented = (ROOT / "docs/json.md").read_text(encoding="utf-8")

    answers = [run(node, "why", what, "--json").plain for what in ("8000", "90000", "manual:user-0")]

    assert not {name for answer in answers for name in names(answer) if f"`{name}`" not in documented}


def names(value: object) -> set[str]:
    """All keys of all objects in it."""
    if isinstance(value, dict):
        return set(value).union(*map(names, value.values()))
    return set().union(*map(names, value)) if isinstance(value, list) else set()

"""Which profile, which GPU, which start, and what is said when there is none; on the figures of real boards."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from gpus import FOUR_PROFILES, SETTINGS, busy, fill, gpu, rooms
from hypothesis import given
from hypothesis import strategies as st

from gres_mig.errors import BadRequest, Fault, NoCapacity, NodeFault, TooBig
from gres_mig.models import Placement, Profile, Request, Settings
from gres_mig.placement import Room, allowed, choose, places, tiers
from gres_mig.simulator import boards
from gres_mig.values import replace


def named(board: str, name: str) -> Profile:
    """A profile of a board."""
    return next(p for p in gpu(board).profiles if p.name == name)


def refusal(node: Sequence[Room], request: Request, settings: Settings = SETTINGS) -> NoCapacity:
    """The error of a request that finds no room."""
    with pytest.raises(NoCapacity) as caught:
        choose(node, request, settings)
    return caught.value


# Which profile


@pytest.mark.parametrize("board", [name for name in boards.names() if name != "l40"])
def test_a_request_gets_the_smallest_profile_that_holds_it(board: str) -> None:
    room = Room(gpu(board))
    memories = sorted({p.memory_mib for p in room.gpu.profiles if not p.variant})

    for smaller, memory_mib in zip([0, *memories], memories, strict=False):
        for size in {smaller + 1, memory_mib - 1, memory_mib}:
            assert choose([room], Request(size), SETTINGS).profile.memory_mib == memory_mib
    with pytest.raises(TooBig):
        choose([room], Request(memories[-1] + 1), SETTINGS)


def test_names_promise_nothing() -> None:
    # NVIDIA/mig-parted#97: 20gb really holds 19,968 MiB.
    room = Room(gpu("a100-80"))

    assert choose([room], Request(19_968), SETTINGS).profile.name == "2g.20gb"
    assert choose([room], Request(20_000), SETTINGS).profile.name == "4g.40gb"
    assert choose([Room(gpu("h200"))], Request(16_385), SETTINGS).profile.name == "2g.35gb"


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=6, unique=True), st.data())
def test_only_what_the_driver_says_now_decides(memories: list[int], data: st.DataObject) -> None:
    """Boards of one name list different sizes from driver to driver (NVIDIA/gpu-operator#1351)."""
    profiles = tuple(Profile(i, "1g.20gb", m, 1, 14, 1, (Placement(0, 1),)) for i, m in enumerate(memories))
    room = Room(replace(gpu("a100-80"), profiles=profiles))
    size = data.draw(st.integers(1, max(memories)))

    choice = choose([room], Request(size), SETTINGS)

    assert choice.profile.memory_mib == min(m for m in memories if m >= size)


def test_a_gpu_that_reports_less_memory_in_all_gives_the_same_profiles() -> None:
    # NVIDIA/gpu-operator#351: a label worked out from the total was one short.
    whole = Room(gpu("h200"))
    less = Room(replace(whole.gpu, memory_mib=whole.gpu.memory_mib * 994 // 1000))

    for profile in allowed(whole.gpu, SETTINGS):
        request = Request(profile.memory_mib)
        assert choose([less], request, SETTINGS) == choose([whole], request, SETTINGS)


def test_more_multiprocessors_come_first_among_profiles_of_one_size() -> None:
    names = [choice.profile.name for choice, _ in fill(rooms("h200", 1), Request(33_280))]

    assert names == ["2g.35gb", "2g.35gb", "2g.35gb", "1g.35gb"]
    assert [c.profile.name for c, _ in fill(rooms("h200", 1), Request(71_424))] == ["4g.71gb", "3g.71gb"]


def test_fewer_multiprocessors_come_first_if_the_policy_says_so() -> None:
    least = replace(SETTINGS, compute="least")

    assert {choice.profile.name for choice, _ in fill(rooms("h200", 1), Request(33_280), least)} == {"1g.35gb"}
    assert {choice.profile.name for choice, _ in fill(rooms("h200", 1), Request(71_424), least)} == {"3g.71gb"}


def test_a_profile_with_more_multiprocessors_opens_no_second_gpu() -> None:
    choices = [choice for choice, _ in fill(rooms("h200", 2), Request(71_424))]

    assert [(c.gpu_uuid, c.profile.name) for c in choices] == [
        ("GPU-h200-0", "4g.71gb"),
        ("GPU-h200-0", "3g.71gb"),
        ("GPU-h200-1", "4g.71gb"),
        ("GPU-h200-1", "3g.71gb"),
    ]


@pytest.mark.parametrize("board", ["a30", "h200", "rtx-pro-6000"])
def test_media_and_graphics_variants_are_never_chosen_unasked(board: str) -> None:
    offered = allowed(gpu(board), SETTINGS)

    assert offered
    assert not any(p.variant or "+" in p.name or "-me" in p.name for p in offered)
    for memory_mib in {p.memory_mib for p in gpu(board).profiles}:
        assert not any(choice.profile.variant for choice, _ in fill(rooms(board, 1), Request(memory_mib)))


@pytest.mark.parametrize("name", ["1g.24gb+gfx", "1G.24GB+GFX", "2g.48gb"])
def test_a_profile_is_named_as_nvml_names_it_in_any_case(name: str) -> None:
    choice = choose(rooms("rtx-pro-6000", 1), Request(0, name), SETTINGS)

    assert choice.profile.name == name.lower()


def test_a_named_profile_is_not_replaced_by_a_larger_one() -> None:
    room = replace(Room(gpu("h200")), full=frozenset({19}))
    upsize = replace(SETTINGS, upsize=True)

    assert "1g.18gb" in refusal([room], Request(0, "1g.18gb"), upsize).message


def test_an_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(
        BadRequest, match=r"no profile 3g\.99gb can be had on this node; there are: 1g\.6gb, 1g\.6gb\+me"
    ):
        choose(rooms("a30", 1), Request(0, "3g.99gb"), SETTINGS)


def test_the_allow_list_is_all_there_is_for_its_model() -> None:
    node = rooms("a100-40", 1)

    assert [p.name for p in allowed(node[0].gpu, FOUR_PROFILES)] == ["1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb"]
    assert {choice.profile.name for choice, _ in fill(node, Request(19_968), FOUR_PROFILES)} == {"3g.20gb"}
    with pytest.raises(BadRequest, match=r"no profile 4g\.20gb"):
        choose(node, Request(0, "4g.20gb"), FOUR_PROFILES)
    assert choose(rooms("a30", 1), Request(1), FOUR_PROFILES).profile.name == "1g.6gb"


def test_a_listed_variant_serves_memory_only_where_no_plain_profile_of_that_memory_is_listed() -> None:
    known = gpu("rtx-pro-6000")
    richer = replace(named("rtx-pro-6000", "1g.24gb+gfx"), name="1G.24GB+GFX", multiprocessors=99)
    room = Room(replace(known, profiles=(*(p for p in known.profiles if p.id != richer.id), richer)))
    both = replace(SETTINGS, allowed={known.model: ("1g.24gb", "1g.24gb+gfx")})
    alone = replace(SETTINGS, allowed={known.model: ("1g.24gb+gfx", "2G.48gb")})

    assert choose([room], Request(8000), both).profile.name == "1g.24gb"
    assert choose([room], Request(8000), alone).profile == richer
    assert choose([room], Request(30_000), alone).profile.name == "2g.48gb"


def test_a_larger_profile_is_given_only_if_the_policy_allows() -> None:
    room = replace(Room(gpu("h200")), full=frozenset({19}))

    assert "1g.18gb" in refusal([room], Request(8000)).message
    assert choose([room], Request(8000), replace(SETTINGS, upsize=True)).profile.name == "2g.35gb"
    assert len(tiers(room.gpu, Request(8000), SETTINGS)) == 1
    names = [[p.name for p in tier] for tier in tiers(room.gpu, Request(8000), replace(SETTINGS, upsize=True))]
    assert names == [["1g.18gb"], ["2g.35gb", "1g.35gb"], ["4g.71gb", "3g.71gb"], ["7g.141gb"]]


def test_the_exact_size_is_searched_on_every_gpu_before_a_larger_one() -> None:
    upsize = replace(SETTINGS, upsize=True)
    first = replace(Room(gpu("h200", 0)), full=frozenset({19}))

    choice = choose([first, Room(gpu("h200", 1))], Request(8000), upsize)

    assert (choice.gpu_uuid, choice.profile.name) == ("GPU-h200-1", "1g.18gb")


def test_the_smallest_of_a_bigger_gpu_comes_before_the_second_smallest_of_another() -> None:
    upsize = replace(SETTINGS, upsize=True)
    node = [replace(Room(gpu("a100-40", 0)), full=frozenset({19})), Room(gpu("rtx-pro-6000", 1))]

    names = [choice.profile.name for choice, _ in itertools.islice(fill(node, Request(4000), upsize), 5)]

    assert names == ["1g.24gb"] * 4 + ["2g.10gb"]


def test_mixed_models_serve_smaller_memory_first_and_each_its_own_smallest() -> None:
    node = [Room(gpu("rtx-pro-6000", 0)), Room(gpu("a100-40", 1)), Room(gpu("a30", 2))]

    names = [choice.profile.name for choice, _ in fill(node, Request(4000))]

    assert names == ["1g.5gb"] * 7 + ["1g.6gb"] * 4 + ["1g.24gb"] * 4


# Which GPU, which start


def test_four_eighths_fill_a_gpu_and_the_fifth_opens_another() -> None:
    choices = [choice for choice, _ in itertools.islice(fill(rooms("rtx-pro-6000", 2), Request(8000)), 5)]

    assert [(c.gpu_uuid[-1], c.placement.start) for c in choices] == [("0", 0), ("0", 3), ("0", 6), ("0", 9), ("1", 0)]
    assert {c.profile.memory_mib for c in choices} == {24_192}


def test_what_the_hardware_and_a_record_both_hold_is_taken_once() -> None:
    room = busy(Room(gpu("rtx-pro-6000")), (0, 3), (0, 3), (6, 6))

    assert choose([room], Request(8000), SETTINGS).placement == Placement(3, 3)
    assert places(room, named("rtx-pro-6000", "1g.24gb")) == (1, 4)


def test_a_driver_without_capacity_for_a_profile_is_believed() -> None:
    # +me on an H200: one instance, seven places; only the driver knows the engine is gone.
    media = named("h200", "1g.18gb+me")
    room = replace(busy(Room(gpu("h200", 0)), (0, 1)), full=frozenset({media.id}))

    assert places(room, media) == (0, 7)
    error = refusal([room], Request(0, media.name))
    assert (
        error.message == "no room for 1g.18gb+me on this node: the driver has none of the 7 places for 1g.18gb+me left"
    )
    assert error.code == "NOCAP"
    assert choose([room, Room(gpu("h200", 1))], Request(0, media.name), SETTINGS).gpu_uuid == "GPU-h200-1"


def test_spread_takes_the_emptiest_gpu_and_binpack_the_fullest() -> None:
    node = [
        busy(Room(gpu("rtx-pro-6000", 0)), (0, 3)),
        busy(Room(gpu("rtx-pro-6000", 1)), (0, 6)),
        Room(gpu("rtx-pro-6000", 2)),
    ]

    def taken(policy: str) -> str:
        return choose(node, Request(8000), replace(SETTINGS, placement=policy)).gpu_uuid[-1]

    assert [taken("spread"), taken("binpack"), taken("least-damage")] == ["2", "1", "0"]


def test_a_request_may_name_its_gpus_by_uuid_or_pci_address() -> None:
    node = rooms("rtx-pro-6000", 3)

    for name in ("GPU-rtx-pro-6000-2", "00000000:03:00.0"):
        assert choose(node, Request(8000, gpus=(name,)), SETTINGS).gpu_uuid == "GPU-rtx-pro-6000-2"
    full = busy(node[2], (0, 12))
    error = refusal([*node[:2], full], Request(8000, gpus=("GPU-rtx-pro-6000-2",)))
    assert error.message == "no room for 8,000 MiB on GPU-rtx-pro-6000-2: 4 of 4 places for 1g.24gb are taken"


def test_a_gpu_that_is_not_managed_cannot_be_named() -> None:
    request = Request(8000, gpus=("GPU-a30-0", "GPU-7"))

    with pytest.raises(BadRequest, match="GPU-7 is no managed GPU of this node; managed: GPU-a30-0"):
        choose(rooms("a30", 1), request, SETTINGS)


def test_the_reserve_of_each_gpu_is_never_given_out() -> None:
    reserve = replace(SETTINGS, reserve_mib=30_000)
    node = rooms("rtx-pro-6000", 1)

    given_out = [choice.profile.name for choice, _ in fill(node, Request(8000), reserve)]

    assert given_out == ["1g.24gb", "1g.24gb"]
    held = replace(busy(node[0], (0, 3), (3, 3)), held_mib=2 * 24_192)
    error = refusal([held], Request(8000), reserve)
    assert "the reserve of 30,000 MiB a GPU leaves no memory for 1g.24gb" in error.message
    with pytest.raises(TooBig, match=r"the largest is 2g\.48gb \(48,512 MiB\)"):
        choose(node, Request(60_000), reserve)


# Refusals


def test_no_room_says_how_many_places_are_taken_and_what_to_run() -> None:
    error = refusal([busy(Room(gpu("rtx-pro-6000")), (0, 6), (6, 3), (9, 3))], Request(8000))

    text = "no room for 8,000 MiB on this node: 4 of 4 places for 1g.24gb are taken; run: gres-mig why 8000"
    assert str(error) == text
    assert (error.code, error.fault) == ("NOCAP", Fault.CAPACITY)


def test_enough_memory_in_the_wrong_places_is_said_to_be_scattered() -> None:
    # kubernetes-sigs/dra-driver-nvidia-gpu#933
    error = refusal([busy(Room(gpu("a100-40")), (0, 1), (4, 1))], Request(19_968), FOUR_PROFILES)

    assert error.code == "FRAG"
    assert error.message == (
        "no room for 19,968 MiB on this node: 2 of 2 places for 3g.20gb are taken, "
        "though 5 free slices would hold its 4 if they lay together"
    )


def test_as_many_free_slices_as_are_needed_are_enough_to_be_scattered() -> None:
    error = refusal([busy(Room(gpu("a30")), (0, 1), (2, 1))], Request(11_968))

    assert error.code == "FRAG"
    assert error.message.endswith("though 2 free slices would hold its 2 if they lay together")


def test_a_slice_that_nothing_can_use_is_no_free_memory() -> None:
    # The eighth memory slice of seven-slice boards has no compute slice beside it.
    node = [busy(room, *((start, 1) for start in range(7))) for room in rooms("h200", 8)]

    assert refusal(node, Request(8000)).code == "NOCAP"


@pytest.mark.parametrize("count", [1, 4])
def test_more_than_one_gpu_holds_is_the_requests_fault_however_many_there_are(count: int) -> None:
    with pytest.raises(TooBig) as caught:
        choose(rooms("a30", count), Request(30_000), SETTINGS)

    assert caught.value.fault is Fault.REQUEST
    assert str(caught.value) == "no instance on this node holds 30,000 MiB: the largest is 4g.24gb (24,000 MiB)"


def test_too_big_is_judged_by_what_an_empty_node_could_hold_even_if_a_gpu_is_closed() -> None:
    fenced = replace(Room(gpu("rtx-pro-6000", 1)), closed="fenced")
    node = [Room(gpu("a30", 0)), fenced]

    error = refusal(node, Request(30_000))

    assert error.message.endswith("takes no new work: GPU 1 (GPU-rtx-pro-6000-1): fenced")
    with pytest.raises(TooBig):
        choose(node, Request(100_000), SETTINGS)


def test_a_closed_gpu_takes_no_work_and_is_mentioned() -> None:
    node = [replace(Room(gpu("a30", 0)), closed="fenced"), busy(Room(gpu("a30", 1)), (0, 2))]

    assert choose(node, Request(1), SETTINGS).gpu_uuid == "GPU-a30-1"
    assert refusal(node, Request(20_000)).message == (
        "no room for 20,000 MiB on this node: 1 of 1 places for 4g.24gb are taken; 1 more GPU(s) take no new work"
    )


def test_a_node_whose_gpus_are_all_closed_is_at_fault_and_says_why() -> None:
    node = [replace(Room(gpu("a30", 0)), closed="fenced"), replace(Room(gpu("a30", 1)), closed="MIG mode is off")]

    with pytest.raises(NodeFault) as caught:
        choose(node, Request(1), SETTINGS)

    assert caught.value.message == (
        "no managed GPU of this node takes new work: GPU 0 (GPU-a30-0): fenced; GPU 1 (GPU-a30-1): MIG mode is off"
    )


def test_a_node_without_managed_gpus_names_the_command_that_sets_it_up() -> None:
    with pytest.raises(NodeFault, match=r"no GPU of this node is managed; run: gres-mig setup"):
        choose([], Request(1), SETTINGS)


def test_a_gpu_without_mig_changes_nothing_for_the_others() -> None:
    node = [replace(Room(gpu("l40", 0)), closed="this board has no MIG"), Room(gpu("a30", 1))]

    assert choose(node, Request(1), SETTINGS).gpu_uuid == "GPU-a30-1"
    with pytest.raises(TooBig):
        choose(node, Request(30_000), SETTINGS)
    with pytest.raises(BadRequest, match="GPU-l40-0 has no MIG"):
        choose(node, Request(1, gpus=("GPU-l40-0",)), SETTINGS)
    with pytest.raises(NodeFault, match="this board has no MIG"):
        choose(node[:1], Request(1), SETTINGS)


def test_a_lost_gpu_may_yet_be_the_one_that_holds_it() -> None:
    lost = replace(Room(replace(gpu("h200", 1), profiles=())), closed="lost")

    for request in (Request(100_000), Request(0, "7g.141gb")):
        assert "takes no new work: GPU 1 (GPU-h200-1): lost" in refusal([Room(gpu("a30", 0)), lost], request).message


def test_a_configuration_that_leaves_no_profile_is_the_nodes_fault() -> None:
    nothing = replace(SETTINGS, allowed={gpu("a30").model: ("1g.5gb",)})

    for settings in (nothing, replace(SETTINGS, reserve_mib=24_000)):
        with pytest.raises(NodeFault, match="the allow-list and the reserve leave no profile on this node"):
            choose(rooms("a30", 1), Request(1), settings)


@pytest.mark.parametrize("size", [0, -1])
def test_nothing_is_no_request(size: int) -> None:
    with pytest.raises(BadRequest, match="ask for at least 1 MiB"):
        choose(rooms("a30", 1), Request(size), SETTINGS)

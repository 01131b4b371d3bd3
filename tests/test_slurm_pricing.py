"""What a profile counts: what fits is never refused, and a GPU pays for no more of one size than fit."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from gpus import A100_MENU, FOUR_PROFILES, SETTINGS, gpu
from hypothesis import given
from hypothesis import settings as searching
from hypothesis import strategies as st

from gres_mig.errors import BadRequest, ConfigError, NodeFault, TooBig
from gres_mig.models import Gpu, Placement, Profile, Request, Settings
from gres_mig.slice_models import Slicing
from gres_mig.values import replace
from gres_mig_slurm import sizes_file
from gres_mig_slurm.pricing import prices
from gres_mig_slurm.profiles import Sizes, node_type, of_this_node

SLICED = replace(SETTINGS, slicing=Slicing(("*",)))
BOARDS = ("a100-40", "a100-80", "a30", "b200", "gh200", "h100-80", "h100-94", "h200", "rtx-pro-6000")
MIXED = Sizes(
    (
        node_type([gpu("a30", i) for i in range(4)], SETTINGS, nodes="a[1-9]"),
        node_type([gpu("a100-40", i) for i in range(8)], SETTINGS, nodes="b1"),
        node_type([gpu("rtx-pro-6000"), gpu("h100-80", 1)], SETTINGS),
    )
)


def packings(profiles: tuple[Profile, ...]) -> set[tuple[int, ...]]:
    """The sizes that fit on a GPU together, every way there is: found by putting one instance beside the other."""
    seen: set[tuple[tuple[int, ...], int]] = set()
    ways: list[tuple[tuple[int, ...], int]] = [((), 0)]
    while ways:
        held, taken = way = ways.pop()
        if way not in seen:
            seen.add(way)
            places = {(p.memory_mib, q.mask) for p in profiles for q in p.placements if not q.mask & taken}
            ways += [(tuple(sorted((*held, size))), taken | mask) for size, mask in places]
    return {held for held, _ in seen}


# One GPU


@pytest.mark.parametrize(
    ("board", "whole", "counts"),
    [
        ("a30", 24000, {5952: 6000, 11968: 12000, 24000: 24000}),
        ("rtx-pro-6000", 97280, {24192: 24320, 48512: 48640, 97280: 97280}),
        ("a100-40", 40192, {4864: 5025, 9856: 10042, 19968: 20092, 40192: 40192}),
        ("a100-80", 80896, {9728: 10113, 19968: 20218, 40192: 40444, 80896: 80896}),
        ("h100-80", 81152, {9984: 10145, 20096: 20282, 40448: 40572, 81152: 81152}),
        ("h100-94", 95360, {11008: 11921, 22144: 23834, 47488: 47676, 95360: 95360}),
        ("gh200", 95236, {11264: 11905, 23552: 23806, 47616: 47616, 95232: 95236}),
        ("h200", 143360, {16384: 17921, 33280: 35834, 71424: 71676, 143360: 143360}),
        ("b200", 181254, {22528: 22657, 45312: 45312}),
    ],
)
def test_a_profile_counts_the_share_of_its_places(board: str, whole: int, counts: dict[int, int]) -> None:
    found = prices(gpu(board).profiles, sys.maxsize)

    assert found == (whole, counts)


@pytest.mark.parametrize("board", BOARDS)
def test_whatever_fits_on_a_gpu_together_is_paid_for_by_a_whole_one(board: str) -> None:
    profiles = gpu(board).profiles

    whole, price = prices(profiles, sys.maxsize)

    dearest = max(packings(profiles), key=lambda sizes: sum(price[size] for size in sizes))
    assert sum(price[size] for size in dearest) <= whole


@pytest.mark.parametrize("board", BOARDS)
def test_a_whole_gpu_pays_for_as_many_of_one_size_as_fit(board: str) -> None:
    profiles = gpu(board).profiles

    whole, price = prices(profiles, sys.maxsize)

    fit = {size: max(sizes.count(size) for sizes in packings(profiles)) for size in price}
    assert {size: whole // each for size, each in price.items()} == fit


@pytest.mark.parametrize("board", BOARDS)
def test_no_profile_counts_less_than_it_holds(board: str) -> None:
    whole, price = prices(gpu(board).profiles, sys.maxsize)

    assert all(size <= each <= whole for size, each in price.items())


def test_four_eighths_and_a_half_pay_for_no_more_than_the_a100_they_fit_on() -> None:
    """Seven 1g fit, so a seventh each looks right; but four of them leave room for a 3g, which is half."""
    whole, price = prices(gpu("a100-40").profiles, sys.maxsize)

    assert 4 * price[4864] + price[19968] <= whole
    assert 4 * whole // 7 + whole // 2 > whole


def test_profiles_that_are_not_allowed_leave_their_share_to_the_others() -> None:
    a30 = gpu("a30")
    settings = replace(SETTINGS, allowed={a30.model: ("1g.6gb", "2g.12gb")})

    (board,) = node_type([a30], settings).boards

    assert [(p.name, p.price_mib) for p in board.profiles] == [("1g.6gb", 5984), ("2g.12gb", 11968)]
    assert board.whole_mib == 23936


def test_of_variants_alone_no_more_are_paid_for_than_the_engines_allow() -> None:
    a100 = gpu("a100-40")
    settings = replace(SETTINGS, allowed={a100.model: ("1g.5gb+me", "7g.40gb")})

    (board,) = node_type([a100], settings).boards

    assert board.whole_mib // board.profiles[0].price_mib == 1


def test_what_the_reserve_takes_is_not_counted() -> None:
    (board,) = node_type([gpu("a100-40")], replace(SETTINGS, reserve_mib=2048)).boards

    assert board.whole_mib <= 40960 - 2048
    assert "7g.40gb" not in {p.name for p in board.profiles}


slices = st.integers(1, 9)
invented = st.lists(
    st.builds(
        lambda number, memory, size, starts: Profile(
            number, f"{number}", memory, 1, 1, 7, tuple(Placement(start, size) for start in sorted(starts))
        ),
        st.integers(0, 99),
        st.integers(1, 200_000),
        st.integers(1, 8),
        st.sets(st.integers(0, 6), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=4,
)


@searching(deadline=None, max_examples=200)
@given(invented)
def test_on_no_board_however_odd_is_refused_what_fits(profiles: list[Profile]) -> None:
    whole, price = prices(tuple(profiles), sys.maxsize)

    for sizes in packings(tuple(profiles)):
        assert sum(price[size] for size in sizes) <= whole
    assert all(size <= price[size] for size in price)


# Nodes and clusters


def test_a_node_counts_its_managed_gpus_and_no_others() -> None:
    gpus = [gpu("a30", 0), gpu("a30", 1), gpu("rtx-pro-6000", 2), gpu("l40", 3)]
    settings = replace(SETTINGS, managed=(gpus[0].uuid, gpus[2].uuid, gpus[3].uuid))

    node = node_type(gpus, settings)

    assert node.name == "1x NVIDIA A30 + 1x NVIDIA RTX PRO 6000 Blackwell Server Edition"
    assert node.count_mib == 24000 + 97280


def test_the_type_of_a_node_is_what_its_own_nvml_says(settings: Settings) -> None:
    node = of_this_node(settings, nodes="n[1-4]")

    assert (node.name, node.nodes) == ("2x NVIDIA RTX PRO 6000 Blackwell Server Edition", "n[1-4]")
    assert node.count_mib == 2 * 97280


def test_a_gpu_whose_profiles_cannot_be_read_is_named() -> None:
    lost = replace(gpu("a30"), profiles=(), trouble="it fell off the bus")

    with pytest.raises(NodeFault, match=r"GPU 0 \(GPU-a30-0\) shows no profiles: it fell off the bus"):
        node_type([lost], SETTINGS)


def test_a_node_that_manages_nothing_has_no_type() -> None:
    with pytest.raises(NodeFault, match="no GPU of this node is managed that has MIG or is shared by slices"):
        node_type([gpu("a30")], replace(SETTINGS, managed=()))


def shared(index: int = 0, **more: object) -> Gpu:
    """An L40 that slices share."""
    return replace(gpu("l40", index), sliced=True, backend="cooperative", reserved_mib=500, **more)


def test_a_shared_gpu_counts_what_slices_may_take_and_each_its_overhead() -> None:
    node = node_type([shared(0), shared(1)], SLICED)

    (board,) = node.boards
    # 46,068 MiB, less what the driver keeps, less 3 %.
    assert (board.gpus, board.whole_mib, board.slice_overhead_mib) == (2, 46068 - 500 - 1383, 512)
    assert node.count_mib == 2 * 44185
    assert board.price_mib(Request(4000)) == 4512
    assert (board.price_mib(Request(44185 - 512)), board.price_mib(Request(44185 - 511))) == (44185, None)


def test_a_slice_is_for_no_profile_and_for_nobody_who_insists_on_mig() -> None:
    node = Sizes((node_type([shared(), gpu("a30", 1)], SLICED),))

    assert node.price_mib(Request(4000)) == 4512
    assert node.price_mib(Request(4000, isolation="mig")) == node.price_mib(Request(0, profile="1g.6gb")) == 6000
    with pytest.raises(TooBig, match=r"the largest is a slice \(43,673 MiB\)"):
        node.price_mib(Request(50000))
    with pytest.raises(TooBig, match=r"\(isolation=mig\): the largest is 4g\.24gb \(24,000 MiB\)"):
        node.price_mib(Request(30000, isolation="mig"))


def test_a_shared_gpu_and_one_that_is_not_are_no_alike() -> None:
    node = node_type([shared(), gpu("l40", 1), gpu("a30", 2)], SLICED)

    assert node.name == "1x NVIDIA L40 + 1x NVIDIA A30"


def test_a_shared_gpu_that_nothing_limits_is_named() -> None:
    with pytest.raises(NodeFault, match=r"GPU 0 \(GPU-l40-0\) gives no slices: nothing limits slices"):
        node_type([shared(trouble="nothing limits slices")], SLICED)


def test_a_reserve_that_leaves_no_slice_is_a_mistake() -> None:
    greedy = replace(SLICED, slicing=replace(SLICED.slicing, reserve_mib=46000))

    with pytest.raises(NodeFault, match="slice_reserve and slice_overhead leave no slice of NVIDIA L40"):
        node_type([shared()], greedy)


def test_on_a_mixed_cluster_every_request_counts_no_more_than_on_any_type_that_serves_it() -> None:
    boards = [board for node in MIXED.types for board in node.boards]
    ends = {board: max(p.memory_mib for p in board.profiles) for board in boards}

    for mib in range(1, max(ends.values()) + 1):
        request = Request(mib)
        count = MIXED.price_mib(request)
        able = [price for board in boards if (price := board.price_mib(request)) is not None]

        assert mib <= count == min(able)
        assert len(able) == sum(mib <= end for end in ends.values())


def test_a_request_above_the_largest_names_it() -> None:
    with pytest.raises(TooBig, match=r"no instance holds 97,281 MiB: the largest is 4g\.96gb \(97,280 MiB\)"):
        MIXED.price_mib(Request(97281))


def test_a_profile_by_name_counts_as_its_size_does() -> None:
    assert MIXED.price_mib(Request(0, profile="2G.48gb")) == MIXED.price_mib(Request(48512))


def test_variants_are_had_by_name_only() -> None:
    a100 = Sizes((node_type([gpu("a100-40")], FOUR_PROFILES), node_type([gpu("a30")], SETTINGS)))

    assert a100.price_mib(Request(0, profile="1g.6gb+me")) == 6000
    with pytest.raises(BadRequest, match=r"no GPU of this cluster has a profile 1g\.10gb"):
        a100.price_mib(Request(0, profile="1g.10gb"))


# The file


def test_the_file_says_all_there_is_to_know() -> None:
    node = node_type([shared(), gpu("a30", 1)], SLICED)
    sizes = replace(MIXED, exclusive="allow", types=(*MIXED.types, node))

    assert sizes_file.parse(sizes_file.render(sizes)) == sizes


def test_a_type_that_is_written_again_takes_its_own_place_and_keeps_its_nodes() -> None:
    menu = replace(SETTINGS, allowed=A100_MENU)
    again = node_type([gpu("a100-40", i) for i in range(8)], menu)

    sizes = sizes_file.merged(MIXED, again)

    assert [node.name for node in sizes.types] == sorted(node.name for node in MIXED.types)
    found = next(node for node in sizes.types if node.name == again.name)
    assert (found.boards, found.nodes) == (again.boards, "b1")


def test_a_model_with_odd_letters_stands_on_one_line() -> None:
    odd = replace(gpu("a30"), model="NVIDIA\nA30 é")

    (node,) = sizes_file.parse(sizes_file.render(Sizes((node_type([odd], SETTINGS),)))).types

    assert (node.name, node.boards[0].model) == ("1x NVIDIA A30", "NVIDIA A30")


@pytest.mark.parametrize(
    "line",
    [
        "exclusive perhaps",
        "nodes",
        "type",
        "board x 97280 A30",
        "board 1 0 A30",
        "profile 1g.6gb 5952 6000",
        "profile 1g.6gb 5952 -1 size",
        "profile 1g.6gb 5952 6000 both",
        "slices",
        "slices -1",
        "os.execute('true')",
    ],
)
def test_a_line_that_is_not_understood_is_named(line: str) -> None:
    text = f"format 1\ntype a\nboard 1 24000 A30\n{line}\n"

    with pytest.raises(ConfigError, match=r"gres-mig-sizes\.conf:4: .* is not understood"):
        sizes_file.parse(text)


@pytest.mark.parametrize("line", ["nodes n1", "board 1 24000 A30", "slices 512", "profile 1g.6gb 5952 6000 size"])
def test_a_line_before_what_it_belongs_to_is_not_understood(line: str) -> None:
    with pytest.raises(ConfigError, match=r"gres-mig-sizes\.conf:2: "):
        sizes_file.parse(f"format 1\n{line}\n")


def test_a_file_of_another_format_is_not_read() -> None:
    with pytest.raises(ConfigError, match="no line: format 1"):
        sizes_file.parse("exclusive allow\n")


# What the manual says

ROOT = Path(__file__).parent.parent
ROWS = {
    "A30": "a30",
    "A100 40 GB": "a100-40",
    "A100 80 GB": "a100-80",
    "H100 80 GB": "h100-80",
    "H100 94 GB": "h100-94",
    "GH200 96 GB": "gh200",
    "H200": "h200",
    "RTX PRO 6000": "rtx-pro-6000",
}


def manual() -> str:
    return (ROOT / "docs" / "slurm-pricing.md").read_text()


@pytest.mark.parametrize(("row", "board"), ROWS.items(), ids=ROWS.values())
def test_the_manual_has_the_price_of_every_size(row: str, board: str) -> None:
    found = re.search(rf"^\| {row} \| (.*) \| (.*) \|$", manual(), re.MULTILINE)
    assert found

    whole, price = prices(gpu(board).profiles, sys.maxsize)

    assert found[1] == f"{whole:,}"
    assert re.findall(r"(\d+,\d{3})", found[2]) == [f"{each:,}" for each in price.values()]


def test_the_file_in_the_manual_is_one() -> None:
    (example,) = re.findall(r"^```text\n(format 1\n.*?)^```", manual(), re.MULTILINE | re.DOTALL)

    (node,) = sizes_file.parse(example).types

    written = {p.name: p for p in node_type([gpu("a30")], SETTINGS).boards[0].profiles}
    assert [written[p.name] for p in node.boards[0].profiles] == list(node.boards[0].profiles)

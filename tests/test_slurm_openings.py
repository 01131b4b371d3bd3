"""Which sizes a node lets jobs in for: by choice alone, with the figures of real boards."""

from __future__ import annotations

from gpus import SETTINGS, busy, gpu, rooms

from gres_mig.models import Placement, Request
from gres_mig.placement import Room
from gres_mig.values import replace
from gres_mig_slurm import openings
from gres_mig_slurm.delayed import MOST_WAKES, PATIENCE_S, Delayed
from gres_mig_slurm.openings import Spell

NOW = 10_000.0
Q, H, W = "migmem-24192", "migmem-48512", "migmem-97280"
PATIENT = replace(SETTINGS, aged_s=600)


def waiting(job_id: int, memory_mib: int, **more: object) -> Delayed:
    """A job behind a gate that was put back here."""
    named = {"gated": True, **more}
    return Delayed(job_id, str(job_id), f"slurm:lab:{job_id}", memory_mib, "", NOW - 700, 0, **named)  # type: ignore[arg-type]


def sounded(spells: dict[str, Spell], *, begun: float = NOW - 1, known: int = 0, gpus: int = 4) -> set[str]:
    jobs = [waiting(n, 90_000) for n in range(known)]
    return set(openings.sounded(spells, [begun], jobs, gpus, PATIENT, NOW))


def test_each_size_of_a_board_has_a_feature_whatever_its_variants_are_called() -> None:
    assert openings.sizes([gpu("rtx-pro-6000")], SETTINGS) == {
        Q: (Request(24_192),),
        H: (Request(48_512),),
        W: (Request(97_280),),
    }


def test_a_size_that_is_had_by_name_alone_is_asked_for_by_name() -> None:
    board = gpu("rtx-pro-6000")
    named = replace(SETTINGS, allowed={board.model: ("1g.24gb", "2g.48gb+gfx")})

    assert openings.sizes([board], named)[H] == (Request(48_512),)


def test_what_has_a_place_is_open_and_what_only_could_have_one_is_not() -> None:
    free = [busy(room, (0, 3), (6, 3)) for room in rooms("rtx-pro-6000", 2)]

    assert openings.with_place(free, (), SETTINGS) == {Q}
    assert openings.with_place([*free, *rooms("rtx-pro-6000", 1)], (), SETTINGS) == {Q, H, W}


def test_a_place_that_is_kept_for_somebody_is_open_to_nobody() -> None:
    (room,) = rooms("rtx-pro-6000", 1)
    kept = waiting(1, 90_000).holding(room.gpu.uuid, Placement(0, 12))

    assert openings.with_place([room], (kept,), SETTINGS) == frozenset()


def test_a_gpu_that_takes_no_new_work_opens_nothing() -> None:
    (room,) = rooms("rtx-pro-6000", 1)

    assert openings.with_place([replace(room, closed="fenced")], (), SETTINGS) == frozenset()


def test_who_was_called_finds_a_way_in_from_the_begin_time_on_and_not_for_ever() -> None:
    (room,) = rooms("rtx-pro-6000", 1)
    job = waiting(1, 90_000).holding(room.gpu.uuid, Placement(0, 12))
    when = {"before": NOW + 5, "now": NOW, "late": NOW - PATIENCE_S - 1, "never": 0.0}
    found = {name: openings.called([room], (replace(job, woken=woken),), SETTINGS, NOW) for name, woken in when.items()}

    assert found == {"before": frozenset(), "now": {W}, "late": frozenset(), "never": frozenset()}


def test_a_size_that_was_closed_too_long_while_others_began_is_sounded() -> None:
    assert sounded({W: Spell(NOW - 601), H: Spell(NOW - 599)}) == {W}


def test_a_size_behind_which_nothing_was_overtaken_is_not_sounded() -> None:
    assert sounded({W: Spell(NOW - 601)}, begun=NOW - 602) == set()


def test_no_more_are_sounded_than_places_are_kept_for() -> None:
    spells = {W: Spell(NOW - 601)}

    assert [sounded(spells, known=known) for known in (0, 1, 2)] == [{W}, {W}, set()]
    assert [sounded(spells, known=known, gpus=1) for known in (0, 1)] == [{W}, set()]


def test_who_waits_for_something_else_than_a_place_is_not_in_the_way_of_others() -> None:
    idle = waiting(1, 90_000, wakes=MOST_WAKES)

    assert openings.sounded({W: Spell(NOW - 601)}, [NOW - 1], [idle], 1, PATIENT, NOW) == {W}


def test_an_opening_too_short_for_who_waits_does_not_end_the_time_a_size_has_been_closed() -> None:
    spells = openings.followed({}, (W,), frozenset(), 0.0)
    for now, opened in ((100.0, {W}), (100.0 + PATIENCE_S - 1, set()), (200.0, {W}), (210.0, {W})):
        spells = openings.followed(spells, (W,), frozenset(opened), now)
    short = openings.followed(spells, (W,), frozenset(), 200.0 + PATIENCE_S - 1)
    long = openings.followed(spells, (W,), frozenset(), 200.0 + PATIENCE_S)

    assert (short, long) == ({W: Spell(0.0)}, {W: Spell(200.0 + PATIENCE_S)})


def test_a_size_that_was_always_open_has_no_spell() -> None:
    assert openings.followed({}, (W,), frozenset({W}), NOW) == {}


def large_had_at(aged_s: float) -> int | None:
    """When a large job that waits at the controller from second 30 on is first seen, while small ones of 7 s go on."""
    settings = replace(SETTINGS, aged_s=aged_s)
    running: list[tuple[float, float, int]] = []
    spells: dict[str, Spell] = {}
    (empty,) = rooms("rtx-pro-6000", 1)
    for now in range(10, 200):
        running = [job for job in running if job[0] > now]
        for start in (0, 3, 6, 9):
            # One each second, so that some of them always run.
            if start not in {place for *_, place in running} and not any(began == now for _, began, _ in running):
                running.append((now + 7, now, start))
        free: list[Room] = [busy(empty, *((start, 3) for *_, start in running))]
        opened = openings.with_place(free, (), settings)
        spells = openings.followed(spells, (Q, H, W), opened, now)
        tried = openings.sounded(spells, [began for _, began, _ in running], (), 1, settings, now)
        if now >= 30 and W in opened | tried:
            return now
    return None


def test_a_large_job_at_the_controller_is_seen_however_many_small_ones_come() -> None:
    assert (large_had_at(aged_s=1e9), large_had_at(aged_s=40)) == (None, 51)

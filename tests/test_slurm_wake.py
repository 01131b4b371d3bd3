"""Who is woken when a hole opens, and for whom a place is kept: by choice, then on a real cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from gpus import SETTINGS, busy, gpu, rooms
from slurm_cluster import Cluster, brought_up, require_slurm

from gres_mig import config, simulator
from gres_mig.allocator import Allocator
from gres_mig.errors import NoCapacity
from gres_mig.models import Owner, Placement, Request
from gres_mig.placement import Room
from gres_mig.rooms import Held
from gres_mig.simulator.program import command, environment
from gres_mig.slice_models import Slicing
from gres_mig.values import replace
from gres_mig_slurm import delayed, wake
from gres_mig_slurm.delayed import Delayed

require_slurm()

NOW = 10_000.0
QUARTER, HALF, WHOLE = 24_000, 40_000, 90_000
PATIENT = replace(SETTINGS, aged_s=600)


def job(job_id: int, memory_mib: int, *, waits_s: float = 1.0, **more: Any) -> Delayed:
    """A job that was delayed first so long ago."""
    return Delayed(job_id, str(job_id), f"slurm:lab:{job_id}", memory_mib, "", NOW - waits_s, 20_000, **more)


def woken(waiting: Sequence[Delayed], free: Sequence[Room]) -> list[int]:
    """The ids of those that are woken, in order."""
    return [job.job_id for job in wake.plan(waiting, free, PATIENT, NOW)]


def kept(waiting: Sequence[Delayed], free: Sequence[Room]) -> dict[int, tuple[str, int, int]]:
    """By job the place that is kept for it."""
    found = wake.keep_places(waiting, free, PATIENT, NOW)
    return {job.job_id: (job.gpu_uuid, job.start, job.size) for job in found if job.held}


def test_a_hole_wakes_one_job() -> None:
    (gpu,) = rooms("rtx-pro-6000", 1)
    free = [busy(gpu, (0, 6), (6, 3))]

    assert woken([job(1, QUARTER, waits_s=5), job(2, QUARTER, waits_s=9)], free) == [2]


def test_each_hole_wakes_its_own_job() -> None:
    assert woken([job(n, HALF) for n in range(1, 6)], rooms("rtx-pro-6000", 2)) == [1, 2, 3, 4]


def test_the_largest_that_fits_is_woken_before_older_small_ones() -> None:
    (gpu,) = rooms("rtx-pro-6000", 1)
    free = [busy(gpu, (0, 6))]

    assert woken([job(1, QUARTER, waits_s=50), job(2, HALF), job(3, WHOLE)], free) == [2]


def test_who_has_waited_too_long_comes_before_the_larger_ones() -> None:
    (gpu,) = rooms("rtx-pro-6000", 1)
    free = [busy(gpu, (0, 6), (6, 3))]
    waiting = [job(1, QUARTER, waits_s=700), job(2, QUARTER, waits_s=601), job(3, HALF)]

    assert woken(waiting, free) == [1]


def test_the_hole_of_a_woken_job_is_its_own_until_the_scheduler_has_had_its_time() -> None:
    (gpu,) = rooms("rtx-pro-6000", 1)
    free = [busy(gpu, (0, 6), (6, 3))]
    first = replace(job(1, QUARTER).holding(gpu.gpu.uuid, gpu.gpu.profiles[0].placements[3]), woken=NOW - 1, wakes=1)
    late = replace(first, woken=NOW - wake.PATIENCE_S - 1)

    assert woken([first, job(2, QUARTER)], free) == []
    assert woken(wake.keep_places([late, job(2, QUARTER)], free, PATIENT, NOW), free) == [1]


def test_who_waits_for_something_else_than_a_place_keeps_none_from_others() -> None:
    (gpu,) = rooms("rtx-pro-6000", 1)
    idle = job(1, QUARTER, waits_s=700, wakes=wake.MOST_WAKES, woken=NOW - 100)
    free = [busy(gpu, (0, 6), (6, 3))]

    assert kept([idle, job(2, QUARTER)], free) == {}
    assert woken([idle, job(2, QUARTER)], free) == [2]


def test_the_place_with_the_least_in_it_is_kept_for_who_has_waited_too_long() -> None:
    one, two = rooms("rtx-pro-6000", 2)
    free = [busy(one, (0, 3), (6, 3)), busy(two, (3, 3))]

    assert kept([job(1, WHOLE, waits_s=700), job(2, HALF)], free) == {1: (two.gpu.uuid, 0, 12)}


def test_a_kept_place_stays_the_same_while_others_empty_and_fill() -> None:
    one, two = rooms("rtx-pro-6000", 2)
    before = wake.keep_places([job(1, WHOLE, waits_s=700)], [busy(one, (0, 3)), busy(two, (0, 6))], PATIENT, NOW)

    assert before[0].gpu_uuid == one.gpu.uuid
    assert kept(before, [busy(one, (0, 3), (3, 3)), two])[1][0] == one.gpu.uuid


SHARING = replace(PATIENT, slicing=Slicing(("*",)))
TAKES = 44_685
"""What slices may take of an L40 together."""


def shared(held_mib: int, index: int = 0) -> Room:
    """An L40 that is shared, with so much of it taken."""
    l40 = replace(gpu("l40", index), sliced=True, backend="cooperative")
    return Room(l40, tuple(Placement(number, 1) for number in range(bool(held_mib))), held_mib)


def test_what_a_slice_gave_back_wakes_as_many_as_have_room_together() -> None:
    waiting = [job(n, 9_488) for n in range(1, 6)] + [job(6, 9_488, isolation="mig")]

    found = list(wake.plan(waiting, [shared(TAKES - 20_500)], SHARING, NOW))

    assert [(each.job_id, each.takes_mib) for each in found] == [(1, 10_000), (2, 10_000)]
    assert len({each.start for each in found}) == 2


def test_room_comes_for_who_has_waited_too_long_on_the_gpu_that_has_most() -> None:
    old = job(1, 40_000, waits_s=700)
    free = [shared(TAKES - 9_000, 0), shared(TAKES - 20_000, 1)]

    (kept_for,) = wake.keep_places([old], free, SHARING, NOW)

    assert (kept_for.gpu_uuid, kept_for.takes_mib) == (free[1].gpu.uuid, 40_512)
    # All others go round it.
    assert [each.gpu_uuid for each in wake.plan([kept_for, job(2, 8_000)], free, SHARING, NOW)] == [free[0].gpu.uuid]


def test_no_room_is_kept_twice_on_one_gpu() -> None:
    woken_job = replace(job(1, 30_000).holding(shared(0).gpu.uuid, Placement(0, 1), 30_512), woken=NOW - 1, wakes=1)
    large, small = job(2, 40_000, waits_s=900), job(3, 10_000, waits_s=800)

    found = wake.keep_places([woken_job, large, small], [shared(0)], SHARING, NOW)

    assert {each.job_id: each.takes_mib for each in found} == {1: 30_512, 2: 0, 3: 10_512}


def test_half_of_the_gpus_are_left_to_all_others() -> None:
    waiting = [job(n, WHOLE, waits_s=1000 - n) for n in range(1, 5)]

    assert sorted(kept(waiting, [busy(room, (0, 3)) for room in rooms("rtx-pro-6000", 4)])) == [1, 2]
    assert sorted(kept(waiting, [busy(room, (0, 3)) for room in rooms("rtx-pro-6000", 1)])) == [1]


def test_no_two_jobs_have_one_place() -> None:
    waiting = [job(n, HALF, waits_s=1000 - n) for n in range(1, 5)]
    places = list(kept(waiting, rooms("rtx-pro-6000", 8)).values())

    assert len(places) == len(set(places)) == 4


def whole_gpu_had_at(aged_s: float) -> int | None:
    """When a job that waits from second 30 on has a GPU to itself, on two that small jobs of 7 s keep full."""
    settings = replace(SETTINGS, aged_s=aged_s)
    running: list[tuple[float, Held]] = []
    waiting = [replace(job(0, WHOLE), first=30.0)]
    for now in range(10, 200):
        running = [(ends, place) for ends, place in running if ends > now]
        free = rooms("rtx-pro-6000", 2)
        free = [
            busy(r, *((h.placement.start, h.placement.size) for _, h in running if h.gpu_uuid == r.gpu.uuid))
            for r in free
        ]
        if now >= 30:
            waiting = wake.keep_places(waiting, free, settings, now)
            if next(wake.plan(waiting, free, settings, now), None):
                return now
        held = [place for each in waiting if (place := each.held)]
        for _ in range(2):
            choice = wake._place(job(1, QUARTER), free, held, settings)
            if choice:
                running.append((now + 7, Held(choice.gpu_uuid, choice.placement, "")))
                free = [busy(r, (choice.placement.start, choice.placement.size)) if r.gpu.uuid == choice.gpu_uuid else r
                        for r in free]  # fmt: skip
    return None


def test_a_whole_gpu_is_had_however_many_small_jobs_come() -> None:
    never, had = whole_gpu_had_at(aged_s=1e9), whole_gpu_had_at(aged_s=20)

    assert never is None
    assert had is not None
    assert 30 + 20 < had <= 30 + 20 + 7 + 1


def test_what_is_kept_for_one_owner_is_refused_to_all_others(allocator: Allocator, node: simulator.Node) -> None:
    uuid, other = node.uuids
    (place,) = (p.placements[0] for p in allocator.look()[0].profiles if p.name == "4g.96gb")
    allocator._held = (Held(uuid, place, "slurm:lab:7"),)
    granted = [allocator.allocate(Owner(f"slurm:lab:{n}"), Request(QUARTER)).allocation.gpu_uuid for n in range(1, 5)]
    with pytest.raises(NoCapacity, match=r"8 of 8 places for 1g\.24gb are taken"):
        allocator.allocate(Owner("slurm:lab:5"), Request(QUARTER))

    assert granted == [other] * 4
    assert allocator.allocate(Owner("slurm:lab:7"), Request(WHOLE)).allocation.gpu_uuid == uuid


# On a real cluster


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A GPU on each of two nodes, counted so that Slurm starts more than they hold."""
    boards = {"n1": [("rtx-pro-6000", 1)], "n2": [("rtx-pro-6000", 1)]}
    with brought_up(request, boards, counts={"n1": 900_000, "n2": 900_000}) as cluster:
        yield cluster


def waiting(cluster: Cluster, node: str) -> dict[int, Delayed]:
    """The jobs that a node delayed."""
    return {job.job_id: job for job in delayed.read(config.load(cluster.gpus(node) / "config.toml"))}


def submit(cluster: Cluster, *options: str) -> int:
    """A job that says when it has begun, and goes on until it is cancelled."""
    return cluster.sbatch(*options, script="echo begun; sleep 300")


def put_far_off(cluster: Cluster, node: str, *, jobs: int) -> None:
    """So many jobs have found no place, and the next try of each is as far off as if it had had many."""
    settings = config.load(cluster.gpus(node) / "config.toml")

    def all_pending() -> bool:
        found = waiting(cluster, node).values()
        return len(found) == jobs and all(cluster.state(each.reference) == "PENDING" for each in found)

    cluster.until(all_pending, f"{jobs} jobs delayed on {node}")
    begin = int(time.time()) + 600
    with delayed.changing(settings) as current:
        for each in current.jobs:
            cluster.scontrol("update", f"JobId={each.reference}", f"StartTime=uts{begin}")
            current.put(replace(each, begin=begin))


def fill(cluster: Cluster, *options: str, node: str = "n1", jobs: int = 1) -> list[int]:
    """Running jobs of these sizes."""
    filled = [cluster.sbatch(f"-w{node}", *options, script="sleep 300") for _ in range(jobs)]
    for each in filled:
        cluster.wait(each, "RUNNING")
        cluster.until(lambda job=each: cluster.output(job), f"{each} running on its instance")  # type: ignore[misc]
    return filled


class Scene(NamedTuple):
    """Full nodes, and who waits for what is on them."""

    halves: list[int]
    quarters_wait: list[int]
    half_waits: int
    whole: int
    array_waits: int
    theirs_waits: int
    """Whose user has said when it may begin."""


@pytest.fixture(scope="module")
def scene(cluster: Cluster) -> Scene:
    """On n1 two halves; two quarters wait, and a half. On n2 a whole; an array of two waits, and a user's own."""
    halves = fill(cluster, f"--gres=migmem:{HALF}", jobs=2)
    (whole,) = fill(cluster, f"--gres=migmem:{WHOLE}", node="n2")
    one, two, half = (submit(cluster, "-wn1", f"--gres=migmem:{size}") for size in (QUARTER, QUARTER, HALF))
    array = submit(cluster, "-wn2", "--array=0-1", f"--gres=migmem:{HALF}")
    theirs = submit(cluster, "-wn2", f"--gres=migmem:{WHOLE}")
    put_far_off(cluster, "n1", jobs=3)
    put_far_off(cluster, "n2", jobs=3)
    cluster.run("scontrol", "update", f"JobId={theirs}", "StartTime=now+500")
    return Scene(halves, [one, two], half, whole, array, theirs)


def test_who_ends_wakes_one_of_those_that_wait_and_the_largest_that_fits(cluster: Cluster, scene: Scene) -> None:
    cluster.scancel(scene.halves[0])
    cluster.until(lambda: "begun" in cluster.output(scene.half_waits), "the large one running")

    assert cluster.output(scene.half_waits).startswith("gres-mig: 2g.48gb")
    assert [cluster.state(job) for job in scene.quarters_wait] == ["PENDING", "PENDING"]
    assert sorted(waiting(cluster, "n1")) == scene.quarters_wait


def test_tasks_of_an_array_are_woken_and_a_begin_time_that_its_user_set_is_left_alone(
    cluster: Cluster, scene: Scene
) -> None:
    before = cluster.job(scene.theirs_waits)["EligibleTime"]
    cluster.scancel(scene.whole)
    cluster.until(lambda: len(cluster.instances("n2")) == 2, "both tasks running")
    cluster.until(lambda: not waiting(cluster, "n2"), "nobody waits for being woken")

    assert {cluster.state(f"{scene.array_waits}_{n}") for n in (0, 1)} == {"RUNNING"}
    assert cluster.state(scene.theirs_waits) == "PENDING"
    assert cluster.job(scene.theirs_waits)["EligibleTime"] == before


def test_the_service_forgets_who_is_cancelled_and_keeps_a_place_for_who_waited_too_long(
    cluster: Cluster, scene: Scene
) -> None:
    """The two quarters of n1 still wait, beside two halves."""
    cancelled, small = scene.quarters_wait
    file = cluster.gpus("n1") / "config.toml"
    text = file.read_text()
    file.write_text(f"{text}aged = 0\n")
    cluster.scancel(cancelled)
    large = submit(cluster, "-wn1", f"--gres=migmem:{WHOLE}")
    cluster.until(lambda: large in waiting(cluster, "n1"), "the large one waits")
    serve(cluster, "n1")
    held = {job: each.held for job, each in waiting(cluster, "n1").items() if each.held}
    file.write_text(text)

    assert sorted(waiting(cluster, "n1")) == [small, large]
    assert list(held) == [small]


def test_a_whole_gpu_is_had_while_small_jobs_keep_coming(cluster: Cluster, scene: Scene) -> None:
    cluster.cancel_all()
    serve(cluster, "n1")
    file = cluster.gpus("n1") / "config.toml"
    file.write_text(f"{file.read_text()}aged = 0\n")
    small = fill(cluster, f"--gres=migmem:{QUARTER}", jobs=2)
    large = submit(cluster, "-wn1", f"--gres=migmem:{WHOLE}")
    put_far_off(cluster, "n1", jobs=1)
    serve(cluster, "n1")
    held = waiting(cluster, "n1")[large].held
    late = submit(cluster, "-wn1", f"--gres=migmem:{QUARTER}")
    cluster.until(lambda: late in waiting(cluster, "n1"), "the late small one refused, though two quarters are free")
    for each in small:
        cluster.scancel(each)
    cluster.until(lambda: "begun" in cluster.output(large), "the large one running")

    assert held == Held(cluster.hands("n1").uuids[0], whole_place(), f"slurm:lab:{large}")
    cluster.cancel_all()
    cluster.assert_healthy()


def whole_place() -> Any:
    """The place of a whole RTX PRO 6000."""
    (gpu,) = rooms("rtx-pro-6000", 1)
    return next(p.placements[0] for p in gpu.gpu.profiles if p.name == "4g.96gb")


def serve(cluster: Cluster, node: str) -> None:
    """One pass of the service on a node."""
    words = command("--config", str(cluster.gpus(node) / "config.toml"), "serve", "--once")
    cluster.run(*words, user="root", env=environment(SLURM_CONF=str(cluster.conf), SLURMD_NODENAME=node))

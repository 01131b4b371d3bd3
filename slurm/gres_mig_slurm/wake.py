"""Wakes delayed jobs when a hole opens: one a hole, never one whose begin time is its user's."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from gres_mig import log, machine, placement, rooms, slices
from gres_mig.deadline import operate
from gres_mig.errors import GresMigError
from gres_mig.models import Settings
from gres_mig.placement import Choice, Room
from gres_mig.rooms import Held
from gres_mig.state import Store
from gres_mig.values import replace
from gres_mig_slurm import controller, delayed, slurm_conf
from gres_mig_slurm.controller import Seen
from gres_mig_slurm.delayed import MOST_WAKES, PATIENCE_S, Delayed


def after_release(settings: Settings, node: str = "") -> None:
    """Wake whom what was just given back has room for; whatever goes wrong, they begin by themselves later."""
    try:
        if delayed.read(settings):
            _wake(settings, node)
    except GresMigError as error:
        log.warning("delayed jobs are not woken now: %s", error)
    _publish(settings, node)


def put_off(settings: Settings, job_id: int) -> None:
    """Have a job that was put back here begin no sooner than its pause after this, its epilog's end.

    The prolog counted the pause from its own end; behind a slow hook the job would begin here while slurmd still knows
    its last run's credential (22.05.8: started without the prolog, or "REQUEST_LAUNCH_PROLOG notification failed",
    which drains the node).
    """
    job = next((each for each in delayed.read(settings) if each.job_id == job_id), None)
    if job is None or not (pause := controller.pause_s()) or job.begin >= time.time() + pause:
        return
    seen = controller.seen(job_id)
    if seen is None or seen.eligible not in (job.begin, seen.given_begin):
        return
    begin = controller.start_at(job.reference, time.time() + pause, seen.admin_comment)
    with delayed.changing(settings) as current:
        if current.get(job_id) == job:
            current.put(replace(job, begin=begin))


def look_after(settings: Settings, node: str = "") -> None:
    """Forget those that have ended or run, then wake; what the service does from time to time."""
    from gres_mig_slurm import gates

    try:
        if waiting := delayed.read(settings):
            seen = controller.all_seen([job.job_id for job in waiting])
            with delayed.changing(settings) as current:
                for job in waiting:
                    if current.get(job.job_id) == job and not _waits(job, seen.get(job.job_id)):
                        current.drop(job.job_id)
            _wake(settings, node)
    except GresMigError as error:
        log.warning("delayed jobs are not woken now: %s", error)
    gates.look_after(settings, node)


def plan(waiting: Sequence[Delayed], free: Sequence[Room], settings: Settings, now: float) -> Iterator[Delayed]:
    """Those to be woken, in this order, each with its place: one that is neither taken nor kept for another.

    Gated ones only when they have waited too long: the others begin by themselves where a gate is open, as does who
    comes first then, and a place that is kept for one of them would only have another be put back.
    """
    held = [place for job in waiting if (place := job.held)]
    for job in ranked(waiting, free, settings, now):
        if _is_woken(job, now) or job.wakes >= MOST_WAKES or (job.gated and not _is_aged(job, settings, now)):
            continue
        others = [place for place in held if place.owner != job.owner]
        choice = _place(job, free, others, settings)
        if choice:
            job = job.holding(choice.gpu_uuid, choice.placement, choice.takes_mib)  # noqa: PLW2901
            held = [*others, Held(choice.gpu_uuid, choice.placement, job.owner, choice.takes_mib)]
            yield job


def ranked(waiting: Sequence[Delayed], free: Sequence[Room], settings: Settings, now: float) -> list[Delayed]:
    """Those that have waited too long, oldest first; then the largest, and of one size the oldest."""

    def rank(job: Delayed) -> tuple[bool, int, float]:
        aged = _is_aged(job, settings, now)
        return not aged, 0 if aged else -_size(job, free, settings), job.first

    return sorted(waiting, key=rank)


def keep_places(waiting: Sequence[Delayed], free: Sequence[Room], settings: Settings, now: float) -> list[Delayed]:
    """The same jobs, those that have waited too long each with a place that nothing else may begin in.

    The oldest first, and no more than half as many as there are GPUs, so that all others find places too. It is the
    place with the least in it now, and it stays the same: what is in it ends.
    """
    kept: list[Delayed] = []
    held = [place for job in waiting if _is_woken(job, now) and (place := job.held)]
    left = max(1, len(free) // 2)
    open_rooms = {room.gpu.uuid: room for room in free if not room.closed}
    for job in sorted(waiting, key=lambda job: job.first):
        if _is_woken(job, now):
            kept.append(job)
            continue
        mine: Held | None = None
        if _is_aged(job, settings, now) and job.wakes < MOST_WAKES and left:
            mine = job.held if job.gpu_uuid in open_rooms else None
            if mine is None or any(_collide(mine, other) for other in held):
                mine = _emptiest(job, list(open_rooms.values()), held, settings)
        if mine:
            left -= 1
            held.append(mine)
        kept.append(job.holding(mine.gpu_uuid, mine.placement, mine.takes_mib) if mine else job.holding_nothing())
    return kept


def _wake(settings: Settings, node: str) -> None:
    store = Store(settings, machine.boot_id(settings.simulator))
    free = operate(settings, lambda allocator: allocator.rooms(allocator.look(), store.read()))
    asked: set[int] = set()
    while True:
        now = time.time()
        with delayed.changing(settings) as waiting:
            for job in keep_places(waiting.jobs, free, settings, now):
                waiting.put(job)
            candidates = [job for job in waiting.jobs if job.job_id not in asked or job.held]
            chosen = next((job for job in plan(candidates, free, settings, now) if job.job_id not in asked), None)
            if chosen is None:
                return
            # Before it is told, so that nobody else wakes another one for its hole.
            chosen = replace(chosen, woken=now, wakes=chosen.wakes + 1)
            waiting.put(chosen)
        asked.add(chosen.job_id)
        _tell(settings, chosen, node)


def _tell(settings: Settings, job: Delayed, node: str) -> None:
    seen = controller.seen(job.job_id)
    changed: Delayed | None = None
    if seen and _waits(job, seen):
        if seen.state == "PENDING":
            begin = max(time.time(), seen.submitted + controller.pause_s())
            if seen.eligible > begin:
                if job.gated and begin <= time.time():
                    # Before it is looked at. One that may not begin yet is let in by a later pass.
                    _publish(settings, node)
                begin = controller.start_at(job.reference, begin, seen.admin_comment)
                log.info("woke job %s, which has waited %.0f s for %s",
                         job.reference, time.time() - job.first, job.request)  # fmt: skip
                changed = replace(job, begin=int(begin), woken=begin)
            else:
                changed = replace(job, woken=max(job.woken, seen.eligible))
        else:
            # Its epilog is not over yet, and would put the begin time off again.
            changed = replace(job.holding_nothing(), woken=0.0, wakes=job.wakes - 1)
    with delayed.changing(settings) as current:
        # Unless it was delayed anew since we looked.
        if current.get(job.job_id) == job:
            current.drop(job.job_id)
            if changed:
                current.put(changed)


def _publish(settings: Settings, node: str) -> None:
    # An import that is paid only where it is used.
    if settings.admission == "gates":
        from gres_mig_slurm import gates

        gates.publish(settings, node)


def _waits(job: Delayed, seen: Seen | None) -> bool:
    """Whether it is still the job that this node delayed, and not one whose user said when it may begin."""
    if seen is None or seen.state not in ("PENDING", "COMPLETING"):
        return False
    if seen.state == "COMPLETING" or seen.eligible <= time.time():
        return True
    # Slurm's own delay comes instead of ours when the epilog outlasts ours (22.05).
    return seen.eligible in (job.begin, seen.given_begin, seen.submitted + slurm_conf.requeue_delay_s())


def _is_woken(job: Delayed, now: float) -> bool:
    return job.woken > 0 and now - job.woken <= PATIENCE_S


def _is_aged(job: Delayed, settings: Settings, now: float) -> bool:
    return now - job.first > settings.aged_s


def _place(job: Delayed, free: Sequence[Room], held: Sequence[Held], settings: Settings) -> Choice | None:
    try:
        return rooms.best(rooms.without(tuple(free), {}, held), job.request, settings)
    except GresMigError:
        return None


def _size(job: Delayed, free: Sequence[Room], settings: Settings) -> int:
    sizes = (tiers[0][0].memory_mib for room in free if (tiers := placement.tiers(room.gpu, job.request, settings)))
    # A slice is of any size.
    return min(sizes, default=job.memory_mib)


def _emptiest(job: Delayed, free: Sequence[Room], held: Sequence[Held], settings: Settings) -> Held | None:
    places = [
        ((room.taken & place.mask).bit_count(), room.taken.bit_count(), room.gpu.index, place, room.gpu.uuid)
        for room in free
        if (tiers := placement.tiers(room.gpu, job.request, settings))
        for profile in tiers[0]
        for place in profile.placements
        if not any(_collide(Held(room.gpu.uuid, place, ""), other) for other in held)
    ]
    if places:
        *_, where, gpu_uuid = min(places)
        return Held(gpu_uuid, where, job.owner)
    taken_mib: dict[str, int] = {}
    for other in held:
        taken_mib[other.gpu_uuid] = taken_mib.get(other.gpu_uuid, 0) + other.takes_mib
    choice = slices.emptiest(rooms.without(tuple(free), {}, held), taken_mib, job.request, settings)
    return Held(choice.gpu_uuid, choice.placement, job.owner, choice.takes_mib) if choice else None


def _collide(one: Held, other: Held) -> bool:
    return one.gpu_uuid == other.gpu_uuid and one.placement.overlaps(other.placement)

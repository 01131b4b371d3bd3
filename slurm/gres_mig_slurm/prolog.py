"""Slurm's Prolog for a job that asked for migmem: an instance, or whose turn it is to do something."""

from __future__ import annotations

import sys
import time

from gres_mig import log, machine
from gres_mig.deadline import operate
from gres_mig.errors import Fault, GresMigError, NodeFault
from gres_mig.making import Ended
from gres_mig.models import Allocation, Request, Settings
from gres_mig.state import Store
from gres_mig_slurm import delayed, handover, hook
from gres_mig_slurm import job as jobs
from gres_mig_slurm.delayed import Delayed
from gres_mig_slurm.hook import Hook
from gres_mig_slurm.job import Job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gres_mig.allocator import Allocator

SHORTEST_DELAY_S, LONGEST_DELAY_S = 5, 600
_SOON = 5
"""How often a job with a gate is tried again so soon: whom its gate does not stop goes on as all others do."""


def prepare(mine: Hook, rows: str) -> int:
    """Hand the job of those squeue rows its instance, or say what became of it; the exit code for the shell part."""
    job = jobs.parse(rows, mine.job_id)
    if job is None:
        # Other tasks of its array were listed, and it was not.
        handover.write(mine.handover, mine.job_id, mine.node, handover.unknown())
        return 0
    try:
        try:
            _hand_over(mine, job)
        except GresMigError as error:
            if error.fault is Fault.NODE:
                raise
            _without(mine, job, error)
        return 0
    except Exception as error:  # noqa: BLE001 - a fault of ours is the node's, and the job has to go on elsewhere
        return _at_fault(mine, job, hook.as_fault(error))


def delay_s(job: Job) -> int:
    """How long a job without a place waits before it is tried again, if it is not woken; three times as long each time.

    Soon at first, for another node may have a place; later it is this node that knows when it has one.
    """
    tripled: int = SHORTEST_DELAY_S * 3 ** min(job.restarts, 10)
    return min(tripled, LONGEST_DELAY_S)


def _hand_over(mine: Hook, job: Job) -> None:
    wanted = jobs.request(job)
    if wanted is None:
        handover.write(mine.handover, mine.job_id, mine.node, handover.none())
        return
    allocation = _allocate(mine, job, wanted)
    lines = handover.given(allocation, told_by="batch" if job.batch_host == mine.node else "step")
    handover.write(mine.handover, mine.job_id, mine.node, lines)


def _allocate(mine: Hook, job: Job, wanted: Request) -> Allocation:
    settings = mine.settings()
    owner = mine.owner(uid=job.uid, submitted=job.submitted)
    records = Store(settings, machine.boot_id(settings.simulator)).read().records
    # Of a run whose epilog never came: the node died, or the job was started again without it.
    left = {r.owner for r in records if r.owner.name == owner.name and r.owner != owner}

    def work(allocator: Allocator) -> Allocation:
        for old in left:
            allocator.reclaim(old, begin=mine.begin)
        return allocator.allocate(owner, wanted, begin=mine.begin).allocation

    allocation = hook.within_limit(lambda: operate(settings, work, held=delayed.held(settings)))
    delayed.forget(settings, job.job_id)
    _publish(mine, settings)
    return allocation


def _without(mine: Hook, job: Job, error: GresMigError) -> None:
    if isinstance(error, Ended):
        # Its epilog has been here already; a requeue would bring a cancelled job back.
        log.info("%s", error)
        handover.remove(mine.handover, mine.job_id, mine.node)
    elif error.fault is Fault.REQUEST:
        log.info("%s on %s fails: %s", job, mine.node, error)
        handover.write(mine.handover, mine.job_id, mine.node, handover.failed(str(error)))
    else:
        _put_back(mine, job, str(error), jobs.request(job))


def _at_fault(mine: Hook, job: Job, error: NodeFault) -> int:
    drained = hook.tell_fault(mine, error)
    still_there = _put_back(mine, job, f"{mine.node} cannot make GPU instances: {error.message}")
    # For a job that its user has cancelled meanwhile, exit code 1 would have slurmd start it again, or report the
    # fault anew every 15 s and so drain the node again after an admin has put it right (22.05).
    return hook.NODE_FAULT if still_there or not drained else 0


def _put_back(mine: Hook, job: Job, why: str, wanted: Request | None = None) -> bool:
    """Queue this run again, or end it where somebody waits at a terminal; either way nothing of it starts here.

    Without `wanted`, which is what this node has no place for now, the node is at fault; then Slurm itself ends what
    cannot be queued. False when the controller says that the run has ended already.
    """
    from gres_mig_slurm import controller

    handover.write(mine.handover, mine.job_id, mine.node, handover.failed(why))
    try:
        if not job.batch:
            (controller.notify_and_cancel if wanted else controller.notify)(job, f"gres-mig: {why}")
            log.info("%s on %s is cancelled: %s", job, mine.node, why)
            return True
        controller.requeue(job)
        # Behind a gate it begins once a node says that it has a place, this one or another.
        soon = wanted and job.gated and job.restarts < _SOON
        begin = controller.delay(job, SHORTEST_DELAY_S if soon else delay_s(job))
        log.info("%s on %s is tried again in %.0f s: %s", job, mine.node, begin - time.time(), why)
        if wanted:
            _remember(mine, job, wanted, begin)
    except GresMigError as error:
        # Its tasks, if it has any yet, fail with the text of the hand-over.
        log.warning("%s on %s was not put back: %s", job, mine.node, error)
        return not isinstance(error, controller.Refused)
    return True


def _remember(mine: Hook, job: Job, wanted: Request, begin: int) -> None:
    settings, owner, since = mine.settings(), str(mine.owner()), time.time()
    gated = job.gated and settings.admission == "gates"
    if gated:
        from gres_mig_slurm import gates

        since = min(since, max(job.submitted, gates.closed_since(settings, wanted)))
    waiting = Delayed(
        job.job_id, job.reference, owner, wanted.memory_mib, wanted.profile, first=since, begin=begin,
        isolation=wanted.isolation, gated=gated,
    )  # fmt: skip
    delayed.put_back(settings, waiting)
    # The controller may know of gates that are open what was so before it was restarted.
    _publish(mine, settings, anew=True)


def _publish(mine: Hook, settings: Settings, *, anew: bool = False) -> None:
    """Say for which sizes this node has a place now; no job waits for that."""

    def tell() -> None:
        from gres_mig_slurm import gates

        gates.publish(settings, mine.node, anew=anew)

    if settings.admission == "gates":
        hook.apart(tell)


if __name__ == "__main__":
    hook.run("prolog", lambda: prepare(hook.from_arguments(sys.argv[1:]), sys.stdin.read()))

"""Slurm's Epilog for a job that may hold an instance: gives it back, or records that it has to be."""

from __future__ import annotations

import sys

from gres_mig import log, machine
from gres_mig.deadline import operate
from gres_mig.errors import GresMigError
from gres_mig.models import Settings
from gres_mig.state import Store
from gres_mig_slurm import delayed, handover, hook
from gres_mig_slurm.hook import Hook


def clean_up(mine: Hook) -> int:
    """Give back what the job got on this node; the exit code for the shell part.

    Whatever the hardware does, it is done once the end of the job is recorded: the rest is retried until it is gone.
    """
    try:
        settings = mine.settings()
        _give_back(mine, settings)
        handover.remove(mine.handover, mine.job_id, mine.node)
    except Exception as error:  # noqa: BLE001 - whatever it was, nobody knows whether the job's end was recorded
        hook.tell_fault(mine, hook.as_fault(error))
        return hook.NODE_FAULT
    if delayed.is_any(settings) or settings.admission == "gates":
        _tell_others(mine, settings)
    return 0


def _give_back(mine: Hook, settings: Settings) -> None:
    owner = mine.owner()
    try:
        outcomes = hook.within_limit(
            lambda: operate(settings, lambda allocator: allocator.reclaim(owner, begin=mine.begin))
        )
    except GresMigError as error:
        if not _recorded(mine, settings):
            raise
        log.warning("job %d on %s: recorded, not given back yet: %s", mine.job_id, mine.node, error)
        return
    for outcome in outcomes:
        if outcome.verdict in ("stuck", "waiting"):
            place = f"{outcome.record.placement} of {outcome.record.gpu_uuid}"
            log.warning("%s at %s is %s: %s", owner, place, outcome.verdict, outcome.reason)


def _recorded(mine: Hook, settings: Settings) -> bool:
    state = Store(settings, machine.boot_id(settings.simulator)).read()
    return state.ended(mine.owner()) >= mine.begin


def _tell_others(mine: Hook, settings: Settings) -> None:
    # An import that is paid only where a job may wait.
    from gres_mig_slurm import wake

    def tell() -> None:
        # Before Slurm counts this job's share as free, so that nobody is let in by that alone.
        wake.after_release(settings, mine.node)
        wake.put_off(settings, mine.job_id)

    try:
        hook.within_limit(tell, hook.TELL_S)
    except Exception as error:  # noqa: BLE001 - what this job had is given back; the others begin by themselves later
        log.warning("delayed jobs are not woken now: %s", hook.as_fault(error))


if __name__ == "__main__":
    hook.run("epilog", lambda: clean_up(hook.from_arguments(sys.argv[1:])))

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
        try:
            owner = mine.owner()
            outcomes = hook.within_limit(
                lambda: operate(settings, lambda allocator: allocator.reclaim(owner, begin=mine.begin))
            )
            for outcome in outcomes:
                if outcome.verdict in ("stuck", "waiting"):
                    log.warning("%s at %s of %s is %s: %s", owner, outcome.record.placement,
                                outcome.record.gpu_uuid, outcome.verdict, outcome.reason)  # fmt: skip
        except GresMigError as error:
            if not _recorded(mine, settings):
                raise
            log.warning("job %d on %s: recorded, not given back yet: %s", mine.job_id, mine.node, error)
        handover.remove(mine.handover, mine.job_id, mine.node)
        if delayed.is_any(settings):
            # An import that is paid only then.
            from gres_mig_slurm import wake

            hook.within_limit(lambda: wake.after_release(settings), hook.TELL_S)
    except GresMigError as error:
        hook.tell_fault(mine, error)
        return hook.NODE_FAULT
    return 0


def _recorded(mine: Hook, settings: Settings) -> bool:
    state = Store(settings, machine.boot_id(settings.simulator)).read()
    return state.ended(mine.owner()) >= mine.begin


if __name__ == "__main__":
    hook.run("epilog", lambda: clean_up(hook.from_arguments(sys.argv[1:])))

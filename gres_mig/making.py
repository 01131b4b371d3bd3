"""Makes the instance of one intent, every step under the GPU's lock and looked at again."""

from __future__ import annotations

import time
from collections.abc import Callable

from gres_mig import log
from gres_mig.access import Access
from gres_mig.errors import Busy, NoCapacity, NodeFault
from gres_mig.models import Allocation, Gpu, Instance, Intent, Owner, Record, Release, Settings
from gres_mig.nvml import IN_USE, INSUFFICIENT_RESOURCES, DriverError, Refused, Session
from gres_mig.settle import Settler, as_release
from gres_mig.state import Store
from gres_mig.values import replace

Guard = Callable[[Gpu, Instance], str]
"""Runs between compute instance and commit, with the GPU's lock held; returns what isolates the owner, or raises."""


def environment_only(gpu: Gpu, instance: Instance) -> str:
    """The guard that locks nothing: the owner is told its instance, nothing keeps others off it."""
    return "env"


class Ended(NoCapacity):
    """The owner's work ended while its instance was being made; nothing is held."""

    code = "ENDED"


def ended_meanwhile(owner: Owner) -> Ended:
    """The answer to an ask whose owner's end came in between."""
    return Ended(f"{owner} was ended while its instance was being made")


class ChooseAgain(Exception):
    """What was chosen does not hold any more."""


class Maker:
    """Turns intents into allocations."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        access: Access,
        settler: Settler,
        guard: Guard,
        wanted: Callable[[], bool],
    ) -> None:
        self._settings, self._store, self._access, self._settler = settings, store, access, settler
        self._guard, self._wanted = guard, wanted

    def make(self, intent: Record, deadline: float) -> Allocation:
        """The allocation; after any failure nothing of it is left, or a release is that keeps its place.

        Raises `ChooseAgain` when the place is gone, `Ended` when the owner is, `DriverError`, and `Busy` when
        the GPU's lock (until `deadline`, monotonic seconds) or its clients kept it.
        """
        assert isinstance(intent, Intent)
        try:
            with self._access.locked(intent.gpu_uuid, deadline):
                return self._make_when_unused(intent)
        except BaseException:
            with self._store.transaction() as node:
                record = node.state.get(intent.nonce)
                if isinstance(record, Intent) and not record.creating:
                    node.save(node.state.without(intent.nonce), giving_back=True)
            raise

    def _make_when_unused(self, intent: Intent) -> Allocation:
        deadline, pause = time.monotonic() + self._settings.in_use_limit_s, 0.02
        while True:
            try:
                with self._access.session(intent.gpu_uuid, intent) as (driver, gpu):
                    self._mark_creating(intent, gpu)
                    return self._create(driver, gpu, intent)
            except Refused as error:
                again = error.nvml_code == IN_USE and time.monotonic() < deadline
                self._unmark_creating(intent, again)
                if not again and error.nvml_code == IN_USE:
                    raise Busy(error.message) from error
                if not again:
                    raise
            # No session of ours is open here: one of its own kept a manager from creating (HAMi issue 1088).
            time.sleep(pause)
            pause = min(pause * 2, 0.5)

    def _mark_creating(self, intent: Intent, gpu: Gpu) -> None:
        with self._store.transaction() as node:
            record = node.state.get(intent.nonce)
            if record is None:
                raise ChooseAgain
            if not isinstance(record, Intent) or node.state.ended(intent.owner) > intent.begin:
                raise ended_meanwhile(intent.owner)
            if any(instance.placement.overlaps(intent.placement) for instance in gpu.instances):
                raise ChooseAgain
            node.save(node.state.put(replace(record, creating=True)))

    def _unmark_creating(self, intent: Intent, again: bool) -> None:
        # Nothing was made, so there is nothing to settle: what another process made of the intent goes with it.
        with self._store.transaction() as node:
            record = node.state.get(intent.nonce)
            if again and isinstance(record, Intent):
                node.save(node.state.put(replace(record, creating=False)))
            elif record is not None and not again:
                node.save(node.state.without(intent.nonce), giving_back=True)

    def _create(self, driver: Session, gpu: Gpu, intent: Intent) -> Allocation:
        try:
            instance = driver.create_gpu_instance(gpu, intent.profile_id, intent.placement)
        except Refused:
            raise
        except NodeFault:
            # It may have been made all the same; only a look tells, and a bare one needs its grace.
            self._give_back(driver, intent, None)
            raise
        try:
            self._record_gpu_instance(intent, instance)
            compute = driver.create_compute_instance(instance)
            instance = replace(instance, compute_instances=(compute,))
            return self._commit(intent, instance, intent.slice or self._guard(gpu, instance))
        except BaseException as error:
            self._give_back(driver, intent, instance)
            if isinstance(error, DriverError) and error.nvml_code in (IN_USE, INSUFFICIENT_RESOURCES):
                # Somebody else got into it, which is no fault of the node.
                raise Busy(error.message) from error
            raise

    def _record_gpu_instance(self, intent: Intent, instance: Instance) -> None:
        with self._store.transaction() as node:
            record = node.state.get(intent.nonce)
            if record is None:
                raise ended_meanwhile(intent.owner)
            assert isinstance(record, (Intent, Release))
            # The compute instance may be there from here on, for a crash may come between it and the commit.
            node.save(node.state.put(replace(record, gi_id=instance.id, ci=True)), giving_back=True)
            if isinstance(record, Release):
                raise ended_meanwhile(intent.owner)

    def _commit(self, intent: Intent, instance: Instance, isolation: str) -> Allocation:
        (compute,) = instance.compute_instances
        with self._store.transaction() as node:
            record = node.state.get(intent.nonce)
            if not isinstance(record, Intent) or node.state.ended(intent.owner) > intent.begin:
                raise ended_meanwhile(intent.owner)
            if not self._wanted():
                raise Ended(f"nobody waits for the instance of {intent.owner} any more")
            allocation = Allocation(
                **{name: getattr(record, name) for name in Record.field_names()},
                gi_id=instance.id,
                ci_id=compute.id,
                mig_uuid=compute.mig_uuid,
                isolation=isolation,
                variables=compute.variables,
            )
            node.save(node.state.put(allocation))
        log.info("allocated %s (%s) to %s", compute.mig_uuid, intent.profile_name, intent.owner)
        return allocation

    def _give_back(self, driver: Session, intent: Intent, instance: Instance | None) -> None:
        with self._store.transaction() as node:
            release = as_release(node.state.get(intent.nonce) or replace(intent, creating=True))
            if instance is not None:
                release = replace(release, gi_id=instance.id, ci=True)
            node.save(node.state.put(replace(release, creating=True)), giving_back=True)
        self._settler.settle(driver, intent.nonce)

"""The only code that destroys: a release is judged against the hardware, then undone step by step."""

from __future__ import annotations

import time
from collections.abc import Callable

from gres_mig import log, machine
from gres_mig.errors import Busy, NodeFault, StateError
from gres_mig.models import Allocation, Gpu, Instance, Intent, Record, Release, Settings, State, Stuck
from gres_mig.nvml import IN_USE, DriverError, Session
from gres_mig.state import Store
from gres_mig.values import Value, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    Verdict = Literal["released", "gone", "foreign", "stuck", "waiting", "lost"]
    """released: destroyed and seen to be gone · gone: nothing of ours was there · foreign: what is there is not ours,
    left alone · stuck: recorded, its slices withheld · waiting: a bare instance, destroyed when it is seen bare again ·
    lost: the owner lives, the hardware is gone."""

_LONGEST_BACK_OFF_S = 60.0


class Outcome(Value):
    """What became of one record."""

    record: Record
    verdict: Verdict
    reason: str = ""


def as_release(record: Record) -> Release:
    """The record as being given back; whatever is known of the hardware is kept, for it decides what is ours."""
    if isinstance(record, Release):
        return record
    shared = {name: getattr(record, name) for name in Record.field_names()}
    if isinstance(record, Intent):
        return Release(**shared, creating=record.creating, gi_id=record.gi_id, ci=record.ci)
    assert isinstance(record, Allocation)
    return Release(**shared, creating=True, gi_id=record.gi_id, ci=True, mig_uuid=record.mig_uuid)


def at(gpu: Gpu, record: Record) -> Instance | None:
    """The instance of exactly the record's profile and placement, if the hardware has one."""
    if gpu.mig_current and gpu.profile(record.profile_id) is None:
        # Instances are listed by profile: of one that is not shown nobody can say that it is gone.
        raise NodeFault(f"{gpu.uuid} does not show profile {record.profile_name} of {record.owner} any more")
    return next(
        (i for i in gpu.instances if i.profile_id == record.profile_id and i.placement == record.placement), None
    )


def matches(instance: Instance | None, record: Allocation) -> bool:
    """Whether that instance is the very one of the allocation."""
    return (
        instance is not None
        and instance.id == record.gi_id
        and any((c.id, c.mig_uuid) == (record.ci_id, record.mig_uuid) for c in instance.compute_instances)
    )


def nobody_can_tell(record: Record) -> bool:
    """Whether it is a stuck release that does not know which instance it made, if any."""
    return isinstance(record, Release) and record.stuck is not None and (record.gi_id is None or not record.ci)


def is_due(stuck: Stuck, now: float) -> bool:
    """Whether it is time to try again; further ahead than the longest pause means that the clock was set back."""
    return not 0 < stuck.next_try - now <= _LONGEST_BACK_OFF_S


class Settler:
    """Settles releases of one GPU, whose lock the caller holds; `tell` hears of each before its instance goes."""

    def __init__(
        self, store: Store, settings: Settings, boot_id: str, clock: Callable[[], float], tell: Callable[[str], None]
    ) -> None:
        self._store, self._settings, self._boot_id, self._clock, self._tell = store, settings, boot_id, clock, tell

    def settle(self, driver: Session, nonce: str) -> Outcome | None:
        """Undo the release of that nonce as far as the hardware lets it; None when there is none to undo."""
        record = self._store.read().get(nonce)
        if not isinstance(record, Release):
            return None
        try:
            gpu = driver.gpu(record.gpu_uuid)
            found = at(gpu, record)
        except StateError:
            raise
        except NodeFault as error:
            return self.mark_stuck(nonce, error.message)
        # Before anything goes: the next instance may have the same id, and an exporter reads at any moment.
        self._tell(record.gpu_uuid)
        judged = self._judge(nonce, found)
        if judged != "ours":
            return judged
        assert found is not None
        try:
            return self._undo(driver, gpu, nonce, found)
        except DriverError as error:
            return self.mark_stuck(nonce, error.message)

    def mark_stuck(self, nonce: str, reason: str, holders: tuple[str, ...] = ()) -> Outcome | None:
        """Record that the hardware did not let go; tried again with growing pauses."""
        with self._store.transaction() as node:
            record = node.state.get(nonce)
            if not isinstance(record, Release):
                return None
            now = self._clock()
            tries = record.stuck.tries + 1 if record.stuck else 1
            pause = min(_LONGEST_BACK_OFF_S, 2.0 ** (tries - 1))
            since = record.stuck.since if record.stuck else now
            stuck = replace(record, stuck=Stuck(since, tries, now + pause, holders or (reason,)))
            node.save(node.state.put(stuck), giving_back=True)
        if tries == 1:
            log.warning("stuck: %s of %s at %s of %s: %s",
                        record.profile_name, record.owner, record.placement, record.gpu_uuid, reason)  # fmt: skip
        return Outcome(stuck, "stuck", "; ".join(holders) or reason)

    def destroy_foreign(self, driver: Session, gpu: Gpu, instance: Instance) -> None:
        """Destroy what an admin named and no record does; `Busy` with the holders when it does not go."""
        reason = ""
        for compute in instance.compute_instances:
            reason = self._try(driver.destroy_compute_instance, instance, compute) or reason
        left = self._look(driver, gpu, instance)
        if left is not None and left.bare:
            reason = self._try(driver.destroy_gpu_instance, left) or reason
            left = self._look(driver, gpu, left)
        if left is not None:
            holders = who_holds(driver, self._settings, gpu, left)
            raise Busy(
                f"GPU instance {instance.id} of {gpu.uuid} does not go: {reason or 'it is still there'}",
                hint="held by " + ", ".join(holders) if holders else "",
                blockers=holders,
            )

    def _judge(self, nonce: str, found: Instance | None) -> Outcome | Literal["ours"] | None:
        """Whether what was found is ours to destroy, else what it is instead; None when no record tells any more."""
        with self._store.transaction() as node:
            record = node.state.get(nonce)
            if not isinstance(record, Release):
                return None
            if found is None or not record.creating or record.boot_id != self._boot_id or _taken(node.state, record):
                return self._forget(node.save, node.state, record, "gone")
            if record.gi_id is not None and record.ci:
                uuids = {compute.mig_uuid for compute in found.compute_instances}
                ours = found.id == record.gi_id and (found.bare or record.mig_uuid in ({""} | uuids))
                if not ours:
                    return self._forget(node.save, node.state, record, "foreign")
            elif not found.bare:
                # Where we know of no compute instance, one that has it was made by somebody else.
                return self._forget(node.save, node.state, record, "foreign")
            elif waiting := self._not_yet(record):
                node.save(node.state.put(waiting), giving_back=True)
                reason = "a bare instance is there; nothing says whose"
                return Outcome(waiting, "stuck" if waiting.stuck else "waiting", reason)
            if found.bare and record.ci:
                node.save(node.state.put(replace(record, ci=False)), giving_back=True)
        return "ours"

    def _not_yet(self, record: Release) -> Release | None:
        """The record to keep while a bare instance under it must not be destroyed yet; None when it may."""
        now = self._clock()
        if self._settings.bare == "quarantine":
            stuck = record.stuck or Stuck(now, 1, now, ("a bare instance; adopt or reclaim it by hand",))
            return replace(record, stuck=replace(stuck, next_try=now + _LONGEST_BACK_OFF_S))
        if not record.bare_since or record.bare_since > now:
            return replace(record, bare_since=now)
        return record if now - record.bare_since < self._settings.bare_grace_s else None

    def _undo(self, driver: Session, gpu: Gpu, nonce: str, found: Instance) -> Outcome | None:
        # Return codes decide nothing in here, only the look afterwards: a destroy that "succeeded" left remnants
        # listed on an H100 (go-nvml issue 146).
        reason = ""
        if not found.bare:
            for compute in found.compute_instances:
                reason = self._try(driver.destroy_compute_instance, found, compute) or reason
            left = self._look(driver, gpu, found)
            with self._store.transaction() as node:
                record = node.state.get(nonce)
                if not isinstance(record, Release):
                    return None
                if left is None:
                    return self._forget(node.save, node.state, record, "released")
                if left.bare:
                    record = replace(record, ci=False, gi_id=left.id)
                    node.save(node.state.put(record), giving_back=True)
            if not left.bare:
                return self._hold(driver, gpu, nonce, left, reason)
            found = left
        reason = self._try(driver.destroy_gpu_instance, found) or reason
        left = self._look(driver, gpu, found)
        if left is not None and left.bare:
            return self._hold(driver, gpu, nonce, left, reason)
        with self._store.transaction() as node:
            record = node.state.get(nonce)
            if not isinstance(record, Release):
                return None
            return self._forget(node.save, node.state, record, "released" if left is None else "foreign")

    def _try(self, destroy: Callable[..., None], *what: object) -> str:
        deadline = time.monotonic() + self._settings.in_use_limit_s
        pause = 0.02
        while True:
            try:
                destroy(*what)
                return ""
            except DriverError as error:
                if error.nvml_code != IN_USE or time.monotonic() >= deadline:
                    return error.message
                # A client that was killed a moment ago may still be on its way out.
                time.sleep(pause)
                pause = min(pause * 2, 0.5)

    def _look(self, driver: Session, gpu: Gpu, like: Instance) -> Instance | None:
        now = driver.refresh(gpu)
        return next(
            (i for i in now.instances if i.profile_id == like.profile_id and i.placement == like.placement), None
        )

    def _hold(self, driver: Session, gpu: Gpu, nonce: str, left: Instance, reason: str) -> Outcome | None:
        reason = reason or "the driver said it was destroyed, yet it is still there"
        return self.mark_stuck(nonce, reason, who_holds(driver, self._settings, gpu, left))

    def _forget(
        self, save: Callable[..., State], state: State, record: Release, verdict: Literal["released", "gone", "foreign"]
    ) -> Outcome:
        save(state.without(record.nonce), giving_back=True)
        log.info("%s: %s of %s at %s of %s",
                 verdict, record.profile_name, record.owner, record.placement, record.gpu_uuid)  # fmt: skip
        return Outcome(record, verdict)


def who_holds(driver: Session, settings: Settings, gpu: Gpu, instance: Instance) -> tuple[str, ...]:
    """The processes that keep an instance in use, as `pid 4711 python3 (alice)`."""
    root = settings.simulator or "/"
    card, *capabilities = machine.device_nodes(gpu.minor, instance.id, (c.id for c in instance.compute_instances), root)
    pids = {p.pid for p in machine.holders(capabilities)} | set(driver.users(instance))
    if pids:
        return tuple(machine.describe(pid) for pid in sorted(pids))
    # The card's own node is open in every client of the card, the neighbours' too: better than nothing.
    return tuple(f"perhaps {machine.describe(p.pid)}" for p in machine.holders([card]))


def _taken(state: State, record: Release) -> bool:
    return any(
        other.nonce != record.nonce
        and other.gpu_uuid == record.gpu_uuid
        and not isinstance(other, Release)
        and other.placement.overlaps(record.placement)
        for other in state.records
    )

"""Allocate, reclaim, adopt, reconcile: record, do, record, and every step looks again.

The order of steps is the one that was model-checked (docs/design.md, Protocol); change it only with a new search.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gres_mig import log, machine, placement, rooms
from gres_mig.access import Access
from gres_mig.errors import BadRequest, Busy, Conflict, GresMigError, NoCapacity, NodeFault, StateError
from gres_mig.making import ChooseAgain, Ended, Guard, Maker, ended_meanwhile, environment_only
from gres_mig.models import (
    Allocation,
    Fence,
    Gpu,
    Instance,
    Intent,
    Owner,
    Process,
    Profile,
    Record,
    Release,
    Request,
    Settings,
    State,
)
from gres_mig.nvml import INSUFFICIENT_RESOURCES, Refused, Session
from gres_mig.rooms import Held
from gres_mig.settle import Outcome, Settler, as_release, at, is_due, matches, nobody_can_tell
from gres_mig.state import Store
from gres_mig.values import Value, replace
from gres_mig.witnesses import witnesses_alive

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_RECONCILE_WAIT_S = 1.0


class Grant(Value):
    """An allocation, and whether this ask made it."""

    allocation: Allocation
    created: bool


class Allocator:
    """The operations of one node; safe among any number of processes, each of which may die at any moment.

    `alive` says whether a record's owner lives; None is unknown, which counts as alive. `wanted` says, just before the
    commit, whether the caller is still there. `watch` hears on which GPU hardware work begins, and "" when it is over,
    so that a caller can give up on a driver that does not return. `held` are places kept free for their owners.
    `limit` refuses what an owner may not have, under the node lock: what it is shown cannot change meanwhile.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        boot_id: str,
        *,
        alive: Callable[[Record], bool | None] = witnesses_alive,
        guard: Guard = environment_only,
        wanted: Callable[[], bool] = lambda: True,
        watch: Callable[[str], None] = lambda gpu_uuid: None,
        held: Sequence[Held] = (),
        limit: Callable[[State, Profile], None] = lambda state, profile: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings, self._store, self._boot_id, self._held, self._limit = settings, store, boot_id, held, limit
        self._alive, self._guard, self._wanted, self._clock = alive, guard, wanted, clock
        self.access = Access(settings, store, watch)
        self._settler = Settler(store, settings, boot_id, clock, self.access.tell)
        self._maker = Maker(settings, store, self.access, self._settler, guard, wanted)

    def look(self, *, everything: bool = False) -> tuple[Gpu, ...]:
        """The managed GPUs as they are now, or all GPUs of the node."""
        return self.access.look(everything=everything)

    def rooms(self, gpus: tuple[Gpu, ...], state: State) -> tuple[placement.Room, ...]:
        """The managed GPUs as the chooser sees them: taken is what the hardware or a record holds."""
        return tuple(rooms.room(gpu, state) for gpu in gpus if self._settings.manages(gpu))

    def allocate(self, owner: Owner, request: Request, *, begin: int = 0, witnesses: tuple[Process, ...] = ()) -> Grant:
        """The smallest instance that holds the request; the same one again for the same owner and request.

        `begin` is when the asking hook began (`machine.now_ns`): an ask from before the owner's end gets nothing.
        Raises what `placement.choose` raises, `Conflict` for another request, `Ended`, `Busy` or `NodeFault`.
        """
        begin = begin or machine.now_ns()
        deadline = time.monotonic() + self._settings.lock_wait_s
        failed: dict[str, GresMigError] = {}
        taken: list[Record | Held] = [place for place in self._held if place.owner != owner.name]
        seen, gpus = set[object](), self.look()
        # Every failure takes one GPU or one place out of the choice, so this ends by itself long before.
        for _ in range(4 + len(gpus) + sum(len(p.placements) for gpu in gpus for p in gpu.profiles)):
            try:
                record, new = self._reserve(owner, request, begin, witnesses, gpus, failed, taken, seen)
            except ChooseAgain:
                gpus = self.look()
                continue
            try:
                if not new:
                    return Grant(self._same_again(record, request, begin, witnesses, deadline), created=False)
                return Grant(self._maker.make(record, deadline), created=True)
            except ChooseAgain:
                pass
            except (Ended, StateError):
                raise
            except (NodeFault, Busy) as error:
                if not new:
                    raise
                log.warning("%s gets nothing on %s: %s", owner, record.gpu_uuid, error.message)
                if isinstance(error, Refused) and error.nvml_code == INSUFFICIENT_RESOURCES:
                    # There is no code for "occupied"; who took the place, the next look shows.
                    taken.append(record)
                else:
                    failed[record.gpu_uuid] = error
            gpus = self.look()
        raise Busy(f"no place for {request} held still long enough", hint="ask again")

    def reclaim(self, owner: Owner, *, begin: int = 0) -> tuple[Outcome, ...]:
        """Give back what the owner got from asks that began before `begin`; nothing there is success.

        It is recorded first, so an ask of the same owner that is still under way ends with nothing. An owner without
        a submit time means every job of that id.
        """
        begin = begin or machine.now_ns()
        with self._store.transaction() as node:
            old = [r for r in node.state.named(owner) if r.begin < begin]
            state = node.state.buried(owner, begin)
            for record in old:
                state = state.put(as_release(record))
            node.save(state, giving_back=True)
        # What somebody else has settled meanwhile, a pass of the service say, is gone as well.
        return tuple(self._settle(record, self._settings.lock_wait_s) or Outcome(record, "gone") for record in old)

    def adopt(self, owner: Owner, gpu_uuid: str, gi_id: int) -> Allocation:
        """Record an existing instance as that owner's; creates nothing, and says the same when asked again."""
        with self._locked(gpu_uuid) as (_, gpu):
            instance = rooms.instance(gpu, gi_id)
            if gpu.sliced:
                raise BadRequest(f"cannot adopt slice {gi_id} of {gpu_uuid}: nothing says whose processes use it")
            if len(instance.compute_instances) != 1:
                raise BadRequest(
                    f"cannot adopt GPU instance {gi_id} of {gpu_uuid}: it has {len(instance.compute_instances)} "
                    "compute instances, not one"
                )
            profile = gpu.profile(instance.profile_id)
            assert profile is not None
            (compute,) = instance.compute_instances
            isolation = self._guard(gpu, instance)
            with self._store.transaction() as node:
                for record in node.state.records:
                    if record.owner == owner or rooms.covers(record, instance):
                        if record.owner == owner and isinstance(record, Allocation) and matches(instance, record):
                            return record
                        raise Conflict(
                            f"cannot adopt GPU instance {gi_id} of {gpu_uuid} for {owner}: {record.owner} has "
                            f"{record.profile_name} at {record.placement} of {record.gpu_uuid}",
                            hint=f"run: gres-mig reclaim {record.owner}",
                            blockers=(str(record.owner),),
                        )
                if not self._wanted():
                    raise Ended(f"nobody waits for {owner} to have GPU instance {gi_id} of {gpu_uuid} any more")
                allocation = Allocation(
                    **self._new_record(owner, Request(profile.memory_mib), machine.now_ns(), ()),
                    gpu_uuid=gpu_uuid,
                    profile_id=profile.id,
                    profile_name=profile.name,
                    memory_mib=profile.memory_mib,
                    placement=instance.placement,
                    gi_id=gi_id,
                    ci_id=compute.id,
                    mig_uuid=compute.mig_uuid,
                    isolation=isolation,
                )
                node.save(node.state.put(allocation))
        log.info("adopted %s (%s) for %s", compute.mig_uuid, profile.name, owner)
        return allocation

    def reconcile(self, *, now: bool = False) -> tuple[Outcome, ...]:
        """Settle what crashes, ended owners and busy hardware left; any number may run at once.

        With `now`, stuck ones are tried at once, whenever their next try is due.
        """
        outcomes: list[Outcome | None] = []
        state = self._store.read()
        gpus = {gpu.uuid: gpu for gpu in self.look()} if state.records or state.distrusted else {}
        for record in state.records:
            # A GPU whose lock is held is left for the next time: one that hangs must not keep the others waiting.
            if isinstance(record, Release):
                if now or record.stuck is None or is_due(record.stuck, self._clock()):
                    outcomes.append(self._settle(record, _RECONCILE_WAIT_S))
            elif self._is_over(record):
                if self._mark_release(record):
                    outcomes.append(self._settle(record, _RECONCILE_WAIT_S))
            elif isinstance(record, Allocation) and not record.lost:
                gpu = gpus.get(record.gpu_uuid)
                if gpu and not gpu.trouble:
                    outcomes.append(self._mark_if_lost(record, gpu))
        if state.distrusted:
            self._regain_trust(tuple(gpus.values()))
        self.access.settle_mapping()
        if self._settings.slicing.gpus:
            from gres_mig import police

            police.patrol(self._store, self._settings, gpus.values(), self._clock())
        return tuple(outcome for outcome in outcomes if outcome)

    def reclaim_foreign(self, gpu_uuid: str, gi_id: int) -> Instance:
        """Destroy what no record names, because an admin said so; `Busy` when it is in use.

        A bare instance that is kept because nobody can tell whose it is (`bare = "quarantine"`) goes with its record.
        """
        with self._locked(gpu_uuid) as (driver, gpu):
            instance = rooms.instance(gpu, gi_id)
            covering = [r for r in self._store.read().records if rooms.covers(r, instance)]
            for record in covering:
                if not nobody_can_tell(record):
                    raise Conflict(
                        f"GPU instance {gi_id} of {gpu_uuid} is not foreign: it is recorded for {record.owner}",
                        hint=f"run: gres-mig reclaim {record.owner}",
                        blockers=(str(record.owner),),
                    )
            self._settler.destroy_foreign(driver, gpu, instance)
            with self._store.transaction() as node:
                for record in covering:
                    node.save(node.state.without(record.nonce), giving_back=True)
        log.info("destroyed foreign GPU instance %d of %s", gi_id, gpu_uuid)
        return instance

    def fence(self, gpu_uuid: str, reason: str) -> None:
        """Keep new work off a GPU until `unfence` or the next boot."""
        with self._store.transaction() as node:
            fences = {**node.state.fences, gpu_uuid: Fence(reason, self._clock())}
            node.save(replace(node.state, fences=fences), giving_back=True)
        log.warning("fenced %s: %s", gpu_uuid, reason)

    def unfence(self, gpu_uuid: str) -> bool:
        """Let a GPU take work again; False when it was not fenced, `Busy` while a process is still inside a call."""
        with self.access.locked(gpu_uuid, time.monotonic()), self._store.transaction() as node:
            fenced = gpu_uuid in node.state.fences
            fences = {uuid: fence for uuid, fence in node.state.fences.items() if uuid != gpu_uuid}
            node.save(replace(node.state, fences=fences))
        return fenced

    def _reserve(
        self,
        owner: Owner,
        request: Request,
        begin: int,
        witnesses: tuple[Process, ...],
        gpus: tuple[Gpu, ...],
        failed: dict[str, GresMigError],
        taken: Sequence[Record | Held],
        seen: set[object],
    ) -> tuple[Record, bool]:
        """The owner's record as it is, or a new intent at a place that neither hardware nor a record holds."""
        with self._store.transaction() as node:
            if node.state.ended(owner) > begin:
                raise ended_meanwhile(owner)
            for record in node.state.of(owner):
                # One that is stuck or on a fenced GPU answers no ask: a requeued job is not blocked by its own old
                # instance.
                held_up = isinstance(record, Release) and (record.stuck or record.gpu_uuid in node.state.fences)
                if not held_up:
                    return record, False
            left = rooms.without(self.rooms(gpus, node.state), failed, taken)
            try:
                choice = rooms.choose(left, request, self._settings, failed)
            except (NoCapacity, BadRequest):
                # What was given back since the look was taken refuses nobody, nor does what one look could not read.
                told = rooms.told(gpus, node.state)
                if told <= seen:
                    raise
                seen |= told
                raise ChooseAgain from None
            self._limit(node.state, choice.profile)
            intent = Intent(
                **self._new_record(owner, request, begin, witnesses),
                **choice.recorded(),
                maker=machine.this_process(),
            )
            node.save(node.state.put(intent), gpus=gpus)
        return intent, True

    def _same_again(
        self, held: Record, request: Request, begin: int, witnesses: tuple[Process, ...], deadline: float
    ) -> Allocation:
        """The owner's own instance, if it is there as recorded; what is left of another ask is settled first."""
        with self.access.locked(held.gpu_uuid, deadline), self.access.session(held.gpu_uuid) as (driver, gpu):
            with self._store.transaction() as node:
                record = node.state.get(held.nonce)
                if record is None:
                    raise ChooseAgain
                if node.state.ended(record.owner) > begin:
                    raise Ended(f"{record.owner} was ended while it asked")
                if isinstance(record, Allocation) and matches(at(gpu, record), record):
                    if record.request != request:
                        raise Conflict(
                            f"{record.owner} holds {record.profile_name} for {record.request}; it cannot also "
                            f"have {request}",
                            hint=f"run: gres-mig reclaim {record.owner}",
                            blockers=(str(record.owner),),
                        )
                    if begin >= record.begin:
                        # Whose life counts from here on: the newer run's, for the older one's may be over.
                        record = replace(record, begin=begin, witnesses=witnesses or record.witnesses)
                    node.save(node.state.put(record))
                    return record
                node.save(node.state.put(as_release(record)), giving_back=True)
            self._settler.settle(driver, held.nonce)
        left = self._store.read().get(held.nonce)
        if isinstance(left, Release) and left.stuck is None:
            raise Busy(f"what is left of an earlier ask of {held.owner} is not settled yet", hint="ask again")
        raise ChooseAgain

    def _settle(self, record: Record, wait_s: float) -> Outcome | None:
        try:
            deadline = time.monotonic() + wait_s
            with self.access.locked(record.gpu_uuid, deadline), self.access.session(record.gpu_uuid) as (driver, _):
                return self._settler.settle(driver, record.nonce)
        except Busy as error:
            # It stays a release; whoever reconciles next goes on with it.
            return Outcome(record, "waiting", error.message)
        except StateError:
            raise
        except GresMigError as error:
            return self._settler.mark_stuck(record.nonce, error.message)

    def _is_over(self, record: Record) -> bool:
        if isinstance(record, Intent):
            return not machine.alive(record.maker)
        # Of a young one a scheduler may not know yet; processes were there before it. A clock that was set back makes
        # nothing young again.
        young = not record.witnesses and 0 <= self._clock() - record.since < self._settings.young_s
        return not young and self._alive(record) is False

    def _mark_release(self, record: Record) -> bool:
        with self._store.transaction() as node:
            current = node.state.get(record.nonce)
            # All as it was judged: an intent may have become an allocation, whose maker has ended well, a new run of
            # the owner may have been given this instance, or its kernel was reported.
            if current is None or current != record:
                return False
            node.save(node.state.put(as_release(current)), giving_back=True)
        return True

    def _mark_if_lost(self, record: Allocation, seen: Gpu) -> Outcome | None:
        try:
            if matches(at(seen, record), record):
                return None
            with self._locked(record.gpu_uuid, _RECONCILE_WAIT_S) as (_, gpu), self._store.transaction() as node:
                current = node.state.get(record.nonce)
                if not isinstance(current, Allocation) or matches(at(gpu, current), current):
                    return None
                lost = replace(current, lost=True)
                node.save(node.state.put(lost), gpus=())
        except StateError:
            raise
        except (NodeFault, Busy):
            # Nobody can tell now; the next reconcile looks again, and the other records are not kept waiting.
            return None
        log.warning("lost: %s (%s) of %s is not on the hardware any more",
                    record.mig_uuid, record.profile_name, record.owner)  # fmt: skip
        return Outcome(lost, "lost", "the hardware is gone while its owner lives")

    def _regain_trust(self, gpus: tuple[Gpu, ...]) -> None:
        with self._store.transaction() as node:
            # On a GPU that could not be read may be anything.
            if not any(gpu.trouble or rooms.unnamed(gpu, node.state) for gpu in gpus):
                node.save(replace(node.state, distrusted=False))

    @contextmanager
    def _locked(self, gpu_uuid: str, wait_s: float | None = None) -> Iterator[tuple[Session, Gpu]]:
        deadline = time.monotonic() + (self._settings.lock_wait_s if wait_s is None else wait_s)
        with self.access.locked(gpu_uuid, deadline), self.access.session(gpu_uuid) as (driver, gpu):
            yield driver, gpu

    def _new_record(self, owner: Owner, request: Request, begin: int, witnesses: tuple[Process, ...]) -> dict[str, Any]:
        return {
            "nonce": os.urandom(8).hex(),
            "owner": owner,
            "request": request,
            "begin": begin,
            "boot_id": self._boot_id,
            "since": self._clock(),
            "witnesses": witnesses,
        }

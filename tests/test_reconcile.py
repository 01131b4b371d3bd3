"""Reconciling under a clock that jumps, and what an admin does where nobody can tell whose an instance is."""

from __future__ import annotations

import os

import pytest

from gres_mig import machine
from gres_mig.allocator import Allocator
from gres_mig.deadline import operate
from gres_mig.errors import Conflict, NoCapacity, TimedOut
from gres_mig.models import Allocation, Intent, Owner, Process, Record, Request, Settings
from gres_mig.simulator import Node
from gres_mig.state import Store
from gres_mig.values import replace

ALICE = Owner("manual:alice")
GONE = Process(os.getpid(), 1)
"""A process of our pid that began when the machine did: it is not this one."""
DAY_S = 86400.0


def allocator_at(settings: Settings, clock: float) -> Allocator:
    boot_id = machine.boot_id(settings.simulator)
    return Allocator(settings, Store(settings, boot_id), boot_id, clock=lambda: clock)


@pytest.mark.parametrize("jump_s", [-10 * 365 * DAY_S, -DAY_S, 0.0, DAY_S, 10 * 365 * DAY_S])
def test_an_ended_owner_is_reclaimed_whatever_the_clock_does(settings: Settings, node: Node, jump_s: float) -> None:
    now = 2e9
    allocator_at(settings, now).allocate(ALICE, Request(8000), witnesses=(GONE,))

    later = allocator_at(settings, now + jump_s + settings.young_s).reconcile()

    assert [outcome.verdict for outcome in later] == ["released"]
    assert node.instances() == []


def test_a_stuck_instance_is_tried_again_though_the_clock_was_set_back(settings: Settings, node: Node) -> None:
    settings = replace(settings, in_use_wait_s=0.0)
    allocator_at(settings, 2e9).allocate(ALICE, Request(8000))
    (made,) = node.instances()
    node.hold(made.gpu, made.id, 0, pid=os.getpid())
    allocator_at(settings, 2e9).reclaim(ALICE)
    node.let_go(made.gpu, made.id, 0)

    (outcome,) = allocator_at(settings, 2e9 - DAY_S).reconcile()

    assert outcome.verdict == "released"


def test_an_admin_ends_a_quarantine(settings: Settings, node: Node) -> None:
    settings = replace(settings, bare="quarantine")
    node.plant("nvmlDeviceCreateGpuInstanceWithPlacement", "returns", code=10, after=True)
    with pytest.raises(NoCapacity):
        allocator_at(settings, 2e9).allocate(ALICE, Request(8000, gpus=(node.uuids[0],)))
    (bare,) = node.instances()
    assert [o.verdict for o in allocator_at(settings, 2e9).reconcile(now=True)] == ["stuck"]

    allocator_at(settings, 2e9).reclaim_foreign(node.uuids[0], bare.id)

    assert node.instances() == []
    assert Store(settings, machine.boot_id(settings.simulator)).read().records == ()


def test_an_owner_s_instance_is_not_reclaimed_as_foreign(allocator: Allocator, node: Node) -> None:
    allocation = allocator.allocate(ALICE, Request(8000)).allocation

    with pytest.raises(Conflict, match="is recorded for manual:alice"):
        allocator.reclaim_foreign(allocation.gpu_uuid, allocation.gi_id)

    assert isinstance(allocation, Allocation)
    assert len(node.instances()) == 1


def test_a_gpu_that_hangs_does_not_get_its_neighbour_fenced(settings: Settings, node: Node) -> None:
    settings = replace(settings, hardware_timeout_s=0.5)
    node.plant("nvmlDeviceGetUUID", "hangs", gpu=node.uuids[1], times=0)

    with pytest.raises(TimedOut, match="GPU 1: a driver call did not return"):
        operate(settings, lambda allocator: allocator.allocate(ALICE, Request(8000)))

    state = Store(settings, machine.boot_id(settings.simulator)).read()
    assert dict(state.fences) == {}
    assert state.records == ()


def test_an_intent_whose_maker_commits_and_ends_meanwhile_is_no_crash(
    settings: Settings, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = allocator_at(settings, 2e9)
    allocation = allocator.allocate(ALICE, Request(8000)).allocation
    shared = {name: getattr(allocation, name) for name in Record.field_names()}
    store = Store(settings, machine.boot_id(settings.simulator))
    with store.transaction() as transaction:
        transaction.save(transaction.state.put(Intent(**shared, maker=GONE)))

    def alive(_: Process) -> bool:
        """When it is asked whether the maker lives, that has just committed, and ended."""
        with store.transaction() as transaction:
            transaction.save(transaction.state.put(allocation))
        return False

    monkeypatch.setattr(machine, "alive", alive)
    outcomes = allocator.reconcile()

    assert outcomes == ()
    assert store.read().records == (allocation,)
    assert len(node.instances()) == 1


def test_what_somebody_else_settles_meanwhile_is_told_as_gone(settings: Settings, node: Node) -> None:
    boot_id = machine.boot_id(settings.simulator)
    store = Store(settings, boot_id)
    allocator_at(settings, 2e9).allocate(ALICE, Request(8000))
    (made,) = node.instances()

    def settle(gpu_uuid: str) -> None:
        """As a pass of the service that has the GPU's lock first."""
        if gpu_uuid:
            node.destroy(made.gpu, made.id)
            with store.transaction() as transaction:
                transaction.save(replace(transaction.state, records=()))

    outcomes = Allocator(settings, store, boot_id, watch=settle).reclaim(ALICE)

    assert [(outcome.verdict, outcome.record.owner) for outcome in outcomes] == [("gone", ALICE)]

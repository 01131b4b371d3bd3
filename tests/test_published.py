"""What anybody may read of a node."""

from __future__ import annotations

from gres_mig import machine
from gres_mig.allocator import Allocator
from gres_mig.models import Owner, Request, Settings
from gres_mig.simulator import Node
from gres_mig.state import Store
from gres_mig.values import replace


def test_what_was_an_owners_is_not_foreign_after_its_end(allocator: Allocator, settings: Settings) -> None:
    allocator.allocate(Owner("manual:alice"), Request(8000))
    allocator.allocate(Owner("manual:bob"), Request(8000))
    allocator.reclaim(Owner("manual:alice"))

    public = Store(settings, machine.boot_id(settings.simulator)).public()

    assert [gpu["instances"] for gpu in public["gpus"]] == [[], []]
    assert [record["placement"]["start"] for record in public["records"]] == [3]


def test_a_foreign_instance_is_shown_to_everybody(allocator: Allocator, settings: Settings, node: Node) -> None:
    made = node.make(1, "2g.48gb", 6)
    allocator.allocate(Owner("manual:alice"), Request(8000))

    public = Store(settings, machine.boot_id(settings.simulator)).public()

    assert [[instance["id"] for instance in gpu["instances"]] for gpu in public["gpus"]] == [[], [made.id]]


def test_waiting_for_a_busy_instance_never_passes_for_a_hang(settings: Settings) -> None:
    impatient = replace(settings, in_use_wait_s=60.0, hardware_timeout_s=1.0)

    assert impatient.in_use_limit_s <= impatient.hardware_timeout_s / 4
    assert replace(settings, in_use_wait_s=0.0).in_use_limit_s == 0

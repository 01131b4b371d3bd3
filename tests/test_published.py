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


def test_what_the_driver_called_full_is_not_said_of_it_after_a_change(
    allocator: Allocator, settings: Settings, node: Node
) -> None:
    """Or who may only look would be told that there is no place where one was given back."""
    for number in range(8):
        allocator.allocate(Owner(f"manual:{number}"), Request(8000))
    with Store(settings, machine.boot_id(settings.simulator)).transaction() as records:
        records.save(records.state, gpus=allocator.look())
    full = [gpu["full_profiles"] for gpu in Store(settings, "").public()["gpus"]]
    allocator.reclaim(Owner("manual:3"))

    assert all(full)
    assert [gpu["full_profiles"] for gpu in Store(settings, "").public()["gpus"]] == [[], []]


def test_a_foreign_instance_is_shown_to_everybody(allocator: Allocator, settings: Settings, node: Node) -> None:
    made = node.make(1, "2g.48gb", 6)
    allocator.allocate(Owner("manual:alice"), Request(8000))

    public = Store(settings, machine.boot_id(settings.simulator)).public()

    assert [[instance["id"] for instance in gpu["instances"]] for gpu in public["gpus"]] == [[], [made.id]]


def test_waiting_for_a_busy_instance_never_passes_for_a_hang(settings: Settings) -> None:
    impatient = replace(settings, in_use_wait_s=60.0, hardware_timeout_s=1.0)

    assert impatient.in_use_limit_s <= impatient.hardware_timeout_s / 4
    assert replace(settings, in_use_wait_s=0.0).in_use_limit_s == 0

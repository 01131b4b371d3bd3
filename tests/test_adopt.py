"""Adopting: an instance that is there becomes an owner's; nothing is made, and what is recorded stays."""

from __future__ import annotations

import pytest

from gres_mig.allocator import Allocator
from gres_mig.errors import BadRequest, Conflict
from gres_mig.models import Owner, Request
from gres_mig.simulator import Node

ALICE, BOB = Owner("manual:alice"), Owner("manual:bob")


def test_an_adopted_instance_is_given_to_its_owner_and_made_anew_for_nobody(allocator: Allocator, node: Node) -> None:
    made = node.make(0, "1g.24gb", 3)

    adopted = allocator.adopt(ALICE, node.uuids[0], made.id)

    assert adopted.mig_uuid == made.mig_uuids[0]
    assert allocator.allocate(ALICE, Request(adopted.memory_mib)).allocation.mig_uuid == made.mig_uuids[0]
    assert len(node.instances()) == 1


def test_adopting_it_again_gives_the_same_answer(allocator: Allocator, node: Node) -> None:
    made = node.make(0, "1g.24gb", 3)
    first = allocator.adopt(ALICE, node.uuids[0], made.id)

    assert allocator.adopt(ALICE, node.uuids[0], made.id) == first


def test_what_one_owner_has_no_other_adopts(allocator: Allocator, node: Node) -> None:
    made = node.make(0, "1g.24gb", 3)
    allocator.adopt(ALICE, node.uuids[0], made.id)

    with pytest.raises(Conflict, match=r"manual:alice has 1g\.24gb at 3:3"):
        allocator.adopt(BOB, node.uuids[0], made.id)


def test_an_owner_that_has_one_adopts_no_second(allocator: Allocator, node: Node) -> None:
    allocator.allocate(ALICE, Request(8000))
    other = node.make(0, "1g.24gb", 9)

    with pytest.raises(Conflict, match=r"manual:alice has 1g\.24gb at 0:3"):
        allocator.adopt(ALICE, node.uuids[0], other.id)


def test_a_bare_instance_is_not_adopted(allocator: Allocator, node: Node) -> None:
    bare = node.make(0, "1g.24gb", 3, bare=True)

    with pytest.raises(BadRequest, match="it has 0 compute instances, not one"):
        allocator.adopt(ALICE, node.uuids[0], bare.id)

"""The record file's bytes: what is read back, and what counts as damage."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from recorded import FULL, sealed

from gres_mig.records import decode, encode

DAMAGE = (ValueError, KeyError, TypeError, AttributeError)
"""What `decode` raises for it."""


WRONG: tuple[Any, ...] = (None, "text", 7, -1.5, True, [], {})


def leaves(plain: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in a tree of JSON."""
    for key in plain if isinstance(plain, dict) else range(len(plain) if isinstance(plain, list) else 0):
        yield (*at, key)
        yield from leaves(plain[key], (*at, key))


def test_what_is_written_is_read_back_the_same() -> None:
    assert decode(encode(FULL)) == FULL


def test_its_checksum_is_that_of_what_follows_it() -> None:
    assert sealed(json.loads(encode(FULL))) == encode(FULL)


def test_no_changed_bit_goes_unnoticed() -> None:
    whole, dice = encode(FULL), random.Random(1)
    for _ in range(5_000):
        bits = bytearray(whole)
        for bit in dice.sample(range(8 * len(bits)), dice.randint(1, 3)):
            bits[bit // 8] ^= 1 << bit % 8

        with pytest.raises(DAMAGE):
            decode(bytes(bits))


def test_a_value_of_another_type_is_damage_wherever_it_stands() -> None:
    plain = json.loads(encode(FULL))
    accepted = set()
    for *path, last in leaves(plain):
        for wrong in WRONG:
            changed = json.loads(json.dumps(plain))
            into = changed
            for key in path:
                into = into[key]
            if last == "crc32" or type(into[last]) is type(wrong):
                continue
            into[last] = wrong
            try:
                decode(sealed(changed))
            except DAMAGE:
                continue
            accepted.add((last, type(wrong).__name__))

    # No instance yet, not stuck, a whole number of seconds; nothing else.
    assert accepted == {("gi_id", "NoneType"), ("stuck", "NoneType")} | {
        (name, "int") for name in ("since", "next_try", "bare_since", "over_since")
    }


@pytest.mark.parametrize("place", [{"start": -1, "size": 1}, {"start": 0, "size": 0}, {"start": 0, "size": 1 << 40}])
def test_a_place_that_no_gpu_has_is_damage(place: dict[str, int]) -> None:
    plain = json.loads(encode(FULL))
    plain["records"][0]["placement"] = place

    with pytest.raises(ValueError, match="place"):
        decode(sealed(plain))


def test_two_records_of_one_nonce_are_damage() -> None:
    plain = json.loads(encode(FULL))
    plain["records"][1]["nonce"] = plain["records"][0]["nonce"]

    with pytest.raises(ValueError, match="nonce"):
        decode(sealed(plain))

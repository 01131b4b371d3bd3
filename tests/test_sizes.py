"""Memory sizes on the command line and in config.toml."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gres_mig.errors import BadRequest, Fault
from gres_mig.sizes import MAX_MIB, format_mib, parse_memory

UNITS = {"": 1, "M": 1, "MiB": 1, "G": 1024, "GiB": 1024}


def refusal(text: str) -> str:
    with pytest.raises(BadRequest) as caught:
        parse_memory(text)
    assert caught.value.fault is Fault.REQUEST
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("1", 1),
        ("8000", 8000),
        ("8000M", 8000),
        ("8000MiB", 8000),
        ("8G", 8192),
        ("8GiB", 8192),
        ("8388608K", 8192),
        ("8388608KiB", 8192),
        ("1024K", 1),
        (str(MAX_MIB), MAX_MIB),
        (f"{MAX_MIB * 1024}K", MAX_MIB),
    ],
)
def test_a_size_is_mib_or_has_a_binary_unit(text: str, mib: int) -> None:
    assert parse_memory(text) == mib


@pytest.mark.parametrize("text", ["8g", "8gib", "8GIB", "8192m", "8388608k"])
def test_units_may_be_in_either_case(text: str) -> None:
    assert parse_memory(text) == 8192


@pytest.mark.parametrize(
    ("text", "wrong", "right"),
    [
        ("", "empty", "such as 8000"),
        ("0", "nothing is asked for", "such as 8000"),
        ("000G", "nothing is asked for", "such as 8000"),
        ("08000", "starts with a zero", "write 8000"),
        ("-8000", "has a sign", "such as 8000"),
        ("+8000", "has a sign", "write 8000"),
        (" 8000", "has a space", "write 8000"),
        ("8000\n", "has a space", "write 8000"),
        ("8 G", "has a space", "write 8G"),
        ("8 5G", "has a space", "such as 8000"),
        ("8.5G", "not a whole number", "write 8704"),
        ("1.0001g", "not a whole number", "write 1025"),
        ("8000.0", "not a whole number", "such as 8000"),
        ("8,000", "not grouped", "write 8000"),
        ("8_000M", "not grouped", "write 8000M"),
        ("8,5G", "not a number", "such as 8000"),
        ("８０００", "only the digits 0 to 9", "write 8000"),
        ("٣G", "only the digits 0 to 9", "write 3G"),
        ("8²", "not a number", "such as 8000"),
        ("1e4", "not a number", "such as 8000"),
        ("0x10", "not a number", "such as 8000"),
        ("lots", "not a number", "such as 8000"),
        ("8GB", "GB is not a unit", "powers of 1024"),
        ("8T", "T is not a unit", "powers of 1024"),
        ("8000001K", "not a whole number of MiB", "the nearest is 7813"),
        ("8000000K", "not a whole number of MiB", "the nearest is 7813"),
        ("8191999K", "not a whole number of MiB", "the nearest is 8000"),
        ("1K", "not a whole number of MiB", "the nearest is 1;"),
        ("8K", "not a whole number of MiB", "is 8G here"),
        (str(MAX_MIB + 1), "more than 2,147,483,648 MiB", "such as 8000"),
        ("9" * 100_000, "more than 2,147,483,648 MiB", "such as 8000"),
    ],
)
def test_what_is_no_size_is_answered_by_what_is_wrong_and_what_would_be_right(
    text: str, wrong: str, right: str
) -> None:
    line = refusal(text)

    assert line.startswith("memory size ")
    assert wrong in line
    assert right in line


@settings(deadline=None)
@given(st.text())
def test_any_text_is_a_positive_size_or_refused_in_one_short_printable_line(text: str) -> None:
    try:
        mib, line = parse_memory(text), ""
    except BadRequest as error:
        mib, line = 1, str(error)

    assert 0 < mib <= MAX_MIB
    assert line.isprintable()
    assert len(line) < 250


@settings(deadline=None)
@given(st.integers(1, MAX_MIB), st.sampled_from(list(UNITS)))
def test_each_size_comes_back_as_it_was_written(number: int, unit: str) -> None:
    if number * UNITS[unit] > MAX_MIB:
        assert "more than" in refusal(f"{number}{unit}")
    else:
        assert parse_memory(f"{number}{unit}") == number * UNITS[unit]


@settings(deadline=None)
@given(st.from_regex(r"\A[ +]?[0-9]{1,4}([.,_ ][0-9]{1,3})? ?(K|M|G|MiB|GB)?\Z"))
def test_what_a_refusal_says_to_write_is_accepted(text: str) -> None:
    try:
        parse_memory(text)
        hint = ""
    except BadRequest as error:
        hint = error.hint

    if re.fullmatch(r"write \S+", hint):
        assert parse_memory(hint.removeprefix("write ")) > 0


def test_sizes_are_shown_with_grouped_digits_and_their_unit() -> None:
    assert format_mib(8192) == "8,192 MiB"
    assert format_mib(0) == "0 MiB"

"""The grammar of owners."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gres_mig.errors import BadRequest
from gres_mig.models import Owner
from gres_mig.owners import parse_owner

KERNEL = "3f2b9c1e-8a4d-4c6e-9b1a-0123456789ab"

names = st.text("abcXYZ019_.-", min_size=1, max_size=64)
owners = st.one_of(
    st.builds("slurm:{}:{}".format, names, st.integers(1, 9_999_999_999)),
    st.builds("jupyter:{}:{}".format, st.integers(0, 2**32 - 2), st.uuids()),
    st.builds("manual:{}".format, names),
)


def test_a_job_is_told_from_another_of_its_id_by_uid_and_submit_time() -> None:
    owner = parse_owner("slurm:alpha:4711", uid=1000, submitted=1_700_000_000)

    assert owner == Owner("slurm:alpha:4711", 1000, 1_700_000_000)
    assert owner != parse_owner("slurm:alpha:4711", uid=1001, submitted=1_700_000_000)
    assert owner != parse_owner("slurm:alpha:4711", uid=1000, submitted=1_700_000_001)


def test_a_kernel_belongs_to_the_uid_in_its_name_whatever_the_caller_says() -> None:
    assert parse_owner(f"jupyter:1000:{KERNEL}", uid=0).uid == 1000


@settings(deadline=None)
@given(owners)
def test_each_owner_comes_back_as_it_was_written(text: str) -> None:
    assert str(parse_owner(text)) == text


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "no kind of owner; an owner is slurm:CLUSTER:JOBID, jupyter:UID:KERNEL or manual:NAME"),
        ("4711", "no kind of owner"),
        ("SLURM:alpha:4711", "no kind of owner"),
        ("slurm:4711", "slurm takes 2 parts, not 1"),
        ("slurm:alpha:4711:0", "slurm takes 2 parts, not 3"),
        ("slurm::4711", "the cluster '' is not"),
        ("slurm:al pha:4711", "the cluster 'al pha' is not"),
        (f"slurm:{'a' * 65}:4711", "the cluster"),
        ("slurm:alpha:0", "the job id '0' is not"),
        ("slurm:alpha:04711", "the job id '04711' is not"),
        ("slurm:alpha:47_11", "the job id"),
        ("slurm:alpha:４７１１", "the job id"),
        ("slurm:alpha:4711\n", "the job id"),
        ("slurm:alpha:12345678901", "the job id"),
        (f"jupyter:alice:{KERNEL}", "the uid 'alice' is not"),
        (f"jupyter:01000:{KERNEL}", "the uid"),
        (f"jupyter:-1:{KERNEL}", "the uid"),
        (f"jupyter:4294967295:{KERNEL}", "the uid"),
        (f"jupyter:9999999999:{KERNEL}", "the uid"),
        (f"jupyter:1000:{KERNEL.upper()}", "lower case"),
        (f"jupyter:1000:{KERNEL[:-1]}", "the kernel"),
        ("jupyter:1000:python3", "the kernel"),
        ("manual:", "the name '' is not"),
        ("manual:a/b", "the name 'a/b' is not"),
        ("manual:é", "the name"),
        ("manual:a\0", "the name"),
    ],
)
def test_what_is_no_owner_is_answered_by_the_part_that_is_wrong(text: str, wrong: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(wrong)):
        parse_owner(text)


@settings(deadline=None)
@given(st.one_of(st.text(), st.builds("{}:{}".format, st.sampled_from(["slurm:a", "jupyter:0", "manual"]), st.text())))
def test_any_text_is_an_owner_or_refused_in_one_short_printable_line(text: str) -> None:
    try:
        answer = parse_owner(text).name
    except BadRequest as error:
        answer = str(error)

    assert answer == text or answer.startswith("owner ")
    assert answer.isprintable()
    assert len(answer) < 400

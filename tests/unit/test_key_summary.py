"""A summary of keys never lacks one, and seldom seems to hold one that it lacks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_plugin.core.key_summary import HASH_BITS, HASH_BYTES, KeySummary

HASHES = st.integers(0, 2**HASH_BITS - 1)


def joined(hashes: list[int]) -> bytes:
    return b"".join(each.to_bytes(HASH_BYTES, "big") for each in hashes)


@given(st.integers(0, 3), st.lists(st.lists(HASHES)))
def test_it_holds_whatever_was_added(rows: int, parts: list[list[int]]) -> None:
    summary = KeySummary(rows)
    for part in parts:
        summary.add(joined(part))
    assert all(summary.may_hold(each) for part in parts for each in part)


def test_an_empty_one_holds_nothing() -> None:
    summary = KeySummary(1000)
    assert not any(summary.may_hold(each) for each in range(0, 2**HASH_BITS, 2**HASH_BITS // 1000))


@pytest.mark.parametrize("rows", [1_000, 100_000, 524_287])
def test_at_most_one_answer_in_two_hundred_is_wrong(rows: int) -> None:
    rng = random.Random(rows)
    summary = KeySummary(rows)
    summary.add(joined([rng.randrange(2**HASH_BITS) for _ in range(rows)]))
    others = [rng.randrange(2**HASH_BITS) for _ in range(20_000)]
    assert sum(map(summary.may_hold, others)) < len(others) / 200

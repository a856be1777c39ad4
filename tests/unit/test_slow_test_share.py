"""The gate takes turns with slow tests, and leaves none out for ever."""

from __future__ import annotations

from pathlib import Path

from tests.slow_test_share import SHARES, in_share, present_share

NAMES = {f"tests/test_{number}.py::test_it[{number}]" for number in range(100)}


def test_each_test_is_in_one_share() -> None:
    shares = [in_share(NAMES, share) for share in range(SHARES)]
    assert set().union(*shares) == NAMES
    assert sum(map(len, shares)) == len(NAMES)
    assert all(shares)


def test_without_a_commit_the_day_decides(tmp_path: Path) -> None:
    assert present_share(tmp_path) in range(SHARES)


def test_a_test_stays_in_its_share_when_others_come_and_go() -> None:
    some = set(sorted(NAMES)[:40])
    assert in_share(some, 1) == in_share(NAMES, 1) & some

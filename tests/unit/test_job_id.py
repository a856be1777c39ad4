"""What a job is called: two jobs never alike, one job alike at each attempt, and what the version before called it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_plugin.core.job_id import LONGEST_JOB_ID, JobName, check_job_id, former_job_ids
from outbox_plugin.errors import InvalidSetting

RUN = "b6b3a1f0-0000-4000-8000-000000000000"
_TEXT = st.text(max_size=12)
_NAMES = st.builds(
    JobName,
    run=st.just(RUN),
    assets=st.lists(st.lists(_TEXT, min_size=1, max_size=3).map(tuple), max_size=2, unique=True).map(
        lambda keys: tuple(sorted(keys))
    ),
    partitions=st.none() | st.tuples(_TEXT, _TEXT),
    output=st.none() | st.lists(_TEXT, min_size=1, max_size=3).map(tuple),
)


@given(_NAMES, _NAMES)
def test_two_jobs_are_never_called_alike(one: JobName, other: JobName) -> None:
    assert (one.text() == other.text()) == (one == other)


@given(_NAMES)
def test_a_name_can_be_kept_and_sent(name: JobName) -> None:
    check_job_id(name.text())
    assert name.text().isascii()


def test_names_are_for_people_too() -> None:
    whole = JobName(RUN, (("shop", "orders"),), ("2024-01-01", "2024-01-31"), ("step", "result"))
    assert whole.text() == f"{RUN}?asset=shop/orders&partition=2024-01-01&to=2024-01-31&output=step/result"
    assert JobName(RUN, (("orders",), ("payments",))).text() == f"{RUN}?asset=orders&asset=payments"


def test_a_name_that_would_be_too_long_is_a_digest_of_its_own() -> None:
    """A step may make hundreds of assets, and each event carries the name."""
    many = tuple((f"asset_{number}",) for number in range(500))
    check_job_id(f"{JobName(RUN, many).text()}&of={'x' * 100}")
    assert JobName(RUN, many).text() != JobName(RUN, many[:-1]).text()


@pytest.mark.parametrize(
    ("name", "formerly"),
    [
        (JobName(RUN, (("orders",),)), ["/orders"]),
        (JobName(RUN, (("shop", "orders"),)), ["/shop/orders"]),
        (JobName(RUN, (("orders",),), ("eu", "eu")), ["/eu/orders", "/orders"]),
        (JobName(RUN, (("orders",), ("sales",)), ("a", "c")), ["/a...c/orders/sales", "/orders/sales"]),
        (JobName(RUN, (("shop", "orders"),), None, ("step", "result")), ["/shop/orders"]),
        (JobName(RUN, (("orders",),), ("eu", "eu"), ("step", "result")), ["/orders/eu"]),
        (JobName(RUN, (("orders",),), ("a", "c"), ("step", "result")), []),
        (JobName(RUN, (), None, ("step", "result")), []),
    ],
)
def test_what_the_version_before_called_it_is_known(name: JobName, formerly: list[str]) -> None:
    assert former_job_ids(name.text()) == [f"{RUN}{each}" for each in formerly]


def test_a_name_that_a_user_gave_was_the_same_before() -> None:
    assert former_job_ids("nightly") == former_job_ids("nightly?") == former_job_ids("a?b=c") == []


def test_one_of_several_jobs_of_an_asset_is_not_taken_for_the_asset_s_only_one_of_before() -> None:
    name = JobName(RUN, (("orders",),)).text()
    assert former_job_ids(f"{name}&of=payments") == []


@pytest.mark.parametrize("wrong", ["", "a\0b", "x" * (LONGEST_JOB_ID + 1), "nightly\ud800"])
def test_what_cannot_be_a_name_is_said(wrong: str) -> None:
    with pytest.raises(InvalidSetting, match=r"job id: expected 1 to 1000 characters") as raised:
        check_job_id(wrong)
    assert str(raised.value).encode()  # It can be printed.

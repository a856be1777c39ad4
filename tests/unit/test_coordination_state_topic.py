"""What is kept beside the log, record by record."""

from __future__ import annotations

import pytest

from outbox_plugin.coordination.messages import ReleaseGroup
from outbox_plugin.coordination.partition_owners import Key
from outbox_plugin.coordination.state_topic import (
    CoordinationForm,
    KeptPosition,
    KeptState,
    form_record,
    pause_record,
    position_record,
)

KEY = Key("billing", "orders", 3)
PAUSE = ReleaseGroup(0, 50, "run-9", "operator", "billing", "", 0, 650)
POSITION = KeptPosition(42, 1_700_000_000.123, ("id-2", "id-1"))
FORM = CoordinationForm(8, "id-9", 1_700_000_000.5)


def read(*records: tuple[bytes | None, bytes | None]) -> KeptState:
    kept = KeptState()
    for key, value in records:
        kept.take_in(key, value)
    return kept


def test_what_is_written_is_read() -> None:
    kept = read(position_record(KEY, POSITION), pause_record(PAUSE), form_record(FORM))
    assert kept == KeptState({KEY: POSITION}, {"billing": PAUSE}, FORM)


def test_a_position_that_the_log_said_earlier_does_not_count_though_it_was_written_later() -> None:
    records = [position_record(KEY, KeptPosition(offset, at, ("id-1",))) for offset, at in ((500, 20.0), (100, 10.0))]
    assert read(*records).positions[KEY].offset == 500


def test_the_pause_that_was_written_last_counts() -> None:
    """Whoever wrote it has looked at the log again. Its time may be earlier: the brokers' clock was set back."""
    resume = ReleaseGroup(0, 40, "run-10", "operator", "billing", "", 0, 0)
    assert read(pause_record(PAUSE), pause_record(resume)).pauses == {"billing": resume}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, None),
        (b"clock", b""),
        (b"\xff", b"1/2/id"),
        (b"position/billing/orders", b"1/2/id"),
        (b"position/billing/orders/3", b"1/2"),
        (b"position/billing/orders/3", b"-1/2/id"),
        (b"position/billing/orders/3", b"1/nan/id"),
        (b"position/billing/orders/3", b"1/" + b"9" * 400 + b"/id"),
        (b"position/billing/orders/3", b"1/" + b"9" * 5_000 + b"/id"),
        (b"pause/others", pause_record(PAUSE)[1]),
        (b"pause/billing", b"ReleaseGroup"),
        (b"form", b"8/id"),
        (b"form", b"8/id/" + b"9" * 400),
    ],
)
def test_what_is_malformed_is_passed_over(key: bytes | None, value: bytes | None) -> None:
    assert read((key, value)) == KeptState()

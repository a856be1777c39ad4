"""Where an inbox goes on: Kafka's committed offset, or the position in Postgres."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_plugin.core.leader_epochs import GroupPosition, HandledPosition
from outbox_plugin.inbox.positions import start_position

OURS, ANOTHER = "A" * 22, "B" * 22
NONE = -1001  # As librdkafka says that there is no committed offset.


@pytest.mark.parametrize(
    ("committed", "metadata", "in_postgres", "expected"),
    [
        ((NONE, None), None, None, None),
        ((NONE, None), None, (7, 3), (7, 3)),
        ((5, 3), OURS, None, (5, 3)),
        ((5, 3), OURS, (7, None), (5, 3)),  # The position in Postgres would hide a cut between 5 and 7.
        ((5, 3), OURS, (7, 3), (5, 3, (7, 3))),  # But it tells which old records from 5 on were handled.
        ((5, None), OURS, (7, None), (5, None)),
        ((9, 3), OURS, (7, 3), (9, 3)),
        ((9, 2), OURS, (7, 3), (9, 2, (7, 3))),
        ((5, None), "", (7, 3), (7, 3)),  # An operator can skip records, and have none handled again.
        ((9, None), "", (7, None), (9, None)),
        ((9, None), "by hand", (7, None), (9, None)),
        ((9, 3), "of a plain consumer", (7, None), (9, None)),  # It may stand behind a transaction marker.
        ((9, None), None, None, (9, None)),
        ((9, 3), ANOTHER, (7, 3), (7, 3)),  # It was committed in a topic that is gone.
        ((9, 3), ANOTHER, None, None),
    ],
)
def test_an_offset_of_an_inbox_counts_before_a_greater_position(
    committed: tuple[int, int | None],
    metadata: str | None,
    in_postgres: tuple[int, int | None] | None,
    expected: tuple[Any, ...] | None,
) -> None:
    ours = None if in_postgres is None else GroupPosition(*in_postgres)
    found = start_position(GroupPosition(*committed), metadata, OURS, ours)
    if expected is None:
        assert found is None
    else:
        next_offset, leader_epoch, *handled = expected
        assert found == (next_offset, leader_epoch, tuple(HandledPosition(*each) for each in handled))

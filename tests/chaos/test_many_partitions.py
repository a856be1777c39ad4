"""A smaller run of `python -m tests.chaos.many_partitions`."""

from __future__ import annotations

import pytest

from tests.chaos.many_partitions import share

pytestmark = [pytest.mark.integration, pytest.mark.chaos]


def test_two_consumers_share_very_many_partitions_in_halves(bootstrap_servers: str, group: str) -> None:
    share(bootstrap_servers, group, 1_000)

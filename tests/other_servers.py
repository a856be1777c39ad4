"""Has the tests run with another Postgres and another Kafka than those that the packages bring along.

`make test-servers POSTGRES=/usr/lib/postgresql/16/bin KAFKA=/opt/kafka_2.13-3.9.1/libs` sets the variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from outbox_plugin.embedded import kafka, postgres

POSTGRES, KAFKA = "TESTS_POSTGRES", "TESTS_KAFKA"


def use_other_servers(environment: Mapping[str, str]) -> None:
    """Replace the programs of Postgres, or the jars of Kafka, in this process by those of a folder, if one is named.

    Args:
        environment: of this process.
    """
    if programs := environment.get(POSTGRES):
        postgres._binary = lambda name: Path(programs, name)
    if jars := environment.get(KAFKA):
        setattr(kafka, "kafka_jars", lambda tell: Path(jars))  # noqa: B010 - it is imported there.

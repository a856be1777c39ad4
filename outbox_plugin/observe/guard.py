"""Keeps what an observer raises from whoever is observed: counting decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from outbox_plugin.printable import logger_of
from outbox_plugin.schema.connection import one_line

logger = logger_of("outbox_plugin.observe")

Event = TypeVar("Event")


def guarded(observe: Callable[[Event], None], name: str) -> Callable[[Event], None]:
    """Return `observe` as a function that raises no exception. It logs the first one, and the first after a success.

    Prometheus' client may raise one: where it keeps its numbers in a directory that is full, for example.

    Args:
        observe: counts an event; it may run in several threads at once.
        name: says in the log who is observed.
    """
    failing = False

    def observe_safely(event: Event) -> None:
        nonlocal failing
        try:
            observe(event)
        except Exception as error:
            if not failing:
                logger.warning("the metrics of %s lack what happens now: %s", name, one_line(error))
            failing = True
        else:
            failing = False

    return observe_safely

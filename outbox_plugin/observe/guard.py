"""Keeps an observer's exceptions away from what it observes, so that a fault in an observer stops nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from outbox_plugin.printable import logger_of, one_line

logger = logger_of("outbox_plugin.observe")

Event = TypeVar("Event")


def guarded(observe: Callable[[Event], None], name: str) -> Callable[[Event], None]:
    """Wrap `observe` in a function that raises no exception. It logs the first one, and the first after each success.

    Prometheus' client can raise exceptions, for example if it keeps its values in a directory that is full.

    Args:
        observe: counts an event. Several threads may call it at once.
        name: names in the log what is observed.
    """
    failing = False

    def observe_safely(event: Event) -> None:
        nonlocal failing
        try:
            observe(event)
        except Exception as error:
            if not failing:
                logger.warning("the metrics of %s miss events: %s", name, one_line(error))
            failing = True
        else:
            failing = False

    return observe_safely


def harmless(observe: Callable[[Event], None], name: str) -> Callable[[Event], None]:
    """Wrap a user's `observe` in a function that raises no exception. It logs the first one, with its traceback.

    SystemExit is kept away, too: it would end the thread that calls, and nobody would notice.

    Args:
        observe: the user's. Several threads may call it at once.
        name: names in the log what is observed.
    """
    has_failed = False

    def observe_harmlessly(event: Event) -> None:
        nonlocal has_failed
        try:
            observe(event)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if not has_failed:
                has_failed = True
                said = "`observe` of %s raised an exception, and is called again: %s"
                logger.warning(said, name, one_line(error), exc_info=error)

    return observe_harmlessly

"""Says what to install where OUTBOX_LISTEN is set and a module of the extra `metrics` is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from outbox_plugin.errors import InvalidSetting
from outbox_plugin.extras import what_to_install


@contextmanager
def metrics_extra() -> Iterator[None]:
    """Within it, import what serves the port. It is imported only where OUTBOX_LISTEN is set.

    Raises:
        InvalidSetting: the extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (hint := what_to_install("OUTBOX_LISTEN", error)) is None:
            raise
        raise InvalidSetting(hint) from None

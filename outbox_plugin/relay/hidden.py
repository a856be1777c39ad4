"""Rows that are there and may not be seen yet: those of a large transaction that is still at work.

A look passes over all of them and finds nothing. That is a core's work if it is done again and again, and the look that
is under way at the commit, which does not see the rows yet, keeps them waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

from outbox_plugin.core.pace import LONG_LOOK_SECONDS
from outbox_plugin.core.ports import Outbox, Wanted
from outbox_plugin.core.row import OutboxRow


class HiddenRows:
    """What one term knows of them; belongs to the stage that looks for rows."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._wanted: Wanted | None = None  # What the last look, a long one, did not find.
        self._snapshot = ""
        self.still = False  # Whether the last look was spared for them.

    def spare(self, wanted: Wanted) -> bool:
        """Whether a look for `wanted` would find nothing, as the last one did: no transaction has ended since.

        Raises:
            StoreUnavailable: Postgres does not say.
        """
        self.still = False
        if wanted == self._wanted:
            before, self._snapshot = self._snapshot, self._outbox.snapshot()
            self.still = before == self._snapshot
        return self.still

    def forget(self) -> None:
        """What is to be read may have changed in another way."""
        self._wanted, self.still = None, False

    def looked(self, wanted: Wanted, found: Sequence[OutboxRow], seconds: float) -> None:
        """A look took so long."""
        self._wanted = wanted if not found and seconds > LONG_LOOK_SECONDS else None

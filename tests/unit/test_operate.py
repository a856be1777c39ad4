"""An operator's commands, as far as they need no server."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outbox_plugin import Settings, operate
from outbox_plugin.errors import UserError


@pytest.mark.parametrize(
    "command",
    [
        operate.pause,
        operate.resume,
        operate.parked_keys,
        operate.release,
        operate.dead_letters,
        operate.retry_dead_letters,
        operate.discard_dead_letters,
        operate.replay,
    ],
)
def test_no_command_acts_where_the_settings_name_several_outboxes(command: Callable[[Settings], object]) -> None:
    """It would act on one table, and an operator would think that it had acted on all."""
    several = Settings(
        dsn="postgresql://127.0.0.1:1/none", bootstrap_servers="k:1", outboxes=[{"group": "a"}, {"group": "b"}]
    )
    with pytest.raises(UserError, match=r"^OUTBOX_OUTBOXES names 2 outboxes, and this concerns one of them: "):
        command(several)

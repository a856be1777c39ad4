"""An operator's commands: pause and resume, release or retry bad rows, emit kept rows again."""

from outbox_plugin.core.bad_rows import ParkedKey
from outbox_plugin.operate.pausing import pause, resume
from outbox_plugin.operate.release_and_retry import (
    DeadLetter,
    DeadLetterAltered,
    dead_letters,
    discard_dead_letters,
    parked_keys,
    release,
    retry_dead_letters,
)
from outbox_plugin.operate.replay import replay

__all__ = [
    "DeadLetter",
    "DeadLetterAltered",
    "ParkedKey",
    "dead_letters",
    "discard_dead_letters",
    "parked_keys",
    "pause",
    "release",
    "replay",
    "resume",
    "retry_dead_letters",
]

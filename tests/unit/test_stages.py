"""Stages, and the threads that one of them starts while all run."""

from __future__ import annotations

import threading

from outbox_plugin.relay.runtime import Threads
from outbox_plugin.relay.stages import Stages


def test_the_end_waits_for_a_thread_that_a_stage_starts_late() -> None:
    stages, main_ended, ended = Stages(Threads(), "t"), threading.Event(), threading.Event()

    def start_late() -> None:
        main_ended.wait(30)
        stages.spawn(lambda: stages.rest(0.2) or ended.set(), "summary")  # type: ignore[func-returns-value]

    stages.run(main_ended.set, read=start_late)
    assert ended.is_set()

"""A task group, and the tasks that one of its tasks adds while all run."""

from __future__ import annotations

import threading

from outbox_plugin.relay.runtime import Threads
from outbox_plugin.relay.task_group import TaskGroup


def test_the_end_waits_for_a_task_that_another_one_adds_late() -> None:
    tasks, main_ended, ended = TaskGroup(Threads(), "t"), threading.Event(), threading.Event()

    def start_late() -> None:
        main_ended.wait(30)
        tasks.spawn(lambda: tasks.rest(0.2) or ended.set(), "summary")  # type: ignore[func-returns-value]

    tasks.run(main_ended.set, read=start_late)
    assert ended.is_set()

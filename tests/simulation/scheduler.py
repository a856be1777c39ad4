"""Virtual time, and greenlets in place of threads: a seeded random choice decides what runs next.

Time stands still while something can run, and jumps to the next timer when nothing can.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from greenlet import getcurrent, greenlet

PREEMPTION = 0.1  # The probability that another task runs first when a lock is taken.


class Killed(BaseException):
    """The process is dead: nothing that its code still does may have an effect."""


class Stuck(AssertionError):
    """A deadlock: no task can run, and no timer is left."""


class Task:
    """A greenlet of a process. Implements `runtime.Task`."""

    __slots__ = ("_work", "green", "name", "number", "process", "scheduler", "waiters")

    def __init__(self, process: Process, work: Callable[[], None], name: str) -> None:
        self.process = process
        self.scheduler = process.scheduler
        self.name = name
        self.number = 0  # Counts its waits, so that the timer of an earlier wait is recognized as stale.
        self.waiters: list[Task] = []
        self.green = greenlet(self._live, self.scheduler.hub)
        self._work = work

    def _live(self) -> None:
        try:
            self._work()
        except Killed:
            pass
        finally:
            for waiter in self.waiters:
                self.scheduler.wake(waiter, waiter.number)

    def is_alive(self) -> bool:
        return not self.green.dead

    def join(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else self.scheduler.now + timeout
        while not self.green.dead and (deadline is None or self.scheduler.now < deadline):
            self.waiters.append(self.scheduler.current)
            self.scheduler.wait(deadline)


class Lock:
    """A lock for greenlets. Implements `runtime.Lock`."""

    __slots__ = ("_holder", "_queue", "_scheduler")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._holder: Task | None = None
        self._queue: list[Task] = []

    def __enter__(self) -> Lock:
        scheduler = self._scheduler
        task = scheduler.current
        if not task.process.alive:
            raise Killed
        if self._holder is task:
            raise AssertionError("the relay does not take a lock that it holds")
        if scheduler.random() < PREEMPTION:
            scheduler.step_aside()
        self.acquire(task)
        return self

    def acquire(self, task: Task) -> None:
        while self._holder is not None:
            self._queue.append(task)
            self._scheduler.wait(None)
        self._holder = task

    def release(self) -> None:
        self._holder = None
        if self._queue:
            task = self._queue.pop(0)
            self._scheduler.wake(task, task.number)

    def __exit__(self, *_: object) -> None:
        if self._scheduler.current.process.alive:
            self.release()


class Condition:
    """A condition for greenlets. Implements `runtime.Condition`."""

    __slots__ = ("_lock", "_scheduler", "_sleepers")

    def __init__(self, scheduler: Scheduler, lock: Lock) -> None:
        self._scheduler = scheduler
        self._lock = lock
        self._sleepers: list[tuple[Task, int]] = []

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        scheduler = self._scheduler
        task = scheduler.current
        value = predicate()
        deadline = None if timeout is None else scheduler.now + timeout
        while not value and (deadline is None or scheduler.now < deadline):
            self._sleepers.append((task, task.number))
            self._lock.release()
            scheduler.wait(deadline)
            self._lock.acquire(task)
            value = predicate()
        return value

    def notify_all(self) -> None:
        sleepers, self._sleepers = self._sleepers, []
        for task, number in sleepers:
            self._scheduler.wake(task, number)


class Process:
    """A process, which can be killed and paused as a whole. Implements `runtime.Runtime`.

    `clock` is how many seconds its clock is ahead of the simulation's.
    """

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.scheduler = scheduler
        self.name = name
        self.alive = True
        self.paused_until = 0.0
        self.clock = scheduler.random() * 1000.0
        self.tasks: list[Task] = []
        self.held: list[Task] = []  # Tasks that would run if the process were not paused.
        self.at_death: Callable[[], None] = lambda: None
        scheduler.processes.append(self)

    def now(self) -> float:
        return self.scheduler.now + self.clock

    def lock(self) -> Lock:
        return Lock(self.scheduler)

    def condition(self, lock: Lock) -> Condition:
        return Condition(self.scheduler, lock)

    def spawn(self, work: Callable[[], None], name: str) -> Task:
        if not self.alive:
            raise Killed
        task = Task(self, work, name)
        self.tasks.append(task)
        self.scheduler.runnable.append(task)
        return task

    def new_id(self) -> str:
        self.scheduler.ids += 1
        return f"{self.name}#{self.scheduler.ids}"

    @property
    def paused(self) -> bool:
        return self.paused_until > self.scheduler.now

    def pause(self, seconds: float) -> None:
        """Let none of its greenlets run for that time. Requests that it has sent go on."""
        if self.alive:
            self.paused_until = max(self.paused_until, self.scheduler.now + seconds)
            self.scheduler.at(self.paused_until, self._resume)
            self.scheduler.disturbs(self.paused_until)

    def _resume(self) -> None:
        if not self.paused:
            held, self.held = self.held, []
            self.scheduler.runnable += held

    def kill(self) -> None:
        """Kill it: none of its greenlets runs again."""
        if self.alive:
            self.alive = False
            self.at_death()


class Scheduler:
    """Runs tasks until the schedule is over. Everything random in a schedule comes from its `rng`."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.random = self.rng.random
        self.now = 0.0
        self.ids = 0
        self.steps = 0
        self.hub = getcurrent()
        self.runnable: list[Task] = []
        self.processes: list[Process] = []
        self.current: Task
        self.over = False
        self.disturbed_until = 0.0  # When the last pause is over, and the last late request has arrived.
        self._timers: list[tuple[float, int, Any, int]] = []
        self._sequence = 0

    def at(self, when: float, work: Callable[[], None]) -> None:
        """Run `work`, which must not wait, at that time."""
        self._sequence += 1
        heappush(self._timers, (when, self._sequence, work, -1))

    def disturbs(self, when: float) -> None:
        """Note that something will arrive late, at that time."""
        self.disturbed_until = max(self.disturbed_until, when)

    def run(self, until: float) -> None:
        """Let tasks run until `over`.

        Raises:
            Stuck: `until` has come.
        """
        runnable, timers, random_ = self.runnable, self._timers, self.random
        while not self.over:
            if runnable:
                chosen = int(random_() * len(runnable))
                task = runnable[chosen]
                runnable[chosen] = runnable[-1]
                runnable.pop()
                process = task.process
                if not process.alive:
                    continue
                if process.paused_until > self.now:
                    process.held.append(task)
                    continue
                self.current = task
                self.steps += 1
                task.green.switch()
            elif not timers or timers[0][0] > until:
                raise Stuck(f"nothing more happens until {until:.1f} s")
            else:
                self.now, _, work, number = heappop(timers)
                if number == -1:
                    work()
                elif work.number == number:
                    work.number += 1
                    runnable.append(work)

    def wait(self, deadline: float | None) -> None:
        """Let others run until the current task is woken, or the deadline has come."""
        task = self.current
        if not task.process.alive:
            raise Killed
        if deadline is not None:
            self._sequence += 1
            heappush(self._timers, (deadline, self._sequence, task, task.number))
        self.hub.switch()
        if not task.process.alive:
            raise Killed

    def sleep(self, seconds: float) -> None:
        """Let the current task wait for that many seconds."""
        self.wait(self.now + seconds)

    def step_aside(self) -> None:
        """Let other tasks run first. No time passes."""
        self.runnable.append(self.current)
        self.hub.switch()
        if not self.current.process.alive:
            raise Killed

    def wake(self, task: Task, number: int) -> None:
        """End the wait of that number."""
        if task.number == number:
            task.number += 1
            self.runnable.append(task)

    def end(self) -> None:
        """Unwind every greenlet. None has an effect from now on."""
        for process in self.processes:
            process.alive = False
        for process in self.processes:
            for task in process.tasks:
                if not task.green.dead and task.green:
                    self.current = task
                    task.green.throw(Killed)

"""The network between a harvester and a server, and everything that can happen to requests on it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from outbox_plugin.core.repeated_requests import UNREPEATED_SECONDS
from tests.simulation.scheduler import Killed, Process, Scheduler, Task

Answer = TypeVar("Answer")

PATIENCE = 4.0  # The longest time, in seconds, that a client waits for an answer.
HELD_PATIENCE = 20.0  # The longest time that it waits for an answer on a connection that is held.
LATE = 12.0  # The longest delay, in seconds, of a late request, even if nobody waits for it any more.

MISHAPS = (
    "killed before it was sent",
    "killed before the answer",
    "paused before it was sent",
    "paused before the answer",
    "request lost",
    "answer lost",
    "late",
    "refused",
    "repeated",
)


@dataclass
class Mishaps:
    """How often which mishap happens to a request; none after `until`."""

    rate: float = 0.0
    kinds: tuple[str, ...] = MISHAPS
    until: float = 0.0
    longest_pause: float = 60.0
    aims: tuple[str, ...] = ()  # At these requests only, if there are any.


@dataclass
class Server:
    """The reachability of Postgres or Kafka. `error` is what its clients raise if it does not answer."""

    scheduler: Scheduler
    name: str
    error: type[Exception]
    mishaps: Mishaps
    say: Callable[..., None]
    latency: float = 0.002
    down: bool = False
    cut_off: set[Process] = field(default_factory=set)
    held: set[Process] = field(default_factory=set)  # Whose way to one broker delivers nothing; to the others it does.

    def reaches(self, process: Process) -> bool:
        """Whether requests of the process arrive now."""
        return not self.down and process not in self.cut_off

    def call(
        self,
        process: Process,
        doing: str,
        effect: Callable[[], Answer],
        *,
        unanswered: type[Exception] | None = None,
        repeats: bool = False,
        should_wait: Callable[[], bool] | None = None,
    ) -> Answer:
        """Make the server run `effect`, which takes no time, and wait for the answer.

        Args:
            process: the client's.
            doing: describes the request, for the trace.
            effect: what the server does.
            unanswered: the error if no answer comes; by default `error`.
            repeats: whether the client repeats the request if its connection breaks before the answer.
            should_wait: whether waiting still makes sense. The request is one to the broker to which a way may be held.

        Raises:
            Exception: what `effect` raises; or `unanswered`, or else `error`, if no answer comes.
        """
        scheduler = self.scheduler
        if not process.alive:
            raise Killed
        mishaps = self.mishaps
        if (
            scheduler.now < mishaps.until
            and scheduler.random() < mishaps.rate
            and (not mishaps.aims or doing.split(" ", 1)[0] in mishaps.aims)
        ):
            kind = mishaps.kinds[int(scheduler.random() * len(mishaps.kinds))]
            if kind == "repeated" and repeats:
                return self._repeated(process, doing, effect, unanswered)
            return self._with_mishap(kind, process, doing, effect, unanswered or self.error)
        if should_wait is not None and process in self.held:
            return self._held(process, doing, effect, unanswered or self.error, should_wait)
        wait = scheduler.random() * self.latency
        if scheduler.random() < 0.5:
            scheduler.sleep(wait)
            return self._do(process, doing, effect)
        answer = self._do(process, doing, effect)
        scheduler.sleep(wait)
        if not self.reaches(process):
            raise self._silence(doing, unanswered or self.error)
        return answer

    def _do(self, process: Process, doing: str, effect: Callable[[], Answer]) -> Answer:
        if not self.reaches(process):
            raise self._silence(doing, self.error)
        self.say(process.name, doing)
        return effect()

    def _silence(self, doing: str, error: type[Exception]) -> Exception:
        """The error that the caller raises, because no answer comes."""
        self.scheduler.sleep(self.scheduler.random() * PATIENCE)
        return error(f"{self.name}: no answer to: {doing}")

    def _held(
        self,
        process: Process,
        doing: str,
        effect: Callable[[], Answer],
        unanswered: type[Exception],
        should_wait: Callable[[], bool],
    ) -> Answer:
        """The request or its answer stays on the way. A request arrives when the way is free again, also late."""
        scheduler = self.scheduler
        self.say(process.name, f"{doing}: is held")
        answers = [self._do(process, doing, effect)] if scheduler.random() < 0.5 else []
        gives_up = scheduler.now + HELD_PATIENCE * (0.5 + scheduler.random() / 2)
        while process in self.held:
            scheduler.sleep(0.05)
            if scheduler.now > gives_up or not should_wait():
                if not answers:
                    self._arrive_late(doing, effect)
                raise unanswered(f"{self.name}: no answer to: {doing}")
        return answers[0] if answers else self._do(process, doing, effect)

    def _arrive_late(self, doing: str, effect: Callable[[], Answer]) -> None:
        """Let a request for whose answer nobody waits arrive some time."""
        arrives = self.scheduler.now + self.scheduler.random() * LATE

        def arrive() -> None:
            if not self.down:
                self.say(self.name, f"{doing}: arrives late")
                with suppress(Exception):  # Nobody waits for its answer.
                    effect()

        self.scheduler.at(arrives, arrive)
        self.scheduler.disturbs(arrives)

    def _with_mishap(
        self,
        kind: str,
        process: Process,
        doing: str,
        effect: Callable[[], Answer],
        unanswered: type[Exception],
    ) -> Answer:
        self.say(process.name, f"{doing}: {kind}")
        pause = self.scheduler.random() ** 2 * self.mishaps.longest_pause
        match kind:
            case "killed before it was sent":
                process.kill()
                raise Killed
            case "killed before the answer":
                self._do(process, doing, effect)
                process.kill()
                raise Killed
            case "paused before it was sent":
                process.pause(pause)
                self.scheduler.sleep(0.0)
                return self._do(process, doing, effect)
            case "paused before the answer":
                answer = self._do(process, doing, effect)
                process.pause(pause)
                self.scheduler.sleep(0.0)
                return answer
            case "request lost" | "repeated":
                raise self._silence(doing, unanswered)
            case "answer lost":
                self._do(process, doing, effect)
                raise self._silence(doing, unanswered)
            case "late":
                return self._late(process, doing, effect, unanswered)
            case _:
                raise self.error(f"{self.name} refuses: {doing}")

    def _repeated(
        self, process: Process, doing: str, effect: Callable[[], Answer], unanswered: type[Exception] | None
    ) -> Answer:
        """The connection breaks before the answer. The client sends the request again; the first copy arrives late."""
        scheduler = self.scheduler
        backoff = UNREPEATED_SECONDS * (1 + scheduler.random() / 2)
        arrives = scheduler.now + backoff + scheduler.random() ** 3 * LATE
        self.say(process.name, f"{doing}: the connection breaks, and a copy is on its way")

        def arrive() -> None:
            if not self.down:
                self.say(process.name, f"{doing}: the first copy arrives")
                with suppress(Exception):  # Nobody waits for its answer.
                    effect()

        scheduler.at(arrives, arrive)
        scheduler.disturbs(arrives)
        scheduler.sleep(backoff)
        return self.call(process, doing, effect, unanswered=unanswered, repeats=True)

    def _late(self, process: Process, doing: str, effect: Callable[[], Answer], unanswered: type[Exception]) -> Answer:
        """Let the request arrive late, even if nobody waits for the answer any more."""
        scheduler = self.scheduler
        answers: list[Answer] = []
        errors: list[Exception] = []
        task: Task = scheduler.current
        number = task.number

        def arrive() -> None:
            if self.down:
                return
            self.say(process.name, f"{doing}: arrives late")
            try:
                answers.append(effect())
            except Exception as error:
                errors.append(error)
            scheduler.wake(task, number)

        arrives = scheduler.now + scheduler.random() ** 2 * LATE
        scheduler.at(arrives, arrive)
        scheduler.disturbs(arrives)
        scheduler.sleep(PATIENCE)
        if errors:
            raise errors[0]
        if not answers:
            raise unanswered(f"{self.name}: no answer to: {doing}")
        return answers[0]

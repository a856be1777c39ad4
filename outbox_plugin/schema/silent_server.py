"""Decides when to give up a server that does not answer a statement. The whole decision is in this file.

A statement may take long because the server works on it: a large delete, a wait for a lock. Or the path to the server
is dead: a proxy accepts requests and answers none, packets vanish, a failed server left the connection half open. From
the statement's connection, the two look alike. So a second connection, the probe, asks the server about the first.

    what is seen                                              action
    silence for less than `PROBE_AFTER_SECONDS`               WAIT
    silence for longer, and no probe under way                PROBE
    the probe is under way, for up to `PROBE_SECONDS`         WAIT
    the probe is under way for longer                         GIVE_UP
    the probe found that the server works on the statement    WAIT, and PROBE again after `PROBE_AGAIN_SECONDS`
    the probe found that it does not, or failed               WAIT for `ANSWER_ON_ITS_WAY_SECONDS`, then GIVE_UP

Every byte that arrives ends the silence. A dead path is given up after at most 2.1 seconds: a shard may be without a
leader for three seconds, so this leaves a standby most of a second to take over.
"""

from __future__ import annotations

from enum import Enum, auto

PROBE_AFTER_SECONDS = 0.5  # Nearly every statement is shorter, so probes are rare.
PROBE_SECONDS = 1.5
PROBE_AGAIN_SECONDS = 1.0
ANSWER_ON_ITS_WAY_SECONDS = 0.5
STOPPED_SECONDS = 1.0  # `tick` is called ten times a second. After a longer gap, it was this process that was stopped.


class ProbeAction(Enum):
    """What to do about a silent server."""

    WAIT = auto()
    PROBE = auto()
    GIVE_UP = auto()


class ProbeResult(Enum):
    """The result of a probe. `LOST`: the server cannot be reached, or is not working on the statement."""

    WORKING = auto()
    LOST = auto()


class Silence:
    """The silence of a server whose answer is awaited. `now` is in seconds of the monotonic clock."""

    def __init__(self, now: float) -> None:
        """Begin the silence."""
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._ticked_at = now
        self._probe_at = now + PROBE_AFTER_SECONDS
        self._probing_since: float | None = None
        self._lost_since: float | None = None

    def report(self, finding: ProbeResult, now: float) -> None:
        """Report the result of a probe."""
        self._probing_since = None
        if finding is ProbeResult.WORKING:
            self._probe_at = now + PROBE_AGAIN_SECONDS
        else:
            self._lost_since = now

    def tick(self, now: float) -> ProbeAction:
        """What to do now. On PROBE, the caller starts a probe, and reports its result with `report`."""
        if now - self._ticked_at > STOPPED_SECONDS:
            self._begin(now)
        self._ticked_at = now
        if self._lost_since is not None:
            return ProbeAction.GIVE_UP if now - self._lost_since >= ANSWER_ON_ITS_WAY_SECONDS else ProbeAction.WAIT
        if self._probing_since is not None:
            return ProbeAction.GIVE_UP if now - self._probing_since >= PROBE_SECONDS else ProbeAction.WAIT
        if now >= self._probe_at:
            self._probing_since = now
            return ProbeAction.PROBE
        return ProbeAction.WAIT

"""Tokens for SASL OAUTHBEARER from a function of the user's, as managed Kafkas need it (OUTBOX_KAFKA_TOKEN_PROVIDER).

The function takes no arguments and returns a token and the time at which it expires, in seconds since the epoch. Each
client of Kafka asks for a token of its own when it is made, and again after four fifths of the token's life. librdkafka
asks on a background thread of the client, so a client that nobody polls has a fresh token, too. Where the function
fails, librdkafka asks again after ten seconds; until then, brokers end connections whose token has expired. A client
that is closed waits for the function, so one that does not return in time counts as failed, too.

Neither a token nor the text of an exception is ever logged: the text may hold a secret, as a URL does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from traceback import walk_tb
from typing import Any

from outbox_plugin.errors import InvalidSetting, LogUnavailable
from outbox_plugin.printable import logger_of, printable
from outbox_plugin.threads.calls_with_deadline import CallOverdue, CallsWithDeadline

logger = logger_of("outbox_plugin.kafka")

ANSWER_SECONDS = 10.0
# Of each client: a call that never returns keeps its thread, but no token from new clients. After a while, a client
# asks again: a call may wait for ever for a server that is gone, though another one answers by now.
_MAX_OVERDUE_CALLS = 2
_FORGOTTEN_AFTER_SECONDS = 900.0
_FARTHEST_SECONDS = 10 * 366 * 86_400.0  # A later end is one in milliseconds, with which nobody would ask again.

Token = tuple[str, float]


class TokenProvider:
    """The user's function, and whether it last failed."""

    def __init__(self, name: str, function: Callable[[], Any]) -> None:
        self._name = name
        self._function = function
        self._lock = threading.Lock()
        self._fails = False

    def calls(self) -> CallsWithDeadline:
        """The calls of one client."""
        return CallsWithDeadline(self._name, "outbox-token", _MAX_OVERDUE_CALLS, _FORGOTTEN_AFTER_SECONDS)

    def next_token(self, calls: CallsWithDeadline) -> Token:
        """A token for a client that has one. Logs when the function begins to fail, and when it returns tokens again.

        Args:
            calls: of the client.

        Raises:
            LogUnavailable: the function raises, or returns no token, or not in time.
        """
        try:
            token = self.first_token(calls)
        except LogUnavailable as error:
            self._note(str(error))
            raise
        self._note(None)
        return token

    def _token(self) -> Token:
        try:
            answer = self._function()
        except BaseException as error:  # It has a thread of its own: no signal's exception is raised there.
            raise LogUnavailable(
                f"{self._name} raises {type(error).__name__} ({_place_of(error)}); its text, which may hold a secret, "
                "is not shown"
            ) from None
        if problem := _problem_of(answer, time.time()):
            raise LogUnavailable(f"{self._name} {problem}")
        return answer[0], float(answer[1])

    def first_token(self, calls: CallsWithDeadline) -> Token:
        """A token for a client that is to be made. Logs nothing.

        Args:
            calls: of the client.

        Raises:
            LogUnavailable: there is no token, or not in time.
        """
        try:
            return calls.result(self._token, ANSWER_SECONDS)
        except CallOverdue as overdue:
            raise LogUnavailable(str(overdue)) from None

    def _note(self, problem: str | None) -> None:
        with self._lock:
            failed, self._fails = self._fails, problem is not None
        if problem is not None and not failed:
            logger.warning("no new token for Kafka, where connections end when theirs expires: %s", problem)
        if problem is None and failed:
            logger.info("%s returns tokens again", self._name)


class TokenCallback:
    """librdkafka's `oauth_cb` of one client."""

    def __init__(self, provider: TokenProvider) -> None:
        """Ask for the first token, so that whoever makes the client is told what is wrong.

        Raises:
            LogUnavailable: there is none.
        """
        self._provider = provider
        self._calls = provider.calls()
        self._first: Token | None = provider.first_token(self._calls)

    def __call__(self, _config: str) -> Token:
        """Return a token; called on a background thread of the client.

        Raises:
            LogUnavailable: there is none; it has been logged.
        """
        first, self._first = self._first, None
        return first if first is not None and time.time() < first[1] else self._provider.next_token(self._calls)


@cache
def token_provider(name: str) -> TokenProvider:
    """The function that OUTBOX_KAFKA_TOKEN_PROVIDER names, as `package.module:function`.

    Raises:
        InvalidSetting: there is no such module, or no such function in it.
    """
    module, _, path = name.partition(":")
    setting = f"OUTBOX_KAFKA_TOKEN_PROVIDER: {name}"
    try:
        function = attrgetter(path)(import_module(module))
    except (ImportError, AttributeError) as error:
        raise InvalidSetting(f"{setting} cannot be imported: {error}") from None
    except (Exception, SystemExit) as error:  # The module itself fails.
        raise InvalidSetting(
            f"{setting} cannot be imported: it raises {type(error).__name__} ({_place_of(error)})"
        ) from None
    if not callable(function):
        raise InvalidSetting(f"{setting} is no function")
    return TokenProvider(setting, function)


def _place_of(error: BaseException) -> str:
    """The file and the line in which an exception was raised."""
    *_, (frame, line) = walk_tb(error.__traceback__)
    return printable(f"{Path(frame.f_code.co_filename).name}:{line}")


def _problem_of(answer: Any, now: float) -> str | None:
    """Why `answer` is not a token and its end, without showing it; None where it is."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        return f"returns {type(answer).__name__}; expected a token, and the seconds since the epoch at which it expires"
    token, expires_at = answer
    if not isinstance(token, str) or not token or not token.isascii() or not token.isprintable():
        return "returns a token that is no text of printable ASCII"
    if isinstance(expires_at, bool) or not isinstance(expires_at, int | float):
        return f"returns {type(expires_at).__name__} for the time of expiry; expected seconds since the epoch"
    if not now < expires_at:
        return "returns a token that has expired"
    if expires_at > now + _FARTHEST_SECONDS:
        return "returns a token that expires in more than ten years; expected seconds since the epoch, not milliseconds"
    return None

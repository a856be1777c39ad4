"""Numbers on the command line: what float() takes and nothing can wait for, or compare with, is refused."""

from __future__ import annotations

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """A click.FloatRange without nan, with which every comparison is false, and without inf."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number.

        Args:
            value: as it was given.
            param: the option, for the message.
            ctx: of the command.

        Raises:
            click.BadParameter: it is no number, not finite, or not in the range.
        """
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"expected a finite number (given: {value})", param, ctx)
        return number

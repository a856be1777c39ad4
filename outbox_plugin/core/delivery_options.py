"""The choices that a user has about delivery; `outbox_plugin.settings` describes them."""

from __future__ import annotations

from typing import Literal

Delivery = Literal["exactly-once", "at-least-once"]
BadRows = Literal["park", "dead-letter"]

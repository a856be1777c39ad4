"""How long the marks of leaders that are replaced are waited for, in at-least-once delivery."""

from __future__ import annotations

ENDINGS = 10  # How many times the session of a mark is ended. Before each, the mark is waited for half a second.
ANY_SHARD = 32_767  # Stands for the marks of all shards: see the statement `begin_marking`.

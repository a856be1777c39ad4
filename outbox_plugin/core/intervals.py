"""How often the relay does things, and how long it waits. All in seconds unless the name says otherwise."""

from __future__ import annotations

# Polls that find nothing.
IDLE_FIRST, IDLE_LAST = 0.001, 0.05  # The backoff between them.
STEADY_SECONDS = 0.025  # If rows come more often than this, the backoff does not grow.
LONG_POLL_SECONDS = 0.005  # A poll without rows takes a tenth of this, unless it walks rows that it cannot see yet.
UNCOMMITTED_SECONDS = 0.005  # Between two checks whether such rows can be seen now. A check costs far less than a poll.
LIVE_POLL_SECONDS = 0.005  # Between polls that read live rows only, while backlog rows wait to be published.
SLEEP_AFTER_SECONDS = 0.1  # After so long without rows, it is cheaper to be woken by writers than to poll.

# What the database says besides rows: commands to the leader, and where the ids stand.
CONTROL_BUSY_SECONDS, CONTROL_IDLE_SECONDS = 0.25, 1.0
CONTROL_SEARCH_SECONDS = 0.02  # When a backlog has just appeared, or while a large transaction is being written.
CONTROL_ASLEEP_SECONDS, READ_ASLEEP_SECONDS = 5.0, 1.0  # While writers wake us, in case one wake-up is lost.

# Errors, bad rows, purges, progress records.
ERROR_FIRST, ERROR_LAST = 0.25, 8.0  # The backoff between terms that fail.
RETRY_BAD_ROW_SECONDS = 10.0  # A bad row that Postgres refuses to park or dead-letter is tried again after so long.
# How long rows wait that may be too large: the first for each window that has such rows, the last at most.
OVERSIZE_FIRST, OVERSIZE_LAST = 1.0, 60.0
PURGE_ROWS, PURGE_REST_SECONDS = 500, 0.02  # Fewer rows wait so long for more, because each purge is a commit.
MANY_ROWS = 500  # From so many rows on, the rows cost more than the query itself.
CLEAR_PROGRESS_SECONDS = 5.0  # An idle leader then writes a progress record that names no rows.
POLL_FIRST, POLL_LAST = 0.1, 1.0  # The backoff of a wait for something that another harvester does once.

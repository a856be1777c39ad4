"""Spark's side of the outbox: business rows and events, written by many tasks, appear in one transaction or not at all.

Tasks copy their rows into staging tables, each under an attempt id of its own. Spark hands the driver the ids of the
attempts that it accepted, one per partition, whatever was retried or speculated. The driver then moves the rows of just
those attempts, business rows and events together, in one transaction that also records the job's id.
"""

from outbox_plugin.extras import hinted

try:
    from outbox_plugin.spark.sink import register
    from outbox_plugin.spark.verify import verify
    from outbox_plugin.spark.write import JobCommitted, OutboxWrite
except ModuleNotFoundError as error:
    raise hinted(__name__, error) from None

__all__ = ["JobCommitted", "OutboxWrite", "register", "verify"]

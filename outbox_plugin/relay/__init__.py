"""The loops that carry out what `core` decides. They get their ports as arguments.

Of their own, they decide only when a stage goes on: whether there is room for another window, or a record is due.

A `Supervisor` runs one election per shard. While a shard is led, the thread of a `LeaderTerm` relays it: three stages,
overlapped on different windows, read, publish, and purge.
"""

"""The loops that carry out what `core` decides. They get their ports as arguments and take no decision of their own.

A `Supervisor` runs one election per shard. While a shard is led, a `Term` of its own thread relays it: three stages,
overlapped on different windows, read, publish, and purge.
"""

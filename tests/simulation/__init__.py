"""Whole harvesters in virtual time, against a simulated Postgres and a simulated Kafka: one seed, one schedule.

    pytest tests/simulation                                        some thousand schedules, and the planted bugs
    pytest tests/simulation/test_promises.py --schedules 100000    a long run; `--first-seed` begins elsewhere
    pytest tests/simulation/test_promises.py -s --seed 4711        one schedule again, with a readable trace

What runs is the product's own code, unchanged: Supervisor, Shard, ExactlyOnce, AtLeastOnce and all of `core`. Only its
ports and its `Runtime` are simulated (`postgres`, `kafka`, `scheduler`): threads are greenlets, every call to a server,
every wait and some of the locks are points where another greenlet may go on, and the seed chooses which. A `plan` is
drawn from the seed: how many harvesters, writers, keys and shards, which faults happen to them (`harvesters`), and what
happens to requests on the way (`network`). When all faults are over and nothing is left to do, `promises` judges the
state of the servers.

What is not simulated: Kafka's protocol below the ports (a transaction is committed in an instant, in all partitions), a
broker that loses what it acknowledged, the adapters and the composition root. The real stores and the simulated one
pass the same tests (`tests/conformance`); Kafka's side is tested on real brokers only.

Left out on purpose, because nothing can be promised for them, are rows that have both the id and the creation time of
earlier ones. So when ids are reused without TRUNCATE, the application leaves creation times to the database.
"""

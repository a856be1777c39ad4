"""What the harvester decides: values in, actions out; no I/O, no clock, no threads, no randomness.

The idea: the Kafka transaction is the commit point, and it names the rows that it published. A *window* of the
earliest rows is read, published in one transaction together with a *progress record* that names every row which is
published but perhaps not yet deleted, and then deleted. A new leader first fences the old one, reads the last committed
progress record, deletes what that names, and only then reads its first window.

Who decides what: the log decides who leads (fencing) and what was published (the progress record); the database
decides which rows there are. A leader's own memory decides nothing that outlives it.
"""

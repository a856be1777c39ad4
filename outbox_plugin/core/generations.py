"""Generations of a transactional id: how a leader goes on while its last transaction cannot end.

Kafka's coordinator writes a marker to every partition that a transaction has touched. While one of them has no leader,
the transaction is decided but not over, and InitProducerId for its id answers CONCURRENT_TRANSACTIONS. So the leader
takes another id: that of the next *generation*, which the database remembers. Generations never go back.

Producers of two ids do not fence each other. So when the new id is used, nobody may be left who can commit under the
old one. That is so because of four rules:

1. A leader writes its name into the database (`lead`), reads the generation, and then fences the id of that generation.
2. After each fence, it asks the database whether it still leads, before it publishes anything.
3. It raises the generation only while the database says that it leads, and only if it has fenced the id before, in the
   same term.
4. Before that it closes its own producer, whose commit was never asked for, or was answered.

Whoever fenced the old id before this leader did is refused by Kafka. Whoever fences it afterwards and began to lead
earlier learns by rule 2 that it leads no more. Whoever begins to lead later keeps this leader from raising the
generation by rule 3, or finds the new one. This leader itself sends no commit any more. So whether the old transaction
has published its rows can no longer change; the progress topic, read to its end, tells it.

A new leader has not fenced the id before. CONCURRENT_TRANSACTIONS tells it nothing: a transaction that waits for its
abort and one that waits for its commit give the same answer, and in the second case the producer that committed is not
fenced. That producer could begin its next transaction as soon as the partition has a leader again. So a new leader
waits.

A database that was restored may have forgotten the last generations. So each progress record says its own, and a new
leader takes the larger of the two.
"""

from __future__ import annotations

LARGEST_GENERATION = 2**31 - 1

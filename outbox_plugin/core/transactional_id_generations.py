"""Generations of a transactional id: how a leader goes on while its last transaction cannot end.

Kafka's coordinator writes a marker to every partition that a transaction has touched. While one of them has no leader,
the transaction is decided but not over, and InitProducerId for its id answers CONCURRENT_TRANSACTIONS. So the leader
takes another id: that of the next *generation*, which the database remembers. Generations never go back.

Producers of two ids do not fence each other. So before the new id is used, nobody may be able to commit under the old
one any more. Four rules ensure that:

1. A leader writes its name into the database (`lead`), reads the generation, and then fences the id of that generation.
2. After each fence, it asks the database whether it still leads, before it publishes anything.
3. It raises the generation only while the database says that it leads, and only if it has fenced the id before, in the
   same term.
4. Before it raises the generation, it closes its own producer. Either it never asked that producer to commit, or the
   commit was answered.

Kafka refuses a leader that fenced the old id before this one did. A leader that began earlier and fences the old id
afterwards learns by rule 2 that it no longer leads. A leader that begins later either keeps this one from raising the
generation, by rule 3, or reads the new generation. This leader itself sends no commit any more. So whether the old
transaction has published its rows can no longer change, and the progress topic, read to its end, shows whether it has.

A new leader has not fenced the id in its term yet, and CONCURRENT_TRANSACTIONS tells it nothing. Kafka gives the same
answer for a transaction that waits for its abort and for one that waits for its commit. In the second case, the
producer that committed is not fenced, and could begin its next transaction as soon as the partition has a leader again.
So a new leader waits.

A database that was restored may have forgotten the last generations. So each progress record contains its generation,
and a new leader takes the larger of the two.
"""

from __future__ import annotations

LARGEST_GENERATION = 2**31 - 1

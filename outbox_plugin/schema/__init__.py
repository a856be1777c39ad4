"""The tables of the outbox: their migrations and the statements that are run on them."""

"""The write side: an application's events become rows of the outbox, in the application's own transaction."""

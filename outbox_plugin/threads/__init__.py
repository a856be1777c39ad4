"""Threads: background services that a caller starts and stops, and calls with a deadline."""

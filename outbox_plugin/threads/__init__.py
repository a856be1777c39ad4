"""Threads with a life that a caller can control: services in the background, and calls that have a deadline."""

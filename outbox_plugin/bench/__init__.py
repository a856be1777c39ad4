"""Benchmarks: ratios against a baseline or a peer that is measured in the same run, because machines are noisy."""

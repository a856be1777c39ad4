"""Benchmarks: ratios against a floor or a peer that is measured in the same run, because machines are noisy."""

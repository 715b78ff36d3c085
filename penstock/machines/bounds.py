"""Bounds of the figures of a machine: beyond them the time of a step would overflow."""

SLOWEST_RATE = 1.0  # FLOP/s or bytes/s
LONGEST_SECONDS = 1e6
LARGEST_RATIO = 1e6  # of two times
SMALLEST_EFFICIENCY = 1e-6

"""Runs a test also with updates that are made before the commit: rightly, in vain, and both.

Every guess then speculates, and to its end, whatever the time allows (`store/flash/guesses.py`).
"""

from grids import quick_first

MODES = ("off", "on", "wrong", "mixed:4")
"""No guesses, right ones, wrong ones, and by a seed: right, right in part, wrong, wrong."""

QUICK_OFF = quick_first(MODES, ["off"])
"""For tests that take long with each of them."""

"""Meaning of a label, shared by the code that creates, counts and sums labels."""

IGNORED_LABEL = -100
"""The label of a token that the loss ignores; the same number as in PyTorch."""

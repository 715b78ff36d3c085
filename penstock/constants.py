"""Constants that folders share which do not import each other."""

IGNORED_LABEL = -100
"""The label of a token that the loss ignores; the same number as in PyTorch."""

"""Constants that folders share which do not import each other."""

IGNORED_LABEL = -100
"""The label of a token that the loss ignores; the same number as in PyTorch."""

SPARSE_RUNS = "expected engines on the CPU, got {got}; other runs cannot have sparse weights yet"
"""The runs that can have sparse weights; `got` names what another run has."""

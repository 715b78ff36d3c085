"""The width of a vector (`vectors.py`), for modules that import no compiler."""

LANES = 16

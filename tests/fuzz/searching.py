"""How long to look for an input that breaks a property: briefly in the suite, for long in a soak.

The brief search makes the same examples every time. Either runs within a limit of memory, and
every example has its time.
"""

from datetime import timedelta

import pytest
from bounded_memory import bounded_memory
from hypothesis import HealthCheck, given, settings

EXAMPLES = pytest.mark.parametrize(
    "examples", [40, pytest.param(10_000, marks=pytest.mark.slow)], ids=["briefly", "for_long"]
)


def search(strategy, holds, examples):
    """Call `holds` with values of a strategy, and fail with the simplest for which it raises."""

    @settings(
        max_examples=examples,
        derandomize=examples < 1000,
        database=None,
        deadline=timedelta(seconds=10),
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(strategy)
    def example(value):
        holds(value)

    with bounded_memory():
        example()

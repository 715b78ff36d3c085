"""The order of test files: those that take one process longest come first.

With `--dist loadfile` a file is one process's work. One that is taken last would be all that runs
at the end, while the other processes have nothing left.
"""

from __future__ import annotations

import pytest

SLOWEST = (  # of `make test-long` on two cores of Zen 3, 2026-11-28
    "tests/unit/training/test_kernel_worker.py",
    "tests/integration/test_best_checkpoint.py",
    "tests/unit/calibration/test_this_host.py",
    "tests/faults/test_simulated_relays.py",
    "tests/integration/test_sparse_workers.py",
    "tests/integration/test_starts_from_a_folder.py",
    "tests/integration/test_sparse_runs.py",
    "tests/integration/test_demo.py",
    "tests/integration/test_stored_buffers.py",
    "tests/unit/sparsity/test_product_memory.py",
    "tests/unit/compiler/test_equal_blocks.py",
    "tests/integration/test_cluster_bits.py",
    "tests/unit/wafer/test_wafer_figures.py",
    "tests/integration/test_simulated_wafer_runs.py",
    "tests/faults/test_ray.py",
    "tests/unit/wafer/test_mesh_products.py",
    "tests/unit/store/test_flash_forecast.py",
)


def slowest_first(items: list[pytest.Item]) -> None:
    """Move the tests of the slowest files to the front; all others keep their order."""
    places = {name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))

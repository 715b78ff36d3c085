"""The number of CPU threads that an engine computes with."""

from __future__ import annotations

import os

import torch


def thread_count(threads: int | None) -> int:
    """Return the CPU threads of an engine: as configured, or every core of this machine."""
    return threads or len(os.sched_getaffinity(0))


def set_threads(threads: int | None) -> None:
    """Use this many CPU threads in PyTorch and in Penstock's kernels; None: every core."""
    import numba

    count = thread_count(threads)
    numba.set_num_threads(min(count, int(numba.config.NUMBA_NUM_THREADS)))  # type: ignore[attr-defined]
    # In this order: Numba starts its threads here, which resets OpenMP's number for PyTorch too,
    # and PyTorch's sums over rows (the gradients of norms) are cut by that number.
    torch.set_num_threads(count)

"""The number of CPU threads of an engine."""

import os

import torch


def thread_count(threads: int | None) -> int:
    """Return the number of CPU threads of an engine: as configured, or every core of this
    machine."""
    return threads or len(os.sched_getaffinity(0))


def set_threads(threads: int | None) -> None:
    """Use this many CPU threads in PyTorch and in Penstock's kernels; None: every core."""
    import numba

    count = thread_count(threads)
    numba.set_num_threads(min(count, int(numba.config.NUMBA_NUM_THREADS)))  # type: ignore[attr-defined]
    # The order matters. Numba starts its threads here, which also resets OpenMP's number for
    # PyTorch. PyTorch divides its sums over rows (the gradients of norms) by that number.
    torch.set_num_threads(count)

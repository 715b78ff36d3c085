"""What a piece of code really allocates: of PyTorch's CPU allocator by its own profiler, of NumPy's
by Python's trace of memory."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, _KinetoProfile


def peak_allocated_bytes(body: Callable[[], object]) -> int:
    """Run `body` and return the most bytes that were allocated in it and alive at once."""
    recorder = _KinetoProfile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    )
    recorder.prepare_trace()
    inner = recorder.profiler
    assert inner is not None
    inner._parse_kineto_results = lambda *_, **__: []  # type: ignore[method-assign]  # slow, unread
    recorder.start_trace()
    with torch.no_grad():
        kept = body()
    recorder.stop_trace()
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in inner.kineto_results.events()
        if event.name() == "[memory]"
    )
    del kept
    alive = peak = 0
    for _, change in changes:
        alive += change
        peak = max(peak, alive)
    return peak


def arrays_allocated(body: Callable[[], object]) -> int:
    """Return the most bytes of NumPy arrays and Python objects that `body` has alive at once."""
    gc.collect()
    tracemalloc.start()
    try:
        body()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

"""What PyTorch's CPU allocator really hands out during a piece of code, by its own profiler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_allocated_bytes(body: Callable[[], object]) -> int:
    """Run `body` and return the most bytes that were allocated in it and alive at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded, torch.no_grad():
        kept = body()
    events = recorded.profiler.kineto_results.events()
    changes = sorted(
        ((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"),
        key=lambda change: change[0],
    )
    alive = peak = 0
    for _, change in changes:
        alive += change
        peak = max(peak, alive)
    del kept
    return peak

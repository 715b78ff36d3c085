"""What a GPU does during a step: its copies and its computation, from PyTorch's profiler."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.telemetry import StepDone

WAITS = 12  # the longest of a step that are returned


def trace(step: Callable[[], StepDone]) -> dict:
    """Record one step's device work; return rates and overlap of the copies to the device, and the
    longest waits between computations: when, from the first one on, and for how long.

    Weights arrive while they are copied, or gathered from other devices.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
            started = time.perf_counter()
            streamed_bytes = step().streamed_bytes
            for device in range(torch.cuda.device_count()):
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - started
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    timed = [e for e in events if e.get("ph") == "X"]
    copies = [e for e in timed if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"]]
    kernels = [e for e in timed if e.get("cat") == "kernel"]
    gathers = [e for e in kernels if "nccl" in e["name"] and "AllGather" in e["name"]]
    arriving = merged([(e["ts"], e["ts"] + e["dur"]) for e in [*copies, *gathers]])
    computing = [e for e in kernels if "nccl" not in e["name"]]
    kernels = merged([(e["ts"], e["ts"] + e["dur"]) for e in computing])
    copying = merged([(e["ts"], e["ts"] + e["dur"]) for e in copies])
    waits = [(a, b - a) for (_, a), (b, _) in pairwise(kernels)]
    copied = sum(e["args"].get("bytes", 0) for e in copies)
    copy_time = sum(b - a for a, b in copying)
    return {
        "copied_bytes": copied,
        "copy_gb_per_second": copied / max(copy_time, 1e-9) / 1e3,  # bytes per microsecond
        "arrive_gb_per_second": streamed_bytes / sum(b - a for a, b in arriving) / 1e3,
        "overlap": common(copying, kernels) / max(copy_time, 1e-9),
        "compute_share": sum(b - a for a, b in kernels) / 1e6 / seconds,
        "waits_ms": [
            {"at": round((at - kernels[0][0]) / 1e3, 1), "for": round(length / 1e3, 2)}
            for at, length in sorted(sorted(waits, key=lambda wait: -wait[1])[:WAITS])
        ],
        "pageable_copies": sum("Pageable" in e["name"] for e in copies),
    }


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return spans of time as disjoint ones, in order."""
    result: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def common(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    """Return how long two lists of disjoint spans in order overlap."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total

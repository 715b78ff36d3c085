"""The products of expanded weights on a GPU, beside those of dense weights."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from penstock.sparsity import (
    MaskBitmap,
    entry_gradient,
    expand,
    host_bitmap,
    index_of_mask,
    multiply_expanded,
)
from side_by_side.figures import print_table


def time_products(
    shape: tuple[int, int], tokens: int, sparsity: float, device: str = "cuda"
) -> dict[str, Any]:
    """Time the three products of an expanded weight beside those of a dense one, in bf16; compare
    their bits."""
    torch.use_deterministic_algorithms(True)
    kept = np.random.default_rng(0).random(shape) >= sparsity
    bitmap = host_bitmap(index_of_mask(kept.reshape(-1)), shape)
    mask = MaskBitmap(shape, bitmap.row_starts, bitmap.bits.to(device))
    options = {"dtype": torch.bfloat16, "device": device}
    values = torch.randn(mask.entries, **options)
    x, dy = torch.randn(tokens, shape[1], **options), torch.randn(tokens, shape[0], **options)
    dense, where = expand(mask, values), torch.from_numpy(kept).to(device)
    pairs = {
        "forward": (lambda: multiply_expanded(mask, values, x), lambda: x @ dense.t()),
        "input gradient": (
            lambda: multiply_expanded(mask, values, dy, transposed=True),
            lambda: dy @ dense,
        ),
        "weight gradient": (lambda: entry_gradient(mask, dy, x), lambda: dy.t() @ x),
    }
    same = torch.equal(dense[where], values) and not dense[~where].any()
    for name, (ours, theirs) in pairs.items():
        found, expected = ours(), theirs()
        if name != "weight gradient":
            same = same and torch.equal(found, expected)
            continue
        expected = expected[where].float()  # of one product; bands of rows may round otherwise
        same = same and torch.allclose(found, expected, rtol=2**-6, atol=2**-6 * tokens**0.5)
        same = same and torch.equal(found, ours())
    seconds = {name: [device_seconds(way) for way in ways] for name, ways in pairs.items()}
    return {
        "shape": list(shape),
        "sparsity": sparsity,
        "tokens": tokens,
        "same": bool(same),
        "seconds": {name: found[0] for name, found in seconds.items()},
        "over_dense": {name: found[0] / found[1] for name, found in seconds.items()},
    }


def device_seconds(act: Callable[[], object], repetitions: int = 20) -> float:
    """Return the median time of a call on the device."""
    times = []
    for _ in range(repetitions):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        act()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def print_products(rows: list[dict[str, Any]]) -> None:
    """Print the times of sparse products."""
    sparsity = rows[0]["sparsity"]
    print(f"\nproducts of expanded weights, bf16, sparsity {sparsity}: ms (over the dense product)")
    names = list(rows[0]["seconds"])
    print_table(
        {"shape": 14, "tokens": 7, **dict.fromkeys(names, 16), "bits": 5},
        (
            (
                "x".join(map(str, row["shape"])),
                f"{row['tokens']}",
                *(f"{1e3 * row['seconds'][n]:.3f} ({row['over_dense'][n]:.2f})" for n in names),
                "same" if row["same"] else "NOT",
            )
            for row in rows
        ),
    )

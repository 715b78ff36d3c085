"""The products of expanded weights on a GPU, beside those of dense weights."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from penstock.sparsity import (
    ExpandedProducts,
    MaskBitmap,
    expand,
    host_bitmap,
    index_of_mask,
)
from penstock.sparsity.expanded_products import bands_of
from side_by_side.figures import print_table


def time_products(
    shape: tuple[int, int], tokens: int, sparsity: float, device: str = "cuda"
) -> dict[str, Any]:
    """Time the three products of an expanded weight beside those of a dense one, in bf16, and the
    expansion, which a stage does once, beside the first of them; compare their bits."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # as in an engine
    kept = np.random.default_rng(0).random(shape) >= sparsity
    bitmap = host_bitmap(index_of_mask(kept.reshape(-1)), shape)
    mask = MaskBitmap(shape, bitmap.row_starts, bitmap.bits.to(device))
    options = {"dtype": torch.bfloat16, "device": device}
    values = torch.randn(mask.entries, **options)
    x, dy = torch.randn(tokens, shape[1], **options), torch.randn(tokens, shape[0], **options)
    dense, where = expand(mask, values), torch.from_numpy(kept).to(device)
    products = ExpandedProducts(mask, values)
    pairs = {
        "expansion": (lambda: expand(mask, values), lambda: x @ dense.t()),
        "forward": (lambda: products.multiply(x), lambda: x @ dense.t()),
        "input gradient": (lambda: products.multiply(dy, transposed=True), lambda: dy @ dense),
        "weight gradient": (lambda: products.entry_gradient(dy, x), lambda: dy.t() @ x),
    }
    same = torch.equal(dense[where], values) and not dense[~where].any()
    for name in ("forward", "input gradient"):
        ours, theirs = pairs[name]
        same = same and torch.equal(ours(), theirs())
    # A band is a dense product of its own: one of all rows may round otherwise.
    bands = [torch.mm(dy[:, b.start : b.stop].t(), x) for b in bands_of(shape)]
    same = same and torch.equal(products.entry_gradient(dy, x), torch.cat(bands)[where].float())
    seconds = {name: [device_seconds(way) for way in ways] for name, ways in pairs.items()}
    return {
        "shape": list(shape),
        "sparsity": sparsity,
        "tokens": tokens,
        "same": bool(same),
        "seconds": {name: found[0] for name, found in seconds.items()},
        "over_dense": {name: found[0] / found[1] for name, found in seconds.items()},
    }


def device_seconds(act: Callable[[], object], repetitions: int = 5, calls: int = 10) -> float:
    """Return the time of a call on the device, the median over some queues of calls.

    Calls are queued one after the other without waiting for the device. The first ones, during
    which the device waits for the host, are not counted.
    """
    times = []
    for _ in range(repetitions):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        act()
        begin.record()
        for _ in range(calls):
            act()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / calls)
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

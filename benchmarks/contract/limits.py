"""What the machine can do at most, measured in the same run: dense products, copies, the disk.

A ratio to another program changes with the processor; the share of the machine's own limit says
what is left to gain. As a program this file is a process that measures: all limits at once, or, as
a worker (`side_by_side`), one limit in turns with the loops that a benchmark compares.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from side_by_side import Worker, serve

# [tokens, inner] x [inner, outer], as in the blocks of a model of some hundred million parameters;
# as many operations each. Which is the fastest differs between processors and types.
_SIZES = ((1024, 2048, 2048), (2048, 1024, 2048), (2048, 2048, 1024))
_PRODUCTS = 8
PRODUCT_FLOPS = 2 * math.prod(_SIZES[0]) * _PRODUCTS
"""Floating-point operations of one step of the worker that multiplies."""
READ_BYTES = 512 << 20
"""Bytes of memory that one step of the worker that reads reads."""

_COPY_BYTES, _DISK_BYTES = 256 << 20, 256 << 20
_REPETITIONS = 5
PRECISIONS = ("fp32", "bf16")


@dataclasses.dataclass(frozen=True)
class Limit:
    """What the worker measures: dense products in a precision, or reads of memory."""

    of: Literal["fp32", "bf16", "reads"]


def start_products(precision: str) -> Worker:
    """Start a worker whose step is `PRODUCT_FLOPS` operations of dense products.

    It takes the fastest of some sizes and, in fp32, of PyTorch's own library and oneDNN.
    """
    return Worker(Limit(precision), __file__)


def start_reads() -> Worker:
    """Start a worker whose step reads `READ_BYTES` of memory, more than caches hold."""
    return Worker(Limit("reads"), __file__)


def limits_of_this_machine(
    *, products: Iterable[str] = (), copy: bool = False, folder: str | Path | None = None
) -> dict[str, Any]:
    """Measure limits in a process of its own, whose threads and memory then are gone.

    Args:
        products: the precisions whose dense products are measured, of `fp32` and `bf16`.
        copy: measure a copy in memory.
        folder: of the disk that is measured by direct reads and writes.

    Returns:
        `products_gflop_per_second` by precision, `copy_gb_per_second` (bytes copied, each of which
        is read and written), `disk_read_gb_per_second` and `disk_write_gb_per_second`; `None` for a
        disk without direct I/O.
    """
    asked = {
        "products": list(products),
        "copy": copy,
        "folder": None if folder is None else str(folder),
    }
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(asked)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def print_limits(limits: Mapping[str, Any]) -> None:
    """Print limits for people."""
    said = [
        f"dense products {rate:,.0f} GFLOP/s in {precision}"
        for precision, rate in limits.get("products_gflop_per_second", {}).items()
    ]
    for key, what in (
        ("copy_gb_per_second", "a copy in memory"),
        ("disk_read_gb_per_second", "the disk, read directly,"),
        ("disk_write_gb_per_second", "written directly,"),
    ):
        if limits.get(key) is not None:
            said.append(f"{what} {limits[key]:.2f} GB/s")
    print(f"the machine's own limits: {', '.join(said)}", flush=True)


def _measure(products: list[str], copy: bool, folder: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if products:
        rates = {}
        for precision in products:
            step = _product_step(precision)
            rates[precision] = round(PRODUCT_FLOPS / _median_seconds(step) / 1e9, 1)
        found["products_gflop_per_second"] = rates
    if copy:
        found["copy_gb_per_second"] = round(_COPY_BYTES / _median_seconds(_copy_step()) / 1e9, 2)
    if folder is not None:
        found |= _disk_rates(folder)
    return found


def _median_seconds(step: Callable[[], object]) -> float:
    step()
    seconds = []
    for _ in range(_REPETITIONS):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _product_step(precision: str) -> Callable[[], object]:
    import torch

    from penstock.compiler import has_onednn

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    forms: list[Callable[[], object]] = []
    for tokens, inner, outer in _SIZES:
        left, right = torch.randn(tokens, inner).to(dtype), torch.randn(inner, outer).to(dtype)
        out = torch.empty(tokens, outer, dtype=dtype)
        forms.append(functools.partial(torch.mm, left, right, out=out))
        if precision == "fp32" and has_onednn():
            turned = right.t().contiguous()
            linear = torch.ops.mkldnn._linear_pointwise.default
            forms.append(functools.partial(linear, left, turned, None, "none", [], ""))
    fastest = min(forms, key=_median_seconds)

    def step() -> float:
        for _ in range(_PRODUCTS):
            fastest()
        return 0.0

    return step


def _copy_step() -> Callable[[], object]:
    import torch

    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def _read_step() -> Callable[[], float]:
    import torch

    numbers = torch.ones(READ_BYTES // 4)
    return lambda: float(numbers.sum())


def _disk_rates(folder: str) -> dict[str, float | None]:
    from side_by_side.pace import Pace
    from side_by_side.plain_disk import NoDirectIO, PlainDisk

    keys = ("disk_read_gb_per_second", "disk_write_gb_per_second")
    with tempfile.TemporaryDirectory(dir=folder) as own:
        try:
            disk = PlainDisk(Path(own) / "file", 2 * _DISK_BYTES, Pace(None))
        except NoDirectIO:
            return dict.fromkeys(keys)
        steps = (lambda: disk.move(_DISK_BYTES, 0), lambda: disk.move(0, _DISK_BYTES))
        rates = [round(_DISK_BYTES / _median_seconds(step) / 1e9, 3) for step in steps]
    return dict(zip(keys, rates, strict=True))


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        limit = Limit(**json.loads(sys.argv[2]))
        serve(_read_step() if limit.of == "reads" else _product_step(limit.of))  # type: ignore[arg-type]
    else:
        print(json.dumps(_measure(**json.loads(sys.argv[1]))))

"""Does the optimizer run at the speed of memory?

Updates some tens of millions of parameters in one fused pass and compares the bytes it moves per
second with the in-place limit of the machine: a pass that reads and writes one float32 array and
does nothing but scale it. The two are measured in turns, the limit before and after every
optimizer pass, since the bandwidth of a shared host drifts within seconds. A repetition in which
our threads had to wait for a processor is thrown away (Linux tells; elsewhere all are kept).

    python benchmarks/optimizer_pass.py [--quick]

`value` is the lesser share of the limit of AdamW on a float32 master and AdamW on a split master.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
from contract import describe_machine, print_result
from numba import prange

from penstock.kernels.adamw import adamw
from penstock.kernels.blocks import block_bounds, block_count
from penstock.kernels.gradients import copy_gradient
from penstock.kernels.lion import lion
from penstock.kernels.memory import allocate
from penstock.kernels.sgd import sgd_momentum
from penstock.kernels.split_master import split
from penstock.kernels.vectors import every_lane, load, splat, store

HYPER = {
    "learning_rate": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "weight_decay": 0.1,
    "gradient_scale": 0.5,
}
STEP = 10
COUNTED = ("AdamW, float32 master", "AdamW, split master, bfloat16 gradient")
WAIT_SHARE = 0.02
ENOUGH = 5


@numba.njit(parallel=True, nogil=True, error_model="numpy")
def scale_in_place(array: np.ndarray, factor: np.float32) -> None:
    """The limit: read 64 bytes, multiply, write them back; whole vectors only."""
    for block in prange(block_count(array.size)):
        first, whole, _ = block_bounds(block, array.size)
        for i in range(first, whole, 16):
            store(array, i, load(array, i, every_lane()) * splat(factor), every_lane())


def waited_seconds() -> float | None:
    """How long the threads of this process have been ready to run without running, or None."""
    total = 0
    try:
        for thread in Path("/proc/self/task").iterdir():
            total += int((thread / "schedstat").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return total / 1e9


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def array_of(count: int, dtype: type) -> np.ndarray:
    """An array as the store has them: same allocator, same pages."""
    return allocate(count * np.dtype(dtype).itemsize).view(dtype)


def variants(count: int) -> list[tuple[str, int, Callable[[], object]]]:
    """`(name, bytes moved per parameter, one pass)` for everything that is measured."""
    import torch

    generator = np.random.default_rng(0)
    weight, gradient, average, square = (array_of(count, np.float32) for _ in range(4))
    for start in range(0, count, 1 << 20):
        part = slice(start, min(start + (1 << 20), count))
        size = part.stop - part.start
        weight[part] = 0.02 * generator.standard_normal(size, dtype=np.float32)
        gradient[part] = 1e-3 * generator.standard_normal(size, dtype=np.float32)
    high, low, rounded = (array_of(count, np.uint16) for _ in range(3))
    split(weight, high, low)
    copy_gradient(gradient, rounded)

    parameter = torch.nn.Parameter(torch.from_numpy(weight))
    parameter.grad = torch.from_numpy(gradient)
    torch_adamw = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.95), fused=True)
    momentum = {
        "step": STEP,
        "learning_rate": 1e-3,
        "momentum": 0.9,
        "nesterov": False,
        "weight_decay": 0.1,
    }
    halves = (high, low)

    def adamw_pass(master: tuple, incoming: np.ndarray) -> Callable[[], object]:
        return lambda: adamw(master, incoming, average, square, step=STEP, epsilon=1e-8, **HYPER)

    return [
        (COUNTED[0], 28, adamw_pass((weight,), gradient)),
        (COUNTED[1], 26, adamw_pass(halves, rounded)),
        (
            "SGD with momentum, float32 master",
            20,
            lambda: sgd_momentum((weight,), gradient, average, **momentum),
        ),
        (
            "SGD with momentum, split master, bfloat16 gradient",
            18,
            lambda: sgd_momentum(halves, rounded, average, **momentum),
        ),
        (
            "Lion, split master, bfloat16 gradient",
            18,
            lambda: lion(halves, rounded, average, step=STEP, **HYPER | {"beta2": 0.99}),
        ),
        (
            "gradient in, rounded to bfloat16, squared, summed",
            6,
            lambda: copy_gradient(gradient, rounded),
        ),
        ("PyTorch: fused AdamW, float32", 28, torch_adamw.step),
    ]


def measure(count: int, seconds: float) -> list[dict]:
    """Share of the limit of each variant: the median over clean repetitions, taken in turns."""
    limit_array = array_of(2 * count, np.float32)
    limit_array.fill(1.0)

    def limit() -> None:
        scale_in_place(limit_array, np.float32(1.0000001))

    chosen = variants(count)
    for _, _, function in chosen:
        function()
    limit()
    limit()
    clean: list[list[tuple[float, float, float]]] = [[] for _ in chosen]
    every: list[list[tuple[float, float, float]]] = [[] for _ in chosen]
    # A busy host gets twice the time to be quiet for a moment.
    start = time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds or (
        spent < 2 * seconds and min(map(len, clean)) < ENOUGH
    ):
        for index, (_, bytes_each, function) in enumerate(chosen):
            waited = waited_seconds()
            before, own, after = timed(limit), timed(function), timed(limit)
            now = waited_seconds()
            limit_rate = 2 * 8 * 2 * count / (before + after)
            rate = bytes_each * count / own
            every[index].append((rate / limit_rate, rate, limit_rate))
            delay = 0.0 if now is None or waited is None else now - waited
            if delay < WAIT_SHARE * (before + own + after):
                clean[index].append(every[index][-1])
    rows = []
    for index, (name, bytes_each, _) in enumerate(chosen):
        kept = clean[index] if len(clean[index]) >= ENOUGH else every[index]
        share, rate, limit_rate = (statistics.median(column) for column in zip(*kept, strict=True))
        rows.append(
            {
                "name": name,
                "bytes_per_parameter": bytes_each,
                "share": share,
                "gb_per_second": rate / 1e9,
                "limit_gb_per_second": limit_rate / 1e9,
                "clean": len(clean[index]),
                "repetitions": len(every[index]),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the same, smaller")
    quick = parser.parse_args().quick
    count = (1 << 24) if quick else (1 << 25)
    machine = describe_machine()
    rows = measure(count, 8.0 if quick else 45.0)
    print(f"{count / 1e6:.1f} million parameters, {numba.get_num_threads()} threads")
    print(f"{'one pass':52s} {'B/param':>7s} {'GB/s':>6s} {'limit':>6s} {'share':>6s}  clean")
    for row in rows:
        print(
            f"{row['name']:52s} {row['bytes_per_parameter']:7d} {row['gb_per_second']:6.1f} "
            f"{row['limit_gb_per_second']:6.1f} {row['share']:6.1%}  "
            f"{row['clean']}/{row['repetitions']}"
        )
    counted = [row for row in rows if row["name"] in COUNTED]
    enough = all(row["clean"] >= ENOUGH for row in counted)
    busy = "other work kept the processors busy: too few repetitions had them alone"
    print_result(
        "optimizer_pass",
        round(min(row["share"] for row in counted), 4) if enough else None,
        target=0.9,
        unit="share of the in-place memory limit",
        machine=machine,
        quick=quick,
        **({} if enough else {"skipped": busy}),
        threads=numba.get_num_threads(),
        rows=rows,
    )


if __name__ == "__main__":
    main()

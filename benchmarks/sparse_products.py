"""Are the products of sparse weights faster than dense ones, and by how much?

Forward, gradient of the inputs and gradient of the kept entries, all three together, packing of
activations into panels included: against dense products of PyTorch of the same type, against
`torch.sparse_csr` and, where it is installed, against SparseProp, also on the grid that its authors
published. The programs take turns within a repetition; a repetition in which our threads had to
wait for a processor is thrown away (Linux tells; elsewhere all are kept).

`torch.sparse_csr` multiplies activations `[features, tokens]`. `/sparse` is the speed-up with what
both need for activations `[tokens, features]`: its transposed copies and our packing. (With the
same tensors by strides, without a copy of the inputs, its products take longer by as much.)
`/alone` estimates that of the products without either; it has no target. A program that takes over
four times as long as the dense products is timed once, before the turns.

Beside every row stands the share of the machine's limit: the rate of multiply-adds that each load
their 64 bytes from a panel as large as half of the second-level cache. The column `/best` is the
speed-up over dense products by the library that the compiler chooses on this processor, which in
float32 is not always PyTorch's.

    python benchmarks/sparse_products.py [--quick] [--precision fp32|bf16 ...]

`value` is the least speed-up over its own target. Targets over dense products depend on the
processor: one with a matrix unit (AMX) multiplies dense bfloat16 several times faster. Over
SparseProp, where it is installed, the target is 1 in every row in fp32, at every sparsity.
"""

import penstock  # isort: skip  # noqa: F401 (first: PyTorch reads how its threads wait at import)

import argparse
import importlib.util
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numba
import numpy as np
import torch
from contract import describe_machine, plain_precisions, print_result
from numba import prange
from optimizer_pass import timed, waited_seconds

from penstock.compiler import products_for
from penstock.compiler.matmul_backend import product
from penstock.engine import keep_freed_pages
from penstock.kernels.memory import cache_lines
from penstock.kernels.processor import Processor
from penstock.kernels.vectors import every_lane, fma, load, splat, sum_lanes, widened
from penstock.sparsity import (
    Choice,
    DenseTiles,
    SparseKernel,
    SparseLayout,
    choose_product,
    forward,
    input_gradient,
    weight_gradient,
)
from penstock.sparsity.product_choice import Product
from penstock.sparsity.product_measurement import cache_bytes

SHAPES = ((2048, 2048), (768, 3072), (2048, 8192))  # outputs and inputs
TOKENS = (256, 1024, 4096)
SPARSITIES = (0.5, 0.75, 0.9, 0.95, 0.99)
PUBLISHED = ((256, 512), 128, (0.8, 0.9, 0.95, 0.99))  # SparseProp, arXiv:2302.04852
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Speed-up over dense products of the same type, by whether there is a matrix unit.
TARGETS = {
    ("fp32", False): {0.9: 6.0, 0.95: 11.0},
    ("fp32", True): {0.9: 5.0, 0.95: 9.0},
    ("bf16", False): {0.9: 4.5, 0.95: 8.5},
    ("bf16", True): {0.5: 0.95, 0.75: 0.95, 0.9: 1.2, 0.95: 2.5, 0.99: 2.5},
}
OVER_LIBRARY = 3.5  # speed-up over torch.sparse_csr
OVER_SPARSEPROP = 1.0  # in every row that it computes, so in fp32
WAIT_SHARE = 0.02
ENOUGH = 5
MOST = 40
SLOW = 4.0  # a program that takes so many times as long as the dense products is timed once


@numba.njit(parallel=True, nogil=True, error_model="numpy")
def load_bound(panels: np.ndarray, repetitions: int, totals: np.ndarray) -> None:
    """The limit: one load of 16 numbers per multiply-add, eight sums at a time."""
    for part in prange(panels.shape[0]):
        panel = panels[part]
        a = b = c = d = splat(np.float32(0))
        e = f = g = h = splat(np.float32(0))
        factor = splat(np.float32(0.5))
        lanes = every_lane()
        for _ in range(repetitions):
            for i in range(0, panel.size, 128):
                a = fma(load(panel, i, lanes), factor, a)
                b = fma(load(panel, i + 16, lanes), factor, b)
                c = fma(load(panel, i + 32, lanes), factor, c)
                d = fma(load(panel, i + 48, lanes), factor, d)
                e = fma(load(panel, i + 64, lanes), factor, e)
                f = fma(load(panel, i + 80, lanes), factor, f)
                g = fma(load(panel, i + 96, lanes), factor, g)
                h = fma(load(panel, i + 112, lanes), factor, h)
        total = ((a + b) + (c + d)) + ((e + f) + (g + h))
        totals[part] = sum_lanes(widened(total))


class Limit:
    """The rate of load-bound multiply-adds, on all threads.

    A load of 64 bytes has 16 numbers in fp32 and 32 in bf16.
    """

    def __init__(self) -> None:
        size = cache_bytes()[1] // 2 // 4 // 128 * 128
        threads = numba.get_num_threads()
        self.panels = cache_lines(threads * size, np.float32).reshape(threads, size)
        self.panels[:] = 1
        self.totals = np.empty(len(self.panels))
        self.repetitions = max(1, (1 << 22) // size)
        self.run()

    def run(self) -> None:
        load_bound(self.panels, self.repetitions, self.totals)

    def gflop_per_second(self, seconds: float, type_name: str) -> float:
        flops = 2 * self.panels.size * self.repetitions * (2 if type_name == "bf16" else 1)
        return flops / seconds / 1e9


@dataclass
class Cell:
    """One weight, one type, one number of tokens; inputs of all programs."""

    shape: tuple[int, int]
    tokens: int
    sparsity: float
    type_name: str
    dense: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = np.random.default_rng(0)
        rows, columns = self.shape
        self.mask = generator.random(self.shape) >= self.sparsity
        starts = np.zeros(rows + 1, np.int64)
        np.cumsum(self.mask.sum(axis=1), out=starts[1:])
        indices = np.nonzero(self.mask)[1].astype(np.int32)
        self.layout = SparseLayout.of(starts, indices, self.shape)

        def random(*shape: int) -> torch.Tensor:
            numbers = generator.standard_normal(shape, dtype=np.float32)
            return torch.from_numpy(numbers).to(TYPES[self.type_name])

        self.values = random(self.layout.entries)
        self.dense = torch.zeros(self.shape, dtype=TYPES[self.type_name])
        self.dense[torch.from_numpy(self.mask)] = self.values
        self.x, self.dy = random(self.tokens, columns), random(self.tokens, rows)
        self.flops = 3 * 2 * self.layout.entries * self.tokens

    def dense_products(self) -> Callable[[], object]:
        y, dx, dw = (torch.empty_like(t) for t in (self.dy, self.x, self.dense))

        def run() -> None:
            torch.mm(self.x, self.dense.t(), out=y)
            torch.mm(self.dy, self.dense, out=dx)
            torch.mm(self.dy.t(), self.x, out=dw)

        return run

    def best_dense_products(self) -> Callable[[], object]:
        library = products_for(Processor.here())

        def run() -> None:
            product(self.x, self.dense.t(), library)
            product(self.dy, self.dense, library)
            product(self.dy.t(), self.x, library)

        return run

    def own_products(self, choice: Choice) -> Callable[[], object]:
        def run() -> None:
            forward(self.layout, self.values, self.x, choice=choice)
            input_gradient(self.layout, self.values, self.dy, choice=choice)
            weight_gradient(self.layout, self.x, self.dy, choice=choice)

        return run

    def packing(self, choice: Choice) -> Callable[[], object] | None:
        """What is packed and unpacked around the products: they without any entry."""
        none = SparseLayout.of(
            np.zeros(self.shape[0] + 1, np.int64), np.empty(0, np.int32), self.shape
        )
        values = self.values[:0]
        if not any(isinstance(p, SparseKernel) for p in products_of(choice)):
            return None

        def run() -> None:
            if isinstance(choice.forward, SparseKernel):
                forward(none, values, self.x, choice=choice)
            if isinstance(choice.input_gradient, SparseKernel):
                input_gradient(none, values, self.dy, choice=choice)
            if isinstance(choice.weight_gradient, SparseKernel):
                weight_gradient(none, self.x, self.dy, choice=choice)

        return run

    def torch_sparse(self) -> dict[str, Callable[[], object]]:
        """The products of `torch.sparse_csr`, and the copies around them, as two programs."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # sparse_csr is a beta in PyTorch
            weight = self.dense.to_sparse_csr()
            transposed = self.dense.t().contiguous().to_sparse_csr()
        x, dy = self.x.t().contiguous(), self.dy.t().contiguous()

        def run() -> None:
            weight @ x
            transposed @ dy
            torch.sparse.sampled_addmm(weight, dy, self.x, beta=0.0)

        def copies() -> None:
            for activations in (self.x, dy, self.dy, x):
                activations.t().contiguous()

        return {"torch_sparse": run, "torch_sparse_copies": copies}


def in_turns(
    programs: dict[str, Callable[[], object]], seconds: float
) -> tuple[dict[str, list[float]], set[str], int, int]:
    """Return each program's seconds per repetition, which programs were timed once, and how many
    repetitions were clean and made."""
    first = {name: (program(), timed(program))[1] for name, program in programs.items()}
    slow = {name for name, took in first.items() if took > SLOW * first["dense"]}
    clean: list[dict[str, float]] = []
    every: list[dict[str, float]] = []
    start = time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds or (
        spent < 10 * seconds and len(clean) < ENOUGH
    ):
        waited = waited_seconds()
        took = {name: timed(run) for name, run in programs.items() if name not in slow}
        now = waited_seconds()
        delay = 0.0 if now is None or waited is None else now - waited
        every.append(took | {name: first[name] for name in slow})
        if delay < WAIT_SHARE * sum(took.values()):
            clean.append(every[-1])
        if len(clean) >= MOST:
            break
    kept = clean if len(clean) >= ENOUGH else every
    took = {name: [row[name] for row in kept] for name in programs}
    return took, slow, len(clean), len(every)


class Saved:
    """Stands for autograd's context: SparseProp's forward keeps here what its backward reads,
    some of it as attributes."""

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors


def sparseprop_products(cell: Cell) -> Callable[[], object] | None:
    """SparseProp's linear layer with the same weight, forward and backward, if it is installed."""
    if cell.type_name != "fp32" or importlib.util.find_spec("sparseprop") is None:
        return None
    from sparseprop.modules import SparseLinear
    from sparseprop.modules.functions import SparseLinearFunction

    layer = SparseLinear(cell.dense)
    values = layer.W_val.detach()

    def run() -> None:
        saved = Saved()
        SparseLinearFunction.forward(saved, cell.x, values, layer.W_idx, None, layer.N)
        SparseLinearFunction.backward(saved, cell.dy)

    return run


def measure(cell: Cell, limit: Limit, seconds: float, *, published: bool = False) -> dict:
    """One row: medians over clean repetitions, ratios within each of them."""
    choice = choose_product(cell.shape, TYPES[cell.type_name], cell.sparsity, cell.tokens)
    programs = {
        "dense": cell.dense_products(),
        "best_dense": cell.best_dense_products(),
        "ours": cell.own_products(choice),
    }
    packing = cell.packing(choice)
    if packing is not None:
        programs["packing"] = packing
    if cell.type_name == "fp32":
        programs |= cell.torch_sparse()
    peer = sparseprop_products(cell)
    if peer is not None:
        programs["sparseprop"] = peer
    programs["limit"] = limit.run
    took, once, clean, every = in_turns(programs, seconds)

    packed = took.get("packing", [0.0] * len(took["ours"]))
    ours_alone = [a - b for a, b in zip(took["ours"], packed, strict=True)]

    def over(*names: str, ours: list[float] = took["ours"]) -> float | None:
        if names[0] not in took:
            return None
        theirs = [sum(times) for times in zip(*(took[name] for name in names), strict=True)]
        return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))

    ours = statistics.median(took["ours"])
    limit_rate = limit.gflop_per_second(statistics.median(took["limit"]), cell.type_name)
    rate = cell.flops / ours / 1e9
    row = {
        "shape": list(cell.shape),
        "tokens": cell.tokens,
        "type": cell.type_name,
        "sparsity": cell.sparsity,
        "dense_ms": statistics.median(took["dense"]) * 1e3,
        "ours_ms": ours * 1e3,
        "packing_ms": statistics.median(took.get("packing", [0.0])) * 1e3,
        "over_dense": over("dense"),
        "over_best_dense": over("best_dense"),
        "over_torch_sparse": over("torch_sparse", "torch_sparse_copies"),
        "over_torch_sparse_alone": over("torch_sparse", ours=ours_alone),
        "gflop_per_second": rate,
        "limit_gflop_per_second": limit_rate,
        "share_of_limit": rate / limit_rate,
        "clean": clean,
        "repetitions": every,
        "choice": choice.as_record(),
        "over_sparseprop": over("sparseprop"),
        "timed_once": sorted(once),
        "published": published,
    }
    return row


def ratio_to_target(row: dict, has_matrix_unit: bool) -> float | None:
    """The least of a row's speed-ups over their targets; None where none applies."""
    target = TARGETS[row["type"], has_matrix_unit].get(row["sparsity"])
    ratios = []
    if row["over_sparseprop"] is not None:
        ratios.append(row["over_sparseprop"] / OVER_SPARSEPROP)
    if target is not None and not row["published"]:
        ratios.append(row["over_dense"] / target)
        if row["over_torch_sparse"] is not None:
            ratios.append(row["over_torch_sparse"] / OVER_LIBRARY)
    return min(ratios, default=None)


def products_of(choice: Choice) -> tuple[Product, ...]:
    return choice.forward, choice.input_gradient, choice.weight_gradient


def way_of(product: Product) -> str:
    """Panel x block of a sparse kernel; rows of a dense tile."""
    if isinstance(product, DenseTiles):
        return f"dense {product.band_rows}"
    return f"{product.panel_tokens}x{product.block_columns}"


def describe(row: dict) -> str:
    ways = " ".join(way_of(product) for product in products_of(Choice.from_record(row["choice"])))
    library, alone, peer = (
        "      -" if row[name] is None else f"{row[name]:7.2f}"
        for name in ("over_torch_sparse", "over_torch_sparse_alone", "over_sparseprop")
    )
    return (
        f"{row['shape'][1]:5d} > {row['shape'][0]:5d} {row['tokens']:5d} {row['type']} "
        f"{row['sparsity']:4.0%} {row['dense_ms']:8.2f} {row['ours_ms']:8.2f} "
        f"{row['packing_ms']:7.2f} {row['over_dense']:7.2f} {row['over_best_dense']:7.2f} "
        f"{library} {alone} {peer} {row['gflop_per_second']:6.0f} "
        f"{row['share_of_limit']:6.0%}  {row['clean']:2d}/{row['repetitions']:<2d}  {ways}"
    )


HEADER = (
    "   in >   out tokens type spars. dense ms  ours ms packing  /dense   /best /sparse  /alone"
    "   /peer   GF/s  limit  clean  panel x block of forward, dX, dW"
)


def cells(quick: bool, precisions: Sequence[str]) -> Iterator[Cell]:
    """One after the other, since all together would need much memory."""
    for name in precisions:
        if quick:
            yield from (Cell((2048, 2048), 256, sparsity, name) for sparsity in (0.9, 0.95))
        else:
            grid = itertools.product(SHAPES, TOKENS, SPARSITIES)
            yield from (Cell(*place, name) for place in grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the same, smaller")
    parser.add_argument(
        "--precision", choices=plain_precisions(), action="append", help="default: all"
    )
    options = parser.parse_args()
    quick, precisions = options.quick, options.precision or plain_precisions()
    torch.set_num_threads(numba.get_num_threads())
    keep_freed_pages()  # as the trainer does: results of all products are new memory
    machine = describe_machine()
    has_matrix_unit = "amx_bf16" in machine["processor"]
    limit = Limit()
    seconds = 1.0 if quick else 3.0
    print(
        f"{numba.get_num_threads()} threads; matrix unit: {has_matrix_unit}\n{HEADER}", flush=True
    )
    rows = []
    for cell in cells(quick, precisions):
        rows.append(measure(cell, limit, seconds))
        print(describe(rows[-1]), flush=True)
    shape, tokens, sparsities = PUBLISHED
    if "fp32" not in precisions:
        sparsities = ()
    for sparsity in sparsities[1:2] if quick else sparsities:
        cell = Cell(shape, tokens, sparsity, "fp32")
        rows.append(measure(cell, limit, seconds, published=True))
        print(describe(rows[-1]), flush=True)
    if importlib.util.find_spec("sparseprop") is None:
        print("SparseProp is not installed (pip install sparseprop): not compared")
    ratios = [ratio_to_target(row, has_matrix_unit) for row in rows]
    enough = all(row["clean"] >= ENOUGH for row in rows)
    busy = "other work kept the processors busy: too few repetitions had them alone"
    print_result(
        "sparse_products",
        round(min(ratio for ratio in ratios if ratio is not None), 4) if enough else None,
        target=1.0,
        unit="least speed-up over its target",
        machine=machine,
        quick=quick,
        precisions=precisions,
        **({} if enough else {"skipped": busy}),
        threads=numba.get_num_threads(),
        rows=rows,
    )


if __name__ == "__main__":
    main()

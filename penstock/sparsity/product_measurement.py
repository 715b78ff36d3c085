"""The choice of a weight's products by measurement on this machine.

Block sizes depend on the caches and on how many threads share them, and whether a dense product is
faster depends on the processor's matrix unit. So both are measured, on a random mask of the
weight's sparsity and, for a large weight or many tokens, on a part of it. What is timed is what a
step calls, packing of activations included.
"""

import functools
import time
from dataclasses import replace
from pathlib import Path

import numba
import numpy as np
import torch

from penstock.kernels.pair_code import has_bfloat16_dot
from penstock.kernels.sparse_vectors import interleaved_rows
from penstock.sparsity.layout import SparseLayout
from penstock.sparsity.product_choice import (
    LEAST_BLOCK_COLUMNS,
    LEAST_TILE_ROWS,
    PANEL_TOKENS,
    PRODUCTS,
    TILE_BYTES,
    Bfloat16,
    Choice,
    DenseTiles,
    Product,
    SparseKernel,
    panel_sizes,
)
from penstock.sparsity.products import forward, input_gradient, weight_gradient

_MOST_FEATURES = 2048  # of the part that is measured; a band of outputs stays in a cache either way
_MOST_TOKENS = 1024
_NEAR, _REPETITIONS = 3, 3  # how many of each kind are timed again, and how often
_GAIN_OF_BAND = 2.0  # how many times as fast another band may make a kernel, at most
_BLOCK_OF_FIRST_CACHE = (0.5, 0.8, 1.35, 2.0)  # inputs of a block, as a share of the cache
_BLOCK_OF_SECOND_CACHE = 0.125
_WIDE_BLOCK_OF_SECOND_CACHE = 0.5  # measured where a row has few entries in a block
_BANDS_OF_SECOND_CACHE = (1 / 16, 1 / 8)  # sums of a band, likewise; the largest band is tried too
_LEAST_ENTRIES = 1.5  # per row and block; below, rows are set up more often than entries multiplied
_FEW_ENTRIES = 16  # per row and block; with more, the set-up of a row takes little of the time
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def choose_product(
    shape: tuple[int, int], dtype: torch.dtype, sparsity: float, tokens: int
) -> Choice:
    """Return the fastest way to compute the products of a sparse weight on this machine.

    The first call for its arguments measures for some seconds, others in the process return the
    same choice. Record it with the run: another measurement may choose otherwise.

    Args:
        shape: outputs and inputs of the weight.
        dtype: float32 or bfloat16.
        sparsity: share of the entries that the mask drops, from 0 to below 1.
        tokens: of a micro-batch.

    Raises:
        ValueError: an argument is out of range.
    """
    if dtype not in PANEL_TOKENS:
        raise ValueError(f"dtype: expected float32 or bfloat16, got {dtype}")
    if not 0 <= sparsity < 1 or tokens < 1 or min(shape) < 1:
        raise ValueError(
            "choose_product: expected a shape and tokens of at least 1 and a sparsity from 0 to "
            f"below 1, got {list(shape)}, {tokens} tokens and {sparsity}"
        )
    return _measured(tuple(shape), dtype, round(sparsity, 3), tokens)


@functools.cache
def _measured(shape: tuple[int, int], dtype: torch.dtype, sparsity: float, tokens: int) -> Choice:
    case = _Case(shape, dtype, sparsity, tokens)
    return Choice(**{name: case.fastest(name) for name in PRODUCTS})


class _Case:
    """A part of the weight, with random values, and its three products.

    `shape` is that of the whole weight.
    """

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype, sparsity: float, tokens: int
    ) -> None:
        rows, columns = (min(size, _MOST_FEATURES) for size in shape)
        self.shape = shape
        self.dtype, self.density = dtype, 1 - sparsity
        self.tokens = min(tokens, _MOST_TOKENS)
        generator = np.random.default_rng(0)
        mask = generator.random((rows, columns)) >= sparsity
        starts = np.zeros(rows + 1, np.int64)
        np.cumsum(mask.sum(axis=1), out=starts[1:])
        self.layout = SparseLayout.of(starts, np.nonzero(mask)[1].astype(np.int32), (rows, columns))

        def random(*shape: int) -> torch.Tensor:
            numbers = generator.standard_normal(shape, dtype=np.float32)
            return torch.from_numpy(numbers).to(dtype)

        self.values = random(self.layout.entries)
        self.x, self.dy = random(self.tokens, columns), random(self.tokens, rows)

    def run(self, name: str, choice: Choice) -> None:
        if name == "forward":
            forward(self.layout, self.values, self.x, choice=choice)
        elif name == "input_gradient":
            input_gradient(self.layout, self.values, self.dy, choice=choice)
        else:
            weight_gradient(self.layout, self.x, self.dy, choice=choice)

    def fastest(self, name: str) -> Product:
        """The algorithm that takes the least time for a product.

        Every dense tile is timed once, and every block of columns with the smallest band of rows.
        The fastest are timed again: tiles as they are, and each sparse kernel with every band, if
        some band could make it the fastest of all.
        """
        products = [*self.dense_tiles(name), *self.sparse_kernels(name)]
        once = {product: self.seconds(name, product, 1) for product in products}
        near = sorted(products, key=once.__getitem__)
        in_reach = _GAIN_OF_BAND * once[near[0]]
        kernels = [p for p in near if isinstance(p, SparseKernel) and once[p] <= in_reach]
        again: list[Product] = [p for p in near[:_NEAR] if isinstance(p, DenseTiles)]
        for kernel in kernels[:_NEAR]:
            bands = self.bands(name, kernel.panel_tokens)
            again += [replace(kernel, band_rows=band) for band in bands]
        return min(again, key=lambda product: self.seconds(name, product, _REPETITIONS))

    def seconds(self, name: str, product: Product, repetitions: int) -> float:
        """The least time of some repetitions: what disturbs only adds.

        The order of entries that the product needs is freed: there is one at a time.
        """
        choice = Choice(product, product, product)
        self.run(name, choice)  # makes the layout
        times = []
        for _ in range(repetitions):
            began = time.perf_counter()
            self.run(name, choice)
            times.append(time.perf_counter() - began)
        self.layout.forget_blocked()
        return min(times)

    def dense_tiles(self, name: str) -> list[Product]:
        """Bands whose tiles have `TILE_BYTES` in the whole weight.

        One band and several are different algorithms. So a band covers all outputs of the measured
        part only if it covers those of the weight.
        """
        axis = 1 if name == "input_gradient" else 0
        outputs, measured = self.shape[axis], self.layout.shape[axis]
        row_bytes = max(self.shape) * self.dtype.itemsize
        bands = set()
        for size in TILE_BYTES:
            band = max(LEAST_TILE_ROWS, size // row_bytes)
            if band >= outputs:
                band = outputs
            elif band >= measured:
                band = max(1, measured // 2)
            bands.add(band)
        return [DenseTiles(band) for band in sorted(bands)]

    def sparse_kernels(self, name: str) -> list[Product]:
        """Every block of columns of two sizes of panels, with the smallest band of rows."""
        return [
            SparseKernel(block, min(self.bands(name, panel_tokens)), panel_tokens, self.bfloat16)
            for panel_tokens in self.panels(name)
            for block in self.blocks(name, panel_tokens)
        ]

    def panels(self, name: str) -> tuple[int, ...]:
        """The largest two sizes of panels; for sums of rows, of those with which rows are
        interleaved, if there are any."""
        sizes = panel_sizes(self.dtype, self.tokens)
        if name != "weight_gradient":
            sizes = tuple(size for size in sizes if interleaved_rows(size) > 1) or sizes
        return sizes[-2:]

    @property
    def bfloat16(self) -> Bfloat16:
        """How bfloat16 is multiplied: not measured, since dot products take half as many
        operations."""
        has_dots = self.dtype == torch.bfloat16 and has_bfloat16_dot()
        return "dots" if has_dots else "unpacked"

    def blocks(self, name: str, panel_tokens: int) -> list[int]:
        """Columns of a block that are worth measuring."""
        axis = 0 if name == "input_gradient" else 1
        columns = self.layout.shape[axis]
        first, second = cache_bytes()
        sizes = [share * first for share in _BLOCK_OF_FIRST_CACHE]
        sizes.append(_BLOCK_OF_SECOND_CACHE * second)
        column_bytes = panel_tokens * self.dtype.itemsize
        if sizes[-1] / column_bytes * self.density < _FEW_ENTRIES:
            sizes.append(_WIDE_BLOCK_OF_SECOND_CACHE * second)
        # One block and several are different loops, as one tile and several are.
        most = columns if columns == self.shape[axis] else columns // 2
        blocks = {
            min(most, max(LEAST_BLOCK_COLUMNS, int(size / column_bytes) // 16 * 16))
            for size in sizes
        }
        useful = {b for b in blocks if b * self.density >= _LEAST_ENTRIES} or {max(blocks)}
        return sorted(useful)

    def bands(self, name: str, panel_tokens: int) -> list[int]:
        """Rows of a band that are worth measuring, ascending."""
        most = self.layout.shape[1 if name == "input_gradient" else 0]
        threads, panels = numba.get_num_threads(), -(-self.tokens // panel_tokens)
        if name != "weight_gradient" and panels < 2 * threads:
            most = -(-most // threads)  # all threads have something to do
        _, second = cache_bytes()
        row_bytes = 4 * panel_tokens  # of float32 sums
        bands = {max(16, int(share * second / row_bytes)) for share in _BANDS_OF_SECOND_CACHE}
        return sorted({min(band, most) for band in bands} | {most})


@functools.cache
def cache_bytes(folder: Path = _CACHES) -> tuple[int, int]:
    """Return the bytes of a core's first and second cache for data; usual ones if not known."""
    found = {1: 32 << 10, 2: 1 << 20}
    for cache in sorted(folder.glob("index*")):
        try:
            kind, level, size = (
                (cache / name).read_text().strip() for name in ("type", "level", "size")
            )
        except OSError:
            continue
        if kind != "Instruction" and size.endswith("K") and int(level) in found:
            found[int(level)] = int(size[:-1]) << 10
    return found[1], found[2]

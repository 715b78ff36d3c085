"""Published cycle counts, and what the closed forms say of the same programs.

The programs are those of third parties, not ours, and are modelled as what they are. Their scalar
code is written in the vendor's language and compiled by its compiler, so that its cost is known
from their rows alone: two constants are fitted to three rows of the sparse products, two of `SIM`
to rows of the loop forms. Every row says whether a constant was fitted to it, or derived from it,
or neither (`not fitted`). All rows were known when the forms were chosen.

The sparse kernels (WSE-2, 32-bit numbers): A [N, K] is divided over `height` x `width` cores and
stays there in compressed columns; B [K, M] is sent down the columns of cores beforehand. Each core
multiplies its part of A with its rows of B, an AXPY of M elements per entry of A, between two time
stamps. What is printed is the mean over cores. The dense kernel multiplies columns of A with single
elements of B; its vectors have a stride, and it also sends its part of B on between the time
stamps. So much is taken from the public source of such kernels (github.com/pr0f3ss/SpMM_Cerebras),
of which the results were not read.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from penstock.wafer.closed_form import all_reduce_cycles, binomial_extremes, relay_cycles
from penstock.wafer.parameters import SILICON, SIM, CoreParameters, Mesh

Use = Literal["fitted", "derived", "not fitted"]

_SPARSE_SOURCE = "third party: SpMM on WSE-2, vendor's simulator"
_LOOP_SOURCE = "third party: arXiv:2608.25124 and its notes, vendor's simulator"
_ALL_REDUCE_SOURCE = "third party, quoted without its mesh; here 600 x 595 (BiCGStab on CS-1)"
_BANK_CONFLICT = 1.0  # assumed: read and write meet in one bank where a vector's stride is a
# multiple of all banks; chosen with the two dense rows in view


@dataclass(frozen=True)
class PublishedRow:
    """A published figure beside ours.

    Attributes:
        group: the study.
        machine: `sim` or `silicon`.
        use: `fitted` if a constant was fitted to it, `derived` if one follows from it alone.
        unit: of both.
    """

    group: str
    what: str
    published: float
    modelled: float
    machine: str
    use: Use
    source: str
    unit: str = "cycles"

    @property
    def ratio(self) -> float:
        """Ours over the published figure."""
        return self.modelled / self.published


# --- sparse and dense products with resident weights ----------------------------------------------


@dataclass(frozen=True)
class ResidentProduct:
    """A row of the sparse kernels: A [n, k] times B [k, m] on `width` x `height` cores.

    Attributes:
        least, most: published cycles of the fastest and the slowest core, where given.
    """

    width: int
    height: int
    n: int
    k: int
    m: int
    density: float
    mean: float
    least: float | None = None
    most: float | None = None
    use: Use = "not fitted"

    @property
    def columns(self) -> int:
        """Columns of A in one core."""
        return self.k // self.width

    @property
    def rows(self) -> int:
        """Rows of A in one core."""
        return self.n // self.height

    @property
    def entries(self) -> float:
        """Entries of A in the mean core."""
        return self.rows * self.columns * self.density


@dataclass(frozen=True)
class CompressedColumnsKernel:
    """The scalar code of the sparse kernel, on the vendor's simulator.

    Attributes:
        index_cycles: of an entry of A, and of a column, besides the elements of the AXPY: type
            conversions of indices, two 32-bit multiplications, the loop, and the set-up of the
            AXPY. Fitted; that a column takes as long as an entry is assumed.
    """

    index_cycles: float = 46.8

    def cycles(self, product: ResidentProduct, core: CoreParameters, entries: float) -> float:
        """Return the cycles of a core with a number of entries."""
        elements = core.elements_cycles(product.m, 4)
        return (entries + product.columns) * self.index_cycles + entries * elements

    def mean(self, product: ResidentProduct, core: CoreParameters) -> float:
        """Return the cycles of the mean core."""
        return self.cycles(product, core, product.entries)

    def extremes(self, product: ResidentProduct, core: CoreParameters) -> tuple[float, float]:
        """Return the expected cycles of the fastest and of the slowest core of a random A."""
        cores = product.width * product.height
        ends = binomial_extremes(product.rows * product.columns, product.density, cores)
        return self.cycles(product, core, ends[0]), self.cycles(product, core, ends[1])


SPARSE_KERNEL = CompressedColumnsKernel()


def dense_resident_cycles(product: ResidentProduct, core: CoreParameters) -> float:
    """Return the cycles of the dense kernel: for each column of A and of B an AXPY over the rows of
    A with a stride, in a loop; a middle row of cores first sends its rows of B on, word by word."""
    calls = product.columns * product.m
    elements = product.rows * (core.float_group_cycles + _BANK_CONFLICT) / core.simd_float
    sending = product.columns * product.m * core.word_cycles
    share = max(0, product.height - 2) / product.height
    return calls * (core.loop_cycles + core.vector_cycles + elements) + share * sending


SPARSE_ROWS = (
    ResidentProduct(32, 6, 768, 768, 68, 0.05, 21_218, 17_542, 24_861, "fitted"),
    ResidentProduct(64, 8, 1024, 1024, 68, 0.05, 14_649, 11_074, 17_727),
    ResidentProduct(64, 12, 768, 768, 132, 0.1, 17_205, 12_740, 22_541, "fitted"),
    ResidentProduct(48, 32, 768, 768, 260, 0.2, 29_092, 21_493, 38_917),
    ResidentProduct(96, 24, 768, 768, 260, 0.3, 28_669, use="fitted"),
)
DENSE_ROWS = (
    ResidentProduct(16, 12, 768, 768, 64, 1.0, 476_866),
    ResidentProduct(128, 8, 1024, 1024, 64, 1.0, 150_760),
)


def fit_sparse_kernel(rows: Sequence[ResidentProduct]) -> tuple[float, float]:
    """Return index cycles and cycles per element of a 32-bit AXPY that fit rows best, by relative
    least squares."""
    terms = np.array([[row.entries + row.columns, row.entries * row.m] for row in rows])
    mean = np.array([row.mean for row in rows])
    found = np.linalg.lstsq(terms / mean[:, None], np.ones(len(rows)), rcond=None)[0]
    return float(found[0]), float(found[1])


# --- forms of a loop ------------------------------------------------------------------------------


def one_operation(elements: int, core: CoreParameters) -> float:
    """Return the cycles of one vector operation on 16-bit numbers."""
    return core.alone_cycles(elements)


def mapped_operations(calls: int, elements: int, core: CoreParameters) -> float:
    """Return the cycles of vector operations that a map starts."""
    return calls * (core.vector_cycles + core.elements_cycles(elements)) + _ends(core)


def while_loop(calls: int, elements: int, core: CoreParameters) -> float:
    """Return the cycles of vector operations in a while loop."""
    return mapped_operations(calls, elements, core) + calls * core.loop_cycles


def nested_loops(outer: int, inner: int, elements: int, core: CoreParameters) -> float:
    """Return the cycles of vector operations in two nested loops over ranges. Assumed: the inner
    loop costs what a map does, the outer what a while loop does; that the 256 operations of the row
    are 16 times 16."""
    return mapped_operations(outer * inner, elements, core) + outer * core.loop_cycles


def beside_scalar_work(operation: float, scalar: float) -> float:
    """Return the cycles of a vector operation beside scalar work: they do not overlap."""
    return operation + scalar


def _ends(core: CoreParameters) -> float:
    """Cycles in which a sequence of operations begins and ends, as one alone does."""
    return core.vector_cycles + core.drain_cycles


# --- all rows -------------------------------------------------------------------------------------


def published_rows(
    core: CoreParameters = SIM,
    kernel: CompressedColumnsKernel = SPARSE_KERNEL,
) -> tuple[PublishedRow, ...]:
    """Return all rows of the vendor's simulator, and after them the one of machines.

    Args:
        core: the set for rows of the simulator.
    """
    silicon = PublishedRow(
        "relay",
        "a hop in a relay of many words, cycles per hop",
        2.0,
        SILICON.hop_cycles,
        SILICON.name,
        "derived",
        _LOOP_SOURCE,
        "cycles per hop",
    )
    return (*_sparse(core, kernel), *_loops(core), *_relays(core), *_all_reduces(core), silicon)


def _sparse(core: CoreParameters, kernel: CompressedColumnsKernel) -> Iterator[PublishedRow]:
    row = partial(PublishedRow, machine=core.name, source=_SPARSE_SOURCE)
    for product in SPARSE_ROWS:
        what = (
            f"{product.width}x{product.height} cores, {product.n}x{product.k}x{product.m}, "
            f"{product.density:.0%}"
        )
        yield row(
            "sparse product",
            what,
            product.mean,
            kernel.mean(product, core),
            use=product.use,
        )
        if product.least is not None and product.most is not None:
            low, high = kernel.extremes(product, core)
            yield row("sparse extremes", f"{what}, fastest", product.least, low, use="not fitted")
            yield row("sparse extremes", f"{what}, slowest", product.most, high, use="not fitted")
    for product in DENSE_ROWS:
        what = f"{product.width}x{product.height} cores, {product.n}x{product.k}x{product.m}"
        ours = dense_resident_cycles(product, core)
        yield row("dense product", what, product.mean, ours, use="not fitted")


def _loops(core: CoreParameters) -> Iterator[PublishedRow]:
    row = partial(PublishedRow, "loop form", machine=core.name, source=_LOOP_SOURCE)
    forms: tuple[tuple[str, float, Callable[[], float], Use], ...] = (
        ("one operation on 4,096", 1_040, lambda: one_operation(4096, core), "derived"),
        ("256 on 16, while loop", 4_617, lambda: while_loop(256, 16, core), "fitted"),
        ("256 on 16, @map", 2_840, lambda: mapped_operations(256, 16, core), "fitted"),
        (
            "16 x 16 on 16, nested loops",
            3_032,
            lambda: nested_loops(16, 16, 16, core),
            "not fitted",
        ),
        ("operation beside scalar work", 1_027, lambda: beside_scalar_work(514, 514), "not fitted"),
    )
    for what, published, ours, use in forms:
        yield row(what, published, ours(), use=use)


def _relays(core: CoreParameters) -> Iterator[PublishedRow]:
    for words in (64, 512):
        for cores in (1, 2, 4, 8):
            published = 1.001 * cores * words + 16.1 * cores + 16.5
            yield PublishedRow(
                "relay",
                f"{words} words over {cores} cores",
                published,
                relay_cycles(words, cores, core),
                core.name,
                "not fitted",
                f"{_LOOP_SOURCE}: their own fit, within 4 % of its rows",
            )


def _all_reduces(core: CoreParameters) -> Iterator[PublishedRow]:
    mesh = Mesh(595, 600)
    for what, published, root in (
        ("by hand, of the mesh's diameter", 1.1, "centre"),
        ("vendor's library, of the mesh's diameter", 2.0, "corner"),
    ):
        ours = all_reduce_cycles(
            mesh, core, root="centre" if root == "centre" else "corner", algorithm="star"
        )
        yield PublishedRow(
            "all-reduce",
            what,
            published,
            ours / mesh.diameter,
            core.name,
            "not fitted",
            _ALL_REDUCE_SOURCE,
            "diameters",
        )


NOT_MODELLED = (
    (
        "MeshGEMM 64^3 on 4x4 cores, 122,770 cycles",
        "120 cycles per AXPY of 16 elements, ten times the loop forms; what was timed is not known",
    ),
    (
        "MeshGEMV 64, 14,122 cycles",
        "what was timed is not known",
    ),
    (
        "SUMMA 4x4, 14^3 tiles, 32-bit: computing 45,783 cycles",
        "the time of its broadcasts by the vendor's library is not given apart",
    ),
)
"""Published rows without a model, and why."""


def worst_ratio(rows: Sequence[PublishedRow]) -> float:
    """Return the ratio that is furthest from 1."""
    return max((row.ratio for row in rows), key=lambda ratio: abs(math.log(ratio)))

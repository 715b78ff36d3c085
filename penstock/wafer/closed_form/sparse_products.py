"""Cycles of the three products of a weight that streams over the mesh, in closed form.

Activations stay in the cores. Each entry of the weight enters at the edge as one word, a 16-bit
index and a 16-bit value, and travels along the row of cores that has its input feature. On arrival
a core multiplies it with the feature's activations of its tokens and adds to the sums of the output
feature (an AXPY). A control word ends an output feature: the sums travel along the column of cores,
each of which adds its own.

- forward, Y = X W^T: entries along rows, partial sums along columns.
- data gradient, dX = dY W: the same stream; rows of dY are broadcast down the columns, sums stay.
- weight gradient, dW = dY^T X at the entries of the mask: a dot product over the tokens of each
  core, and a sum over the columns of cores, one word per entry.

M output features, K input features, T tokens, density d; R feature rows and t tokens per core.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from penstock.errors import ConfigError
from penstock.wafer.closed_form.cycles import ProductCycles
from penstock.wafer.closed_form.layout import ActivationLayout
from penstock.wafer.closed_form.placement import (
    MaskCounts,
    binomial_extremes,
    expected_load_factor,
)
from penstock.wafer.closed_form.recursions import SumSteps, broadcast_finish, forward_finish
from penstock.wafer.closed_form.skew import ColumnWords, RowLoad, broadcast_skew, forward_skew
from penstock.wafer.closed_form.streamed_product import (
    HIDDEN,
    WORD_BYTES,
    StreamedProduct,
    StreamingOptions,
)
from penstock.wafer.parameters import CoreParameters

PRODUCTS = ("forward", "data gradient", "weight gradient")


def forward(
    product: StreamedProduct,
    layout: ActivationLayout,
    core: CoreParameters,
    options: StreamingOptions = HIDDEN,
    mask: MaskCounts | None = None,
) -> ProductCycles:
    """Return the cycles of Y = X W^T.

    Args:
        mask: counts that replace the expectation over random masks; their feature rows must be
            those of the layout.
    """
    product = _with_mask(product, layout, mask)
    shape = _Shape(product, layout, core, mask)
    entry = _Entry(core.trigger_cycles, shape.elements_cycles)
    words = product.outputs * shape.row_words
    steps = _sum_steps(shape, options)
    add = steps.add_cycles
    if mask is None and options.sums == "hidden" and options.accumulators == 1:
        # The only accumulator is free when its words have left. (The simulation showed this.)
        add = shape.row_words * shape.column_words.cycles
    each = core.partial_sum_cycles + add
    times = _forward_time(shape, entry, add, steps, options)
    on_links = words * shape.column_words.cycles
    limits = {**shape.stream_limits(options), "partial sums on links": on_links}
    if layout.chain_rows > 1:
        limits["words into cores"] = shape.entering_cycles(options)
    if layout.column_groups > 1:
        limits["sums of column groups"] = shape.column_group_words * core.word_cycles
    if options.reduction == "ring":
        # A sum needs a whole turn; a core meanwhile holds as many as it has accumulators.
        turn = layout.chain_rows * (core.partial_sum_cycles + core.hop_cycles)
        limits["turns of the ring"] = product.outputs * turn / options.accumulators
    unhindered = ProductCycles(
        "forward",
        arithmetic=times.arithmetic,
        set_up=times.set_up,
        partial_sums=product.outputs * each,
        skew=times.skew,
        fill=_crossing(layout, core) + core.partial_sum_cycles * layout.chain_rows,
        limits=limits,
        useful=shape.useful,
    )
    if mask is None:
        return unhindered
    finish = forward_finish(
        mask.counts * entry.cycles, steps, shape.column_words, shape.arriving_cycles()
    )
    leaving = 0.0 if steps.is_ring else core.hop_cycles * layout.mesh.columns + core.ramp_cycles
    return _with_waiting(unhindered, finish + leaving)


def data_gradient(
    product: StreamedProduct,
    layout: ActivationLayout,
    core: CoreParameters,
    options: StreamingOptions = HIDDEN,
    mask: MaskCounts | None = None,
) -> ProductCycles:
    """Return the cycles of dX = dY W; arguments are those of `forward`."""
    product = _with_mask(product, layout, mask)
    shape = _Shape(product, layout, core, mask)
    entry = _Entry(core.trigger_cycles, shape.elements_cycles)
    times = _broadcast_time(shape, entry, options)
    unhindered = ProductCycles(
        "data gradient",
        arithmetic=times.arithmetic,
        # A control word ends an output feature: its task takes the next row of dY. (The simulation
        # showed these missing.)
        set_up=times.set_up + product.outputs * core.task_cycles,
        skew=times.skew,
        fill=_crossing(layout, core),
        limits={**shape.stream_limits(options), **shape.broadcast_limits(options)},
        useful=shape.useful,
    )
    return _with_broadcast(unhindered, shape, entry, options, core.task_cycles)


def weight_gradient(
    product: StreamedProduct,
    layout: ActivationLayout,
    core: CoreParameters,
    options: StreamingOptions = HIDDEN,
    mask: MaskCounts | None = None,
) -> ProductCycles:
    """Return the cycles of dW = dY^T X at the mask's entries; arguments are those of `forward`.

    The mask of an indexed weight streams in, and one word per entry leaves.
    """
    product = _with_mask(product, layout, mask)
    shape = _Shape(product, layout, core, mask)
    set_up = core.trigger_cycles + options.reduction_cycles
    dot = core.dot_cycles(shape.tokens, product.element_bytes)
    entry = _Entry(set_up, dot)
    times = _broadcast_time(shape, entry, options)
    out = math.ceil(product.element_bytes / WORD_BYTES)
    leaving = shape.fullest(options.is_sorted) * layout.column_groups * out * core.word_cycles
    passing = out if layout.mesh.columns > 1 else 0  # words of sums that come from the west
    control = core.task_cycles if product.is_indexed else 0.0
    limits = {
        **shape.broadcast_limits(options, passing),
        "gradients on links": leaving,
        "host link": shape.entries * out / core.host_words_per_cycle,
    }
    if layout.row_groups > 1:
        limits["words between row groups"] = shape.row_group_cycles(out)
    if product.is_indexed:
        limits["words at the edge"] = shape.stream_limits(options)["words at the edge"]
    unhindered = ProductCycles(
        "weight gradient",
        arithmetic=times.arithmetic,
        # The places of a whole weight need not enter, nor control words with them.
        set_up=times.set_up + product.outputs * control,
        skew=times.skew,
        fill=_crossing(layout, core) + _sums_over_tokens(layout, core),
        limits=limits,
        useful=shape.useful,
    )
    return _with_broadcast(unhindered, shape, entry, options, control, passing)


def step_cycles(
    product: StreamedProduct,
    layout: ActivationLayout,
    core: CoreParameters,
    options: StreamingOptions = HIDDEN,
    mask: MaskCounts | None = None,
) -> tuple[ProductCycles, ProductCycles, ProductCycles]:
    """Return the cycles of the three products of a training step."""
    return (
        forward(product, layout, core, options, mask),
        data_gradient(product, layout, core, options, mask),
        weight_gradient(product, layout, core, options, mask),
    )


@dataclass(frozen=True)
class _Entry:
    """Cycles of a core for one entry."""

    set_up: float
    elements: float

    @property
    def cycles(self) -> float:
        return self.set_up + self.elements


@dataclass(frozen=True)
class _Times:
    """Cycles of the fullest row of cores for its entries, and the skew beyond them."""

    arithmetic: float
    set_up: float
    skew: float


@dataclass(frozen=True)
class _Shape:
    """What the three products share: the work of a core and the words on links."""

    product: StreamedProduct
    layout: ActivationLayout
    core: CoreParameters
    mask: MaskCounts | None

    @property
    def tokens(self) -> int:
        return self.layout.tokens(self.product.tokens)

    @property
    def elements_cycles(self) -> float:
        return self.core.elements_cycles(self.tokens, self.product.element_bytes)

    @property
    def entries(self) -> float:
        return float(self.mask.entries) if self.mask is not None else self.product.entries

    def load_factor(self, is_sorted: bool) -> float:
        if self.mask is not None:
            return self.mask.load_factor
        product = self.product
        return expected_load_factor(
            product.inputs,
            product.outputs,
            product.density,
            self.layout.feature_rows,
            is_sorted=is_sorted,
        )

    def fullest(self, is_sorted: bool) -> float:
        """Return the entries of the fullest row of cores."""
        return self.load_factor(is_sorted) * self.mean_entries

    @property
    def mean_entries(self) -> float:
        """Entries of the mean row of cores."""
        return self.entries / self.layout.feature_rows

    @property
    def row_words(self) -> int:
        """Words of one output feature's sums in one column."""
        return math.ceil(self.tokens * self.product.element_bytes / WORD_BYTES)

    @property
    def column_words(self) -> ColumnWords:
        """Words of a row of sums or of dY that go down a column."""
        core = self.core
        return ColumnWords(
            self.row_words,
            core.queue_words,
            word_cycles=core.word_cycles,
            ramp_cycles=core.ramp_cycles,
            hop_cycles=core.hop_cycles,
        )

    @property
    def useful(self) -> float:
        """Multiply-adds of the mean core in cycles at full width."""
        half = self.product.element_bytes == 2
        width = self.core.simd_half if half else self.core.simd_float
        return self.entries * self.product.tokens / self.layout.mesh.cores / width

    def stream_limits(self, options: StreamingOptions) -> dict[str, float]:
        words = self.product.words_per_entry
        per_row = self.fullest(options.is_sorted)
        at_edge = per_row * self.layout.column_groups * words + self.product.outputs
        entering = self.entries * words + self.product.outputs
        limits = {
            "words at the edge": at_edge * self.core.word_cycles,
            "host link": entering / self.core.host_words_per_cycle,
        }
        if self.layout.row_groups > 1:
            limits["words between row groups"] = self.row_group_cycles(words)
        return limits

    def entering_cycles(self, options: StreamingOptions, passing: int = 0) -> float:
        """Cycles in which all words enter a core of the fullest row: of sums or of dY, of entries,
        of control words, and for each entry `passing` words of other sums."""
        each = self.product.words_per_entry + passing
        words = self.product.outputs * (self.row_words + 1) + self.fullest(options.is_sorted) * each
        return words * self.core.word_cycles

    def arriving_cycles(self, passing: int = 0) -> np.ndarray:
        """The same without sums and dY, by output feature and row of cores of a mask."""
        assert self.mask is not None
        each = self.product.words_per_entry + passing
        return (self.mask.counts * each + 1) * self.core.word_cycles

    def broadcast_limits(self, options: StreamingOptions, passing: int = 0) -> dict[str, float]:
        words = self.product.outputs * self.row_words
        limits = {
            "gradients down columns": words * self.column_words.cycles,
            "words into cores": self.entering_cycles(options, passing),
        }
        if self.layout.column_groups > 1:
            crossing = self.column_group_words * self.core.word_cycles
            limits["gradients to column groups"] = crossing
        return limits

    def row_group_cycles(self, words: float) -> float:
        """Cycles in which the words of all entries pass from one row group to the next. Assumed:
        routes spread them evenly over the columns of cores."""
        return self.entries * words / self.layout.axis_columns * self.core.word_cycles

    @property
    def column_group_words(self) -> float:
        """Words that cross a link along rows where the sums of column groups are joined: of all
        outputs, each row of cores has its share, for the tokens of the columns of one group."""
        product, layout = self.product, self.layout
        share = math.ceil(product.outputs / layout.axis_rows)
        return share * self.row_words * (layout.axis_columns // layout.column_groups)

    def row_load(self, entry: float, each: float) -> RowLoad:
        """Return the work of a row of cores for one output feature over random masks."""
        product, rows = self.product, self.layout.feature_rows
        features = product.inputs / rows
        share = product.density
        trials = max(1, round(features))
        _, most = binomial_extremes(trials, share, rows)
        return RowLoad(
            mean=entry * features * share + each,
            deviation=entry * math.sqrt(features * share * (1 - share)),
            worst=entry * max(0.0, most - trials * share),
        )


def _sum_steps(shape: _Shape, options: StreamingOptions) -> SumSteps:
    is_paid, is_ring = options.sums == "paid", options.reduction == "ring"
    return SumSteps(
        pass_cycles=shape.core.partial_sum_cycles,
        add_cycles=shape.elements_cycles if is_paid else 0.0,
        accumulators=options.accumulators,
        inbox_rows=options.inbox_rows,
        is_one_thread=is_paid and options.accumulators == 1 and not is_ring,
        is_ring=is_ring,
    )


def _forward_time(
    shape: _Shape, entry: _Entry, add: float, steps: SumSteps, options: StreamingOptions
) -> _Times:
    outputs, rows = shape.product.outputs, shape.layout.feature_rows
    if shape.mask is None:
        load = shape.row_load(entry.cycles, steps.pass_cycles + add)
        skew = forward_skew(load, outputs, rows, steps.accumulators, steps.inbox_rows)
        finish = shape.mean_entries * entry.cycles + skew
    else:
        work = shape.mask.counts * entry.cycles
        finish = forward_finish(work, steps, shape.column_words.without_times)
        # The last row of cores passes sums on after all before it have: that is part of the fill.
        finish -= (rows - 1) * steps.pass_cycles * steps.is_one_thread
        finish -= outputs * (steps.pass_cycles + add)
    return _times(shape, entry, finish, options)


def _broadcast_time(shape: _Shape, entry: _Entry, options: StreamingOptions) -> _Times:
    if shape.mask is None:
        load, outputs = shape.row_load(entry.cycles, 0.0), shape.product.outputs
        skew = broadcast_skew(load, outputs, options.broadcast_rows, shape.column_words)
        finish = shape.fullest(options.is_sorted) * entry.cycles + skew
    else:
        work = shape.mask.counts * entry.cycles
        finish = broadcast_finish(work, options.broadcast_rows, shape.column_words.without_times)
    return _times(shape, entry, finish, options)


def _with_broadcast(
    unhindered: ProductCycles,
    shape: _Shape,
    entry: _Entry,
    options: StreamingOptions,
    control_cycles: float,
    passing: int = 0,
) -> ProductCycles:
    """Add the waiting of a product with a broadcast, where the mask is known."""
    if shape.mask is None:
        return unhindered
    work = shape.mask.counts * entry.cycles + control_cycles
    arriving = shape.arriving_cycles(passing).mean(axis=1)
    finish = broadcast_finish(work, options.broadcast_rows, shape.column_words, arriving)
    return _with_waiting(unhindered, finish + unhindered.fill)


def _with_waiting(unhindered: ProductCycles, finish: float) -> ProductCycles:
    """Add what cores and links lose together, so that the product is done at `finish`."""
    return replace(unhindered, waiting=max(0.0, finish - unhindered.total))


def _times(shape: _Shape, entry: _Entry, finish: float, options: StreamingOptions) -> _Times:
    """Return the parts of the time in which the slowest row of cores does its entries."""
    fullest = shape.fullest(options.is_sorted)
    skew = max(0.0, finish - fullest * entry.cycles)
    return _Times(fullest * entry.elements, fullest * entry.set_up, skew)


def _crossing(layout: ActivationLayout, core: CoreParameters) -> float:
    """Cycles of a word from one corner of the mesh to the other."""
    return core.hop_cycles * (layout.mesh.rows + layout.mesh.columns)


def _sums_over_tokens(layout: ActivationLayout, core: CoreParameters) -> float:
    """Cycles in which the sum of a weight gradient's last entry passes the cores that divide the
    tokens, besides its hops: up and down the ramp and an addition in each after the first, as in
    `collectives.spatial_cycles`."""
    adding = layout.axis_columns // layout.column_groups + layout.row_groups - 2
    return adding * (2 * core.ramp_cycles + 1)


def _with_mask(
    product: StreamedProduct, layout: ActivationLayout, mask: MaskCounts | None
) -> StreamedProduct:
    """Return the product with the density of its mask."""
    if mask is None:
        return product
    given, wanted = (mask.outputs, mask.inputs), (product.outputs, product.inputs)
    if given != wanted:
        raise ConfigError(
            f"mask: expected one of {wanted[0]} x {wanted[1]} features, got {given[0]} x {given[1]}"
        )
    if mask.feature_rows != layout.feature_rows:
        raise ConfigError(
            f"mask: expected counts for {layout.feature_rows} rows of cores, as many as the layout "
            f"has, got {mask.feature_rows}; count the mask again with count_mask"
        )
    if not mask.entries:
        raise ConfigError("mask: expected at least one kept entry, got none")
    return replace(product, density=mask.density)


def whole_counts(outputs: int, inputs: int, feature_rows: int) -> MaskCounts:
    """Return the counts of a weight that keeps every entry."""
    each = np.full(feature_rows, inputs // feature_rows, np.int64)
    each[: inputs % feature_rows] += 1
    return MaskCounts(np.tile(each, (outputs, 1)), inputs)

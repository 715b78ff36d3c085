"""Cycles of operators without a streamed weight: attention, norms, and work that moves memory.

Activations lie as in a streamed product: a core has some tokens and some features.
"""

import math

from penstock.wafer.closed_form.collectives import (
    line_broadcast_cycles,
    line_reduce_cycles,
    spatial_cycles,
)
from penstock.wafer.closed_form.cycles import ProductCycles
from penstock.wafer.closed_form.layout import ActivationLayout
from penstock.wafer.parameters import CoreParameters

ACTIVATION_OPERATIONS = 8  # assumed: vector operations of an exponential, as a polynomial
SOFTMAX_OPERATIONS = ACTIVATION_OPERATIONS + 3  # and a maximum, a sum and a product
_NORM_PASSES = 2  # assumed: one for the statistics, one for the result
_BACKWARD_ATTENTION = 2.5  # five products against two, as the compiler counts them
_WRITES_ALONE = ("fill", "full", "new_zeros", "zeros")
_ONE_OPERAND = (
    *("abs", "clamp", "logical_not", "neg", "reciprocal", "relu", "round", "rsqrt", "sign", "sqrt"),
    *("full_like", "ones_like", "zeros_like"),  # the compiler counts the tensor that has the shape
)


def memory_pass(
    moved_bytes: float,
    layout: ActivationLayout,
    core: CoreParameters,
    element_bytes: int = 2,
    *,
    streams: int = 2,
    operations: int = 1,
    name: str = "pointwise",
) -> ProductCycles:
    """Return the cycles of vector operations on activations, which no core shares with others.

    The vector unit decides: each of its elements is one that the write port takes, and the ports
    read two operands for it in the same time. An operation of one operand uses one of them.

    Args:
        moved_bytes: read and written, of all cores.
        streams: operands and results of an operation, as `streams_of` counts them.
        operations: vector operations on each element.
    """
    width = core.simd_half if element_bytes == 2 else core.simd_float
    elements = moved_bytes / (streams * element_bytes) / layout.mesh.cores
    cycles = operations * core.elements_cycles(math.ceil(elements), element_bytes)
    set_up = operations * core.vector_cycles + core.drain_cycles
    return ProductCycles(name, cycles, set_up=set_up, useful=operations * elements / width)


def streams_of(work: str, name: str) -> int:
    """Return how many tensors of a result's size an element-wise operator reads and writes.

    Assumed: `pointwise` work reads two operands, unless its name says that it has one. Costs do not
    tell where the second is a number, or is repeated over tokens or features.

    Args:
        work, name: of the operator's cost.
    """
    if name in _WRITES_ALONE:
        return 1
    if "backward" in name:
        return 3  # the gradient of its result, and its operand or its result
    return 3 if work == "pointwise" and name not in _ONE_OPERAND else 2


def norm(
    moved_bytes: float,
    tokens: int,
    layout: ActivationLayout,
    core: CoreParameters,
    element_bytes: int = 2,
    *,
    streams: int = 2,
) -> ProductCycles:
    """Return the cycles of a norm over features: two sums over each column of cores, and passes.
    Arguments are those of `memory_pass`."""
    passes = memory_pass(
        moved_bytes,
        layout,
        core,
        element_bytes,
        streams=streams,
        operations=_NORM_PASSES,
        name="norm",
    )
    words = math.ceil(layout.tokens(tokens) * element_bytes / 4)
    rows = layout.chain_rows
    sums = line_reduce_cycles(rows, words, core) + line_broadcast_cycles(rows, words, core)
    if layout.column_groups > 1:
        sums += 2 * _between_groups(words, layout, core)
    return ProductCycles(
        "norm", passes.arithmetic, set_up=passes.set_up, fill=2 * sums, useful=passes.useful
    )


def _between_groups(words: int, layout: ActivationLayout, core: CoreParameters) -> float:
    """Return the cycles in which the sums of column groups are added, or their result is sent back.
    Assumed: those of a group's columns are divided over all rows of cores."""
    columns = layout.axis_columns // layout.column_groups
    share = math.ceil(words * columns / layout.axis_rows)
    return share * core.word_cycles + spatial_cycles(
        core,
        contention=0,
        distance=layout.axis_columns - columns,
        depth=layout.column_groups - 1,
    )


def token_sum(
    moved_bytes: float,
    tokens: int,
    layout: ActivationLayout,
    core: CoreParameters,
    element_bytes: int = 2,
) -> ProductCycles:
    """Return the cycles of a sum over tokens, such as the gradient of a bias: within each core, and
    once along the tokens' axis, a word for each feature of a core."""
    passes = memory_pass(moved_bytes, layout, core, element_bytes, streams=1, name="reduction")
    features = math.ceil(moved_bytes / element_bytes / tokens)
    line = line_reduce_cycles(layout.axis_columns, layout.features(features), core)
    return ProductCycles(
        "reduction", passes.arithmetic, set_up=passes.set_up, fill=line, useful=passes.useful
    )


def lookup(moved_bytes: float, layout: ActivationLayout, core: CoreParameters) -> ProductCycles:
    """Return the cycles of a look-up of rows of a table, or of its gradient. Assumed: the table
    stays with the host, and only the rows cross its link, once."""
    words = moved_bytes / 2 / 4  # the compiler counts each row as read and as written
    crossing = core.hop_cycles * layout.mesh.diameter
    return ProductCycles(
        "lookup", 0.0, fill=crossing, limits={"host link": words / core.host_words_per_cycle}
    )


def attention(
    sequence: int,
    hidden: int,
    tokens: int,
    layout: ActivationLayout,
    core: CoreParameters,
    *,
    head_size: int = 64,
    element_bytes: int = 2,
    is_backward: bool = False,
) -> ProductCycles:
    """Return the cycles of softmax attention, every token with every other of its sequence.

    Scores and values are two dense products on the cores of a sequence: keys, then values, stream
    along the rows of cores to all queries of their sequence, and sums travel along the cores that
    share a head.

    Args:
        sequence: tokens of a sequence; `tokens` are those of all sequences.
        hidden: features of all heads together.
    """
    here = layout.tokens(tokens)
    length, turns = min(here, sequence), max(1.0, here / sequence)
    features = layout.features(hidden)
    sharing = max(1, math.ceil(head_size / features))  # rows of cores of one head
    heads = max(1.0, features / head_size)
    operations = sequence * features * turns
    elements = core.elements_cycles(length, element_bytes)
    score_rows, value_rows = sequence * heads * turns, min(features, head_size) * heads * turns
    sums = (score_rows + value_rows * sharing) if sharing > 1 else 0.0
    row_words = math.ceil(length * element_bytes / 4)
    soft = score_rows / sharing * elements * SOFTMAX_OPERATIONS
    again = _BACKWARD_ATTENTION if is_backward else 1.0
    width = core.simd_half if element_bytes == 2 else core.simd_float
    return ProductCycles(
        "attention",
        arithmetic=again * 2 * operations * elements + soft,
        set_up=again * 2 * operations * core.trigger_cycles,
        partial_sums=again * sums * core.partial_sum_cycles,
        fill=again * 2 * core.hop_cycles * layout.mesh.diameter,
        limits={
            "keys and values on links": again
            * 2
            * operations
            * element_bytes
            / 4
            * core.word_cycles,
            "partial sums on links": again * sums * row_words * core.word_cycles,
        },
        useful=again * 2 * sequence * hidden * tokens / layout.mesh.cores / width,
    )

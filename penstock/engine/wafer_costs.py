"""The costs of a stage's operators at one step: those of the compiler, with the entries that the
masks of sparse weights have then.

The compiler counts a sparse weight with the most entries that it may have. Which weight an operator
reads is not among its costs: it is found by its elements and its most entries. Weights that have
both in common are taken together, with their mean. Heads are found in the graph (`wafer_heads.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.engine.stage_graphs import operator_name
from penstock.engine.wafer_heads import MaskState, heads_of
from penstock.engine.wafer_plan import WaferPlan
from penstock.operator_cost import OperatorCost
from penstock.program import Kind, TensorSpec
from penstock.wafer.closed_form import StageCycles, stage_cycles

_TABLE_GRADIENT = "embedding_dense_backward"
_GRADIENT = "sparse_weight_gradient"
_GRADIENT_BYTES = 4  # of an entry, in float32


@dataclass(frozen=True)
class _Group:
    """Sparse weights of a kind with as many elements and as many entries at most."""

    share: float  # entries over the most entries
    dense_gradient: bool


def stage_cycles_of(
    kind: Kind,
    executable: str,
    plan: WaferPlan,
    masks: Mapping[int, MaskState] | None = None,
) -> StageCycles:
    """Return the cycles of one micro-batch of a stage, in closed form.

    Args:
        masks: as for `costs_at`; None: the most entries of every sparse weight.
    """
    place = plan.kinds[kind.digest]
    return stage_cycles(
        costs_at(kind, executable, place.tokens, masks or {}),
        place.tokens,
        place.layout,
        plan.options.core,
        head_size=place.head_size,
        heads=heads_of(kind, executable, masks or {}),
    )


def costs_at(
    kind: Kind, executable: str, tokens: int, masks: Mapping[int, MaskState]
) -> tuple[OperatorCost, ...]:
    """Return the costs of one executable of a kind.

    Args:
        executable: its name, a key of `Kind.costs`.
        tokens: of a micro-batch.
        masks: the sparse weights, by their position in the kind.
    """
    groups = _groups(kind, masks) if masks else {}
    rows = _rows_of_tables(kind, executable)
    return tuple(_at(_of_rows(cost, rows), tokens, groups) for cost in kind.costs[executable])


def _rows_of_tables(kind: Kind, executable: str) -> dict[int, int]:
    """Return the bytes of the rows from which gradients of tables are summed, by the bytes of these
    operators' tensors, which include the table."""
    found = {}
    for node in kind.graphs[executable].nodes:
        if node.op == "call_function" and operator_name(node) == _TABLE_GRADIENT:
            rows, indices = (node.args[place].meta["val"].nbytes for place in (0, 1))
            found[rows + indices + node.meta["val"].nbytes] = rows
    return found


def _of_rows(cost: OperatorCost, rows: Mapping[int, int]) -> OperatorCost:
    """Return the cost of a table's gradient as that of a look-up: rows are read and written, since
    the table is at the host, which adds them."""
    if cost.name != _TABLE_GRADIENT or cost.bytes not in rows:
        return cost
    return replace(cost, bytes=2 * rows[cost.bytes])


def _groups(kind: Kind, masks: Mapping[int, MaskState]) -> dict[tuple[int, int], _Group]:
    members: dict[tuple[int, int], list[MaskState]] = {}
    for position, use in kind.sparse.items():
        key = (_elements(kind.weights[position]), use.capacity)
        members.setdefault(key, []).append(masks[position])
    return {
        key: _Group(
            sum(state.kept for state in states) / (len(states) * key[1]),
            any(state.dense_gradient for state in states),
        )
        for key, states in members.items()
        if key[1]
    }


def _elements(spec: TensorSpec) -> int:
    return spec.bytes // spec.dtype.itemsize


def _at(cost: OperatorCost, tokens: int, groups: Mapping[tuple[int, int], _Group]) -> OperatorCost:
    """Return the cost of an operator with the entries that its weight has."""
    if cost.work != "sparse product":
        return cost
    capacity = cost.flops // (2 * tokens)
    elements = round(capacity / cost.size)
    group = groups.get((elements, capacity))
    if group is None:  # a product of other tokens, such as those of an expert
        return cost
    gradient = _GRADIENT_BYTES if cost.name == _GRADIENT else 0
    if gradient and group.dense_gradient:
        return replace(
            cost,
            name="mm",
            work="product",
            layout="tokens",
            size=float(min(tokens, elements)),
            flops=2 * tokens * elements,
            bytes=cost.bytes - gradient * capacity,
        )
    kept = max(1, round(capacity * group.share))
    return replace(
        cost,
        size=kept / elements,
        flops=2 * tokens * kept,
        bytes=cost.bytes - gradient * (capacity - kept),
    )

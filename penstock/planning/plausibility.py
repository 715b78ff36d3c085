"""Refusal of runs that are far too large for the machine, before compilation.

The memory budget (`memory_budget.py`) is exact, but needs the compiled program. With a number that
is wrong by orders of magnitude, compilation would take hours, or all memory. This module computes a
lower bound on a run's memory: the store, a step's batch, one micro-batch's hidden states, the
buffers.
"""

import math

from penstock.config import Config, size_above
from penstock.engine import target_of
from penstock.errors import BudgetError, CompileError
from penstock.models import ModelSource
from penstock.planning import store_factory
from penstock.planning.machine_limits import Machine
from penstock.planning.sparse_weights import SparsePlan

MOST_TENSORS = 1 << 16
"""Limit on the parameters of a traced model: 4,096 layers of 16. A layer takes some 50 ms."""

_COPIES_OF_BATCH = 2
_TIMES = 8  # below, compilation takes no longer than for a run that fits; the budget reports more
_FLOAT_BYTES = {"fp32": 4, "bf16": 2}


def refuse_implausible(
    config: Config,
    source: ModelSource,
    length: int,
    device: str,
    machine: Machine,
    sparse: SparsePlan | None = None,
) -> None:
    """Refuse a run of sequences of `length` on `device` that greatly exceeds the machine.

    **Raises:** `CompileError` for a model with too many tensors. `BudgetError` if the sum is many
    times the limit; the text lists the parts.
    """
    tensors = len(source.shapes())
    if tensors > MOST_TENSORS:
        raise CompileError(
            f"{source.name} has {tensors:,} parameter tensors, at most {MOST_TENSORS:,} can be "
            "traced in reasonable time; use fewer, larger layers"
        )
    limit, limit_name = machine.memory_bytes, "this machine has"
    if config.memory is not None and int(config.memory) < limit:
        limit, limit_name = int(config.memory), "memory allows"
    parts = [part for part in _parts(config, source, length, device, sparse) if part[1]]
    total = sum(size for _, size in parts)
    if total > _TIMES * limit:
        shown = "; ".join(f"{name}: {size_above(size)}" for name, size in parts)
        largest = max(parts, key=lambda part: part[1])
        raise BudgetError(
            f"this run needs at least {size_above(total)}, {limit_name} {size_above(limit)} "
            f"({shown}); {_ADVICE[largest[0].split(' (')[0]]}"
        )


_ADVICE = {
    "store": "make the model smaller, or set store.flash.path to a folder on a fast disk",
    "batch": "lower batch.size or data.sequence_length",
    "one sequence's hidden states": "lower data.sequence_length",
    "buffers": "make the model smaller",
}


def _parts(
    config: Config, source: ModelSource, length: int, device: str, sparse: SparsePlan | None
) -> list[tuple[str, int]]:
    row = sum(spec.bytes(length) for spec in source.inputs.values())
    batch = _COPIES_OF_BATCH * config.batch.size * row
    hidden = source.structure.number("hidden_size")
    states = 0
    in_host_memory = not (target_of(device).has_own_memory or config.cluster.has_other_hosts)
    if hidden is not None and in_host_memory:
        states = length * hidden * _FLOAT_BYTES[config.precision]
    return [
        (f"store ({source.parameter_count():,} parameters)", _store_bytes(config, source, sparse)),
        (f"batch ({config.batch.size:,} sequences of {length:,})", batch),
        (f"one sequence's hidden states ({length:,} tokens)", states),
        ("buffers", source.buffer_bytes()),
    ]


def _store_bytes(config: Config, source: ModelSource, sparse: SparsePlan | None) -> int:
    """Return a lower bound on the store's memory on this host, if the store is in its memory."""
    cluster = config.cluster
    if config.store.flash.path is not None:
        return 0
    if cluster.shards == "apart" and cluster.has_other_hosts:
        return 0
    trains_all = not (config.freeze or config.train or config.lora.rank is not None)
    absent = 0
    if sparse is not None:
        absent = sum(sparse.elements.values()) - sum(sparse.capacities.values())
    trained = source.trained_count() - absent if trains_all else 0
    roles = sum(role.bytes(trained) for role in store_factory.optimizer_of(config).roles)
    weights = 4 * (source.parameter_count() - absent)
    if not trains_all:  # frozen weights that came as bfloat16 stay bfloat16
        weights -= 2 * sum(math.prod(source.shapes()[name]) for name in source.bfloat16)
    once = weights + _FLOAT_BYTES[config.gradient_precision] * trained + roles
    return config.store.replicas * once

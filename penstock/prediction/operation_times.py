"""What the operations of a step cost on a machine, each of them alone.

Everything is derived from the program, the schedule of a step and the store's formats. How the
costs overlap is the task of `step_tasks.py`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.engine import EnginePlan
from penstock.machines import (
    EnginePart,
    MachineDescription,
    RateTable,
    operator_seconds,
    sum_seconds,
)
from penstock.program import Program, WeightSpec
from penstock.sparsity import expected_bytes
from penstock.step_schedule import Operation, StepSchedule, narrow_gradient_bytes
from penstock.store import Role

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class OperationCost:
    """The cost of one operation of the schedule, for one engine and the store.

    Attributes:
        operation: of the schedule.
        compute_seconds: of one engine, for all of its micro-batches.
        flops: of one engine, recomputation included.
        weight_bytes: streamed to each engine.
        gradient_bytes: returned to the store, once summed.
        receive_seconds: of the store, to accept the sum.
        updated: the weights whose pending update must be applied before the fetch.
    """

    operation: Operation
    compute_seconds: float
    flops: int
    weight_bytes: int
    gradient_bytes: int
    receive_seconds: float
    updated: tuple[str, ...]


@dataclass(frozen=True)
class StepCosts:
    """The costs of a step: its operations in order, and the update of each weight in seconds."""

    operations: tuple[OperationCost, ...]
    update_seconds: Mapping[str, float]

    @property
    def compute_seconds(self) -> float:
        """Seconds in which one engine computes."""
        return sum(cost.compute_seconds for cost in self.operations)

    @property
    def stream_bytes(self) -> int:
        """Bytes of weights that a step streams to each engine."""
        return sum(cost.weight_bytes for cost in self.operations)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that a step returns."""
        return sum(cost.gradient_bytes for cost in self.operations)


def step_costs(
    program: Program,
    schedule: StepSchedule,
    plan: EnginePlan,
    machine: MachineDescription,
    *,
    micro_batches: int,
    roles: Iterable[Role],
    gradient_width: int,
    store_share: float = 1.0,
) -> StepCosts:
    """Return the costs of a step.

    Args:
        schedule: the operations.
        plan: says which stages are computed again.
        micro_batches: those of one engine, of the engine that has the most.
        roles: the optimizer's state.
        gradient_width: bytes per element of a stored gradient.
        store_share: part of every weight that one shard of the store holds.
    """
    pending = {name for name, weight in program.weights.items() if weight.trainable}
    found = []
    seconds_of: dict[tuple[int, str], float] = {}  # equal stages take equal time
    for operation in schedule.operations:
        names = program.stages[operation.stage].weights
        updated = tuple(name for name in names if name in pending)
        pending.difference_update(updated)
        found.append(
            _operation_cost(
                program,
                operation,
                plan,
                machine,
                micro_batches,
                gradient_width,
                store_share,
                updated,
                seconds_of,
            )
        )
    speed, state = machine.store.speed, tuple(roles)
    seconds = {
        name: store_share * _update_seconds(weight, state, gradient_width, speed)
        for name, weight in program.weights.items()
        if weight.trainable
    }
    return StepCosts(tuple(found), seconds)


def _operation_cost(
    program: Program,
    operation: Operation,
    plan: EnginePlan,
    machine: MachineDescription,
    micro_batches: int,
    gradient_width: int,
    store_share: float,
    updated: tuple[str, ...],
    seconds_of: dict[tuple[int, str], float],
) -> OperationCost:
    kind, engine = program.stages[operation.stage].kind, machine.engine
    executable = executable_of(operation, plan)
    key = id(kind), executable
    if key not in seconds_of:
        seconds_of[key] = sum(operator_seconds(cost, engine) for cost in kind.costs[executable])
    one = seconds_of[key] + engine.stage_seconds
    one += _dense_gradient_seconds(program, operation, engine)
    narrow = narrow_gradient_bytes(program, operation)
    adding = sum_seconds(operation.gradient_bytes, narrow, micro_batches, engine)
    width = machine.link.value_bytes if machine.link is not None else None
    weights = [program.weights[name] for name in operation.weights]
    gradients = operation.gradient_bytes // _FLOAT_BYTES
    received = gradients * (_FLOAT_BYTES + gradient_width) * store_share
    stored_type = "float32" if gradient_width == _FLOAT_BYTES else "bfloat16"
    receive = received / machine.store.speed.curve("receive", stored_type).at(received or 1)
    return OperationCost(
        operation,
        micro_batches * one + adding,
        micro_batches * operation.flops,
        sum(_streamed_bytes(weight, width) for weight in weights),
        gradients * (width or _FLOAT_BYTES),
        receive,
        updated,
    )


def _dense_gradient_seconds(program: Program, operation: Operation, engine: EnginePart) -> float:
    """Return the time of the gradients of every element of sparse weights, for one micro-batch: a
    dense product each, beside the sparse one, that sums over tokens."""
    stage, seconds = program.stages[operation.stage], 0.0
    for position, use in stage.kind.sparse.items():
        weight = program.weights[stage.weights[position]]
        if stage.weights[position] in operation.dense_gradients:
            dtype = "bfloat16" if weight.stream_dtype.itemsize == 2 else "float32"
            tokens = sum(use.product_tokens)
            curve = engine.speed.curve("product", dtype, "tokens")
            size = min(tokens, *weight.shape)
            seconds += 2 * tokens * weight.elements / curve.at(size) + engine.operator_seconds
    return seconds


def executable_of(operation: Operation, plan: EnginePlan) -> str:
    """Return the name of the executable that computes an operation (`program.Kind`)."""
    again = operation.stage in plan.recompute
    return {
        "infer": "infer",
        "forward": "infer" if again else "forward",
        "turn": "turn",
        "backward": "recompute" if again else "backward",
    }[operation.sweep]


def _streamed_bytes(weight: WeightSpec, value_bytes: int | None) -> int:
    """Return the bytes of one fetch; a mask takes those of one chosen at random."""
    index = expected_bytes(weight.entries, weight.elements) if weight.is_sparse else 0
    return weight.entries * (value_bytes or weight.stream_dtype.itemsize) + index


def update_bytes(weight: WeightSpec, roles: Iterable[Role], gradient_width: int) -> int:
    """Return the bytes that the update of a weight reads and writes: master and state both ways,
    the gradient once."""
    kept = weight.format.width * weight.entries + sum(r.bytes(weight.entries) for r in roles)
    return 2 * kept + gradient_width * weight.entries


def _update_seconds(
    weight: WeightSpec, roles: tuple[Role, ...], gradient_width: int, speed: RateTable
) -> float:
    moved = update_bytes(weight, roles, gradient_width)
    narrow = any(role.dtype == "uint8" for role in roles)
    dtype = "8bit" if narrow else "bfloat16" if weight.format.rest else "float32"
    return moved / speed.curve("update", dtype).at(moved)

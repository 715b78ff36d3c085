"""The execution plan of a step: micro-batch, program, and memory of each part."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from penstock.compiler import Products
from penstock.config import Config
from penstock.engine import EnginePlan, Sharing, SparseWeights, predict_bytes, target_of
from penstock.errors import BudgetError, ConfigError
from penstock.models import ModelSource
from penstock.planning import selected_weights, store_factory
from penstock.planning.machine_limits import Machine, ReadMachine
from penstock.planning.memory_budget import Budget
from penstock.planning.memory_shares import HostCapacity, MemoryShares
from penstock.planning.micro_batching import MicroBatchPlan, divide_batch, divided_as_recorded
from penstock.planning.plausibility import refuse_implausible
from penstock.planning.sparse_weights import SparsePlan
from penstock.planning.step_flops import StepFlops
from penstock.planning.transfer_memory import computes_dense_gradients
from penstock.program import Program
from penstock.step_schedule import ByStep, StepSchedule


@dataclass(frozen=True)
class ExecutionPlan:
    """The division of a step's batch, the recomputation of an engine, and the memory of every part.

    `device` is the target's name, for all engines. `products` is the library that multiplies large
    float32 matrices. `slot_bytes` is the limit on the program's stages, if any. With fewer engines
    than `least_engines` a step would exceed the budget of one engine. `room` limits the number of
    engines on this machine. `sparse` are the sparse weights, if the run has any, and
    `sparse_weights` is what the engines of this process share of them. `memory` has the bytes of
    this host by part, and `memory_limit` is what all parts together may use.
    """

    program: Program
    device: str
    plan: EnginePlan
    sequence_length: int
    micro_batch: int
    micro_batches: int
    shares: MemoryShares
    slot_bytes: int | None
    least_engines: int = 1
    room: HostCapacity | None = None
    products: Products = "torch"
    sparse: SparsePlan | None = None
    sparse_weights: SparseWeights | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    memory_limit: int = 0

    @cached_property
    def schedule_of(self) -> ByStep[StepSchedule]:
        """The operations of each step, which counts from 1."""
        policy = None if self.sparse is None else self.sparse.policy
        return StepSchedule.by_step(self.program, self.plan.recompute, policy)

    @cached_property
    def flops(self) -> StepFlops:
        """The arithmetic of a step."""
        return StepFlops(self.program, self.micro_batches)

    @property
    def budget_bytes(self) -> int:
        """The memory of one engine for computation: its budget without its transfer buffers."""
        return self.shares.engine - self.plan.beside_bytes

    @property
    def inference_bytes(self) -> int:
        """The memory of an engine for evaluation or generation while no other one computes."""
        return self.shares.inference - self.plan.beside_bytes


def plan_execution(
    config: Config,
    source: ModelSource,
    device: str,
    length: int,
    recorded_micro_batch: int | None = None,
    recorded_slot_bytes: int | None = None,
    devices: Sequence[str] = (),
    notice: Callable[[str], None] = lambda text: None,
    bfloat16: Collection[str] | None = None,
    *,
    recorded_products: Products | None = None,
    recorded_entries: Mapping[str, int] | None = None,
    read_machine: ReadMachine = Machine.here,
    compile_source: Callable[..., Program] | None = None,
) -> ExecutionPlan:
    """Divide the batch (`micro_batching.py`), compile, and choose the stages to recompute.

    A resumed run keeps the micro-batch and the cut of its start, if they fit, its library of matrix
    products, and the numbers of entries that its sparse weights had. `devices` are those of a
    group. `notice` is called with sentences for the user. `bfloat16` are the frozen weights to
    store as bfloat16; by default, the weights that came as bfloat16. `read_machine` reads the
    machine of the engines. `compile_source` replaces `builders.compile_source`.

    **Raises:** `BudgetError` if the engines cannot execute a step; the errors of
    `refuse_implausible`.
    """
    frozen = selected_weights.kept_as_bfloat16(config, source) if bfloat16 is None else bfloat16
    sparse = selected_weights.sparse_weights_of(config, source, recorded_entries)
    machine = read_machine(())
    refuse_implausible(config, source, length, device, machine, sparse)
    products = target_of(device).products_as_recorded(recorded_products, machine.processor)

    def compile_for(micro_batch: int, slot_bytes: int | None) -> Program:
        return (compile_source or _compile_source())(
            source,
            micro_batch=micro_batch,
            length=length,
            precision=config.precision,
            device=device,
            products=products,
            train=config.train,
            freeze=config.freeze,
            bfloat16=frozen,
            sparse=sparse.capacities if sparse is not None else None,
            slot_bytes=slot_bytes,
        )

    def planned(division: MicroBatchPlan) -> ExecutionPlan:
        machine = read_machine(devices or (device,))  # includes the compiled program
        plan = _planned(config, division, device, length, devices, machine)
        return replace(plan, products=products, sparse=sparse)

    with contextlib.suppress(BudgetError):
        recorded = recorded_micro_batch, recorded_slot_bytes
        if (kept := divided_as_recorded(config, compile_for, *recorded)) is not None:
            return planned(kept)
    tokens = machine.micro_batch_tokens
    division = divide_batch(
        config, compile_for, device, length, recorded_micro_batch, devices, read_machine, tokens
    )
    try:
        plan = planned(division)
    except BudgetError as error:
        if config.batch.micro != "auto" or config.engines == 1:
            raise
        raise BudgetError(f"{error}\n{_why(config, division)}") from None
    for text in _notices(config, division, plan, is_chosen=recorded_micro_batch is None):
        notice(text)
    return plan


def _notices(
    config: Config, division: MicroBatchPlan, plan: ExecutionPlan, *, is_chosen: bool
) -> Iterator[str]:
    if division.is_for_many and config.batch.micro == "auto" and is_chosen:
        yield _why(config, division)
    if config.cluster.start != "none" and plan.least_engines == config.engines > 1:
        yield (
            f"engines: if one of {config.engines} is lost, a step waits until it has been "
            "replaced, since the others have no memory for its share; to go on with fewer, raise "
            "engine.memory or engines, or lower batch.size"
        )


def _compile_source() -> Callable[..., Program]:
    from penstock.planning import builders  # which imports all that traces

    return builders.compile_source


def _why(config: Config, division: MicroBatchPlan) -> str:
    """Explain the choice of the micro-batch, and name the alternatives."""
    size, text = config.batch.size, "as for one engine"
    if division.is_for_many:
        text = f"the minimum, since one engine cannot hold a step of {size} sequences"
    return (
        f"batch.micro: auto is {division.micro_batch}, {text}. The result is then the same with "
        f"any number of engines; to choose for {config.engines} engines alone, set batch.micro to "
        f"a divisor of {size}"
    )


def _largest_shared(config: Config) -> int:
    """Return the largest `batch.micro` that gives every engine a micro-batch.

    `batch.size` is at least the number of engines.
    """
    size = config.batch.size
    return next(micro for micro in range(size // config.engines, 0, -1) if size % micro == 0)


def _planned(
    config: Config,
    division: MicroBatchPlan,
    device: str,
    length: int,
    devices: Sequence[str],
    machine: Machine,
) -> ExecutionPlan:
    """Return the execution plan of a division for the configured engines."""
    micro_batch = division.micro_batch
    micro_batches = config.batch.size // micro_batch
    if micro_batches < config.engines:
        key, what = ("engine.devices", "devices") if devices else ("engines", "engines")
        many = "micro-batch" if micro_batches == 1 else "micro-batches"
        raise ConfigError(
            f"{key}: {config.engines} {what} cannot share {micro_batches} {many} "
            f"of {micro_batch}; set batch.micro to {_largest_shared(config)}, or lower {key}"
        )
    half = -(-config.engines // 2)
    if config.cluster.start == "none" or half == config.engines:
        return _planned_for(config.engines, config, division, device, length, devices, machine)
    try:
        return _planned_for(half, config, division, device, length, devices, machine)
    except BudgetError:  # no room for the shares of lost engines, which must then be replaced
        return _planned_for(config.engines, config, division, device, length, devices, machine)


def _planned_for(
    engines: int,
    config: Config,
    division: MicroBatchPlan,
    device: str,
    length: int,
    devices: Sequence[str],
    machine: Machine,
) -> ExecutionPlan:
    """Return the execution plan of a step that fits so many of the configured engines."""
    program, micro_batches = division.program, config.batch.size // division.micro_batch
    dense = computes_dense_gradients(config)
    sharing = Sharing(len(devices), micro_batches, dense) if devices else None
    per_engine = -(-micro_batches // engines)
    roles = store_factory.optimizer_of(config).roles
    budget = Budget(config, program, per_engine, device, roles, machine, devices, sharing)
    engine_bytes = budget.engine_bytes()
    plan = budget.plan(engine_bytes)
    shares = budget.divide(plan, engine_bytes)
    return ExecutionPlan(
        program,
        device,
        plan,
        length,
        division.micro_batch,
        micro_batches,
        shares,
        division.slot_bytes,
        _fewest(program, plan, micro_batches, engines, device, engine_bytes),
        budget.room(shares),
        memory=budget.parts(shares),
        memory_limit=budget.limit_bytes,
    )


def _fewest(
    program: Program,
    plan: EnginePlan,
    micro_batches: int,
    engines: int,
    device: str,
    budget_bytes: int,
) -> int:
    """Return the smallest number of engines that can hold a step planned for `engines`."""
    while engines > 1:
        share = -(-micro_batches // (engines - 1))
        if predict_bytes(program, share, plan, device).peak_bytes > budget_bytes:
            break
        engines -= 1
    return engines

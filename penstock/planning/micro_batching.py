"""The division of a step's batch into micro-batches, and the size limit of stages.

The micro-batch decides bits: the micro-batches are the leaves of the tree of sums. The stage limit
decides the layout of a store on flash. The stage limit decides bits only where a stage cannot be
cut without changing the order of sums (`compiler/cut.py`). So both are chosen as for one engine
that computes the whole batch. The number and location of engines, and the existing store, have no
influence. `execution_plan.py` checks whether the available engines can execute the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.config import ClusterConfig, Config
from penstock.engine import can_fit, target_of
from penstock.errors import BudgetError
from penstock.planning import store_factory
from penstock.planning.machine import Machine, ReadMachine
from penstock.planning.memory_budget import Budget, computes_dense_gradients
from penstock.program import Program

_LEAST_TOKENS = 512  # of a micro-batch; smaller products are dominated by their start-up time
_ENGINES = 8  # that get a micro-batch each; more engines need a larger batch, or `batch.micro`
_BUDGET_SLOTS = 4  # a stage of 1/4 of the budget leaves memory for slots and activations

Compile = Callable[[int, int | None], Program]
"""Compiles for a micro-batch of so many sequences, with stages of at most so many bytes."""


@dataclass(frozen=True)
class MicroBatchPlan:
    """A micro-batch, and its program.

    `slot_bytes` is the limit on the program's stages, if any. `is_for_many` says that one engine
    could not hold the whole batch.
    """

    program: Program
    micro_batch: int
    slot_bytes: int | None
    is_for_many: bool = False


def divided_as_recorded(
    config: Config, compile_for: Compile, micro_batch: int | None, slot_bytes: int | None
) -> MicroBatchPlan | None:
    """Return the division with which a run was started; None for a new run or another setting.

    **Raises:** `BudgetError` if a stage cannot be cut small enough.
    """
    if micro_batch is None or config.batch.micro not in ("auto", micro_batch):
        return None
    if config.batch.size % micro_batch:
        return None
    return MicroBatchPlan(compile_for(micro_batch, slot_bytes), micro_batch, slot_bytes)


def divide_batch(
    config: Config,
    compile_for: Compile,
    device: str,
    length: int,
    recorded_micro_batch: int | None = None,
    devices: Sequence[str] = (),
    read_machine: ReadMachine = Machine.here,
    micro_batch_tokens: int | None = None,
) -> MicroBatchPlan:
    """Choose the micro-batch of sequences of `length`, and cut stages that are too large.

    With `batch.micro: auto` the micro-batch is the largest divisor of the batch that meets three
    conditions. It does not exceed the useful size; it leaves `_ENGINES` engines a micro-batch each
    (unless that makes it small); it fits one engine. If no divisor fits, the least is taken. Stages
    are cut smaller before the micro-batch is. A resumed run keeps its micro-batch. `read_machine`
    reads the available memory. A micro-batch has at most `micro_batch_tokens` useful tokens; by
    default those of the device's target.

    **Raises:** `BudgetError` if a stage cannot be cut small enough, or no memory is left for
    engines.
    """
    dense, recompute = computes_dense_gradients(config), config.engine.recompute
    problem: BudgetError | None = None
    tried: list[MicroBatchPlan] = []
    budget_bytes = 0
    slot_bytes: int | None
    useful = micro_batch_tokens or target_of(device).micro_batch_tokens
    for micro_batch in _candidates(config, length, useful, recorded_micro_batch):
        tried.clear()
        slot_bytes, micro_batches = None, config.batch.size // micro_batch
        for _ in ("stages as they are", "stages cut to what an engine may use"):
            try:
                program = compile_for(micro_batch, slot_bytes)
                machine = read_machine(devices or (device,))  # includes the program
                budget_bytes = _one_engine_bytes(
                    config, program, micro_batches, device, machine, devices
                )
            except BudgetError as error:
                problem = problem or error
                break
            division = MicroBatchPlan(program, micro_batch, slot_bytes)
            if can_fit(program, micro_batches, budget_bytes, recompute, device, dense):
                return division
            tried.append(division)
            slot_bytes = budget_bytes // _BUDGET_SLOTS
    if not tried:
        assert problem is not None
        raise problem
    fits_any = [
        division
        for division in tried
        if can_fit(division.program, 1, budget_bytes, recompute, device, dense)
    ]
    chosen = (*fits_any, tried[-1])[0]
    return MicroBatchPlan(chosen.program, chosen.micro_batch, chosen.slot_bytes, is_for_many=True)


def _one_engine_bytes(
    config: Config,
    program: Program,
    micro_batches: int,
    device: str,
    machine: Machine,
    devices: Sequence[str],
) -> int:
    """Return the budget of an engine, or the budget that a single engine would have."""
    if config.engine.memory != "auto":
        return int(config.engine.memory)
    cluster, roles = config.cluster, store_factory.optimizer_of(config).roles
    if cluster.shards == "here" or not cluster.has_other_hosts:
        cluster = ClusterConfig()  # as in one process
    alone = config.model_copy(update={"engines": 1, "cluster": cluster})
    return Budget(alone, program, micro_batches, device, roles, machine, devices).engine_bytes()


def _candidates(config: Config, length: int, useful: int, recorded: int | None) -> list[int]:
    size = config.batch.size
    if config.batch.micro != "auto":
        return [int(config.batch.micro)]
    if recorded is not None and size % recorded == 0:
        return [recorded]
    share = size * length // _ENGINES
    tokens = max(_LEAST_TOKENS, min(share, useful))
    most = max(1, tokens // length)
    return [c for c in range(min(most, size), 0, -1) if size % c == 0]

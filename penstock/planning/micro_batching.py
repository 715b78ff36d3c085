"""How a step's batch is divided: into which micro-batches, for stages cut how small.

The first decides bits: the tree of sums has the micro-batches as its leaves. The second decides how
a store on flash is laid out; and bits only where a stage cannot be cut without another order of
sums (`compiler/cut.py`). So both are chosen as for one engine that takes the whole batch, and the
number of engines, where they are, and what there is of the store decide nothing here. Whether the
engines that there are can do it is another question (`execution_plan.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.config import ClusterConfig, Config
from penstock.engine import can_fit, target_of
from penstock.errors import BudgetError
from penstock.planning import store_factory
from penstock.planning.machine import Machine, ReadMachine
from penstock.planning.memory_budget import Budget
from penstock.program import Program

_LEAST_TOKENS = 512  # of a micro-batch; smaller products spend their time on starting
_ENGINES = 8  # that a micro-batch each is left to; more want a larger batch, or `batch.micro`
_BUDGET_SLOTS = 4  # a stage of a quarter of the budget leaves room for slots and activations

Compile = Callable[[int, int | None], Program]
"""Compiles for a micro-batch of so many sequences, and stages of so many bytes at most."""


@dataclass(frozen=True)
class MicroBatchPlan:
    """A micro-batch, and the program for it.

    `slot_bytes` is what the program's stages had to fit, if anything; `is_for_many` says that one
    engine could not hold the whole batch.
    """

    program: Program
    micro_batch: int
    slot_bytes: int | None
    is_for_many: bool = False


def divided_as_recorded(
    config: Config, compile_for: Compile, micro_batch: int | None, slot_bytes: int | None
) -> MicroBatchPlan | None:
    """Return the division that a run was started with; None if it has none, or another is asked.

    **Raises:** `BudgetError` where a stage cannot be cut so small.
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
) -> MicroBatchPlan:
    """Choose the micro-batch of sequences of `length`, and cut the stages where they are too large.

    With `batch.micro: auto` it is the largest divisor of the batch that is not beyond what helps,
    leaves `_ENGINES` engines a micro-batch each (unless that makes it small), and fits one engine;
    where none does, the least. Stages are cut smaller before the micro-batch is. A resumed run
    keeps its micro-batch. `read_machine` says what there is of memory.

    **Raises:** `BudgetError` where a stage cannot be cut so small, or nothing is left for engines.
    """
    problem: BudgetError | None = None
    tried: list[MicroBatchPlan] = []
    budget_bytes = 0
    slot_bytes: int | None
    for micro_batch in _candidates(config, length, device, recorded_micro_batch):
        tried.clear()
        slot_bytes, micro_batches = None, config.batch.size // micro_batch
        for _ in ("stages as they are", "stages cut to what an engine may use"):
            try:
                program = compile_for(micro_batch, slot_bytes)
                machine = read_machine(devices or (device,))  # which has the program by now
                budget_bytes = _one_engine_bytes(
                    config, program, micro_batches, device, machine, devices
                )
            except BudgetError as error:
                problem = problem or error
                break
            division = MicroBatchPlan(program, micro_batch, slot_bytes)
            if can_fit(program, micro_batches, budget_bytes, config.engine.recompute, device):
                return division
            tried.append(division)
            slot_bytes = budget_bytes // _BUDGET_SLOTS
    if not tried:
        assert problem is not None
        raise problem
    fits_any = [
        division
        for division in tried
        if can_fit(division.program, 1, budget_bytes, config.engine.recompute, device)
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
    """Return the budget that an engine has, or would have if there were one of them."""
    if config.engine.memory != "auto":
        return int(config.engine.memory)
    cluster, roles = config.cluster, store_factory.optimizer_of(config).roles
    if cluster.shards == "here" or not cluster.has_other_hosts:
        cluster = ClusterConfig()  # as in one process
    alone = config.model_copy(update={"engines": 1, "cluster": cluster})
    return Budget(alone, program, micro_batches, device, roles, machine, devices).engine_bytes()


def _candidates(config: Config, length: int, device: str, recorded: int | None) -> list[int]:
    size = config.batch.size
    if config.batch.micro != "auto":
        return [int(config.batch.micro)]
    if recorded is not None and size % recorded == 0:
        return [recorded]
    share = size * length // _ENGINES
    tokens = max(_LEAST_TOKENS, min(share, target_of(device).micro_batch_tokens))
    most = max(1, tokens // length)
    return [c for c in range(min(most, size), 0, -1) if size % c == 0]

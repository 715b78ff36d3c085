"""The division of a step's batch into micro-batches, and the size limit of stages.

The micro-batch decides bits: the micro-batches are the leaves of the tree of sums. The stage limit
decides the layout of a store on flash. The stage limit decides bits only where a stage cannot be
cut without changing the order of sums (`compiler/cut.py`). So both are chosen as for one engine
that computes the whole batch. The number and location of engines, and the existing store, have no
influence. `execution_plan.py` checks whether the available engines can execute the result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.config import ClusterConfig, Config
from penstock.engine import bytes_of_choice, can_fit, least_kept_bytes, target_of
from penstock.errors import BudgetError
from penstock.planning import store_factory
from penstock.planning.machine_limits import Machine, ReadMachine
from penstock.planning.memory_budget import Budget
from penstock.planning.transfer_memory import computes_dense_gradients
from penstock.program import Program, largest_stage

_LEAST_TOKENS = 512  # of a micro-batch; smaller products are dominated by their start-up time
_ENGINES = 8  # that get a micro-batch each; more engines need a larger batch, or `batch.micro`
_BUDGET_SLOTS = 4  # a stage of 1/4 of the budget leaves memory for slots and activations
_BESIDE_LARGEST = 16  # the smallest stages have room for this part of the largest weight beside it

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
    are cut smaller before the micro-batch is; those of the least one as small as its largest weight
    allows. A resumed run keeps its micro-batch. `read_machine` reads the available memory. A
    micro-batch has at most `micro_batch_tokens` useful tokens; by default those of the device's
    target.

    **Raises:** `BudgetError` if a stage cannot be cut small enough, or no memory is left for
    engines.
    """
    useful = micro_batch_tokens or target_of(device).micro_batch_tokens
    trials = _Trials(config, compile_for, device, devices, read_machine)
    return trials.largest_of(_candidates(config, length, useful, recorded_micro_batch))


class _Trials:
    """Compiles for one micro-batch after the other, and says whether one engine can compute a step.

    **Arguments:** those of `divide_batch`.
    """

    def __init__(
        self,
        config: Config,
        compile_for: Compile,
        device: str,
        devices: Sequence[str],
        read_machine: ReadMachine,
    ) -> None:
        self._config, self._compile_for, self._device = config, compile_for, device
        self._devices, self._read_machine = devices, read_machine
        self._problem: BudgetError | None = None
        self._tried: dict[int, list[MicroBatchPlan]] = {}  # what does not fit
        self._budget_bytes = 0
        self._none_will_fit = False  # by any micro-batch

    def largest_of(self, candidates: Sequence[int]) -> MicroBatchPlan:
        """Return the division with the largest of these micro-batches, in falling order, that fits.

        Each trial compiles the model, so after the largest the others are found by bisection: a
        step needs less memory with a smaller micro-batch, until the partial sums of gradients
        outweigh that. What bisection has passed over is tried before a run is refused.
        """
        found: MicroBatchPlan | None = None
        if (first := self._fitting(candidates[0])) is not None:
            return first
        low, high = 1, len(candidates)
        while low < high and not self._none_will_fit:
            middle = (low + high) // 2
            division = self._fitting(candidates[middle])
            if division is None:
                low = middle + 1
            else:
                found, high = division, middle
        if found is not None:
            return found
        for micro_batch in candidates if not self._none_will_fit else candidates[-1:]:
            if micro_batch not in self._tried:
                division = self._fitting(micro_batch)
                if division is not None:
                    return division
        return self._finest(candidates[-1]) or self._for_many(candidates[-1])

    def _fitting(self, micro_batch: int) -> MicroBatchPlan | None:
        """Return the division with a micro-batch; None if it does not fit.

        Stages are first taken as they are, then cut to what an engine may use.
        """
        micro_batches = self._config.batch.size // micro_batch
        tried = self._tried[micro_batch] = []
        slot_bytes: int | None = None
        for _ in ("as they are", "cut"):
            division = self._divided(micro_batch, slot_bytes)
            if division is None or self._can_fit(division, micro_batches):
                return division
            tried.append(division)
            kept = least_kept_bytes(division.program, micro_batches)
            self._none_will_fit = kept > self._budget_bytes
            slot_bytes = self._budget_bytes // _BUDGET_SLOTS
            if _largest_bytes(division) <= slot_bytes:
                break  # nothing would be cut
        return None

    def _finest(self, micro_batch: int) -> MicroBatchPlan | None:
        """Return the division with the smallest stages; None if it does not fit, or cannot be made.

        The size of its stages depends on the model alone, so a larger budget finds it too.
        """
        tried = self._tried[micro_batch]
        if not tried or self._none_will_fit:
            return None
        largest = max(weight.stream_bytes for weight in tried[-1].program.weights.values())
        slot_bytes = largest + largest // _BESIDE_LARGEST
        if _largest_bytes(tried[-1]) <= slot_bytes:
            return None  # nothing would be cut
        division = self._divided(micro_batch, slot_bytes)
        if division is None or self._can_fit(division, self._config.batch.size // micro_batch):
            return division
        tried.append(division)
        return None

    def _divided(self, micro_batch: int, slot_bytes: int | None) -> MicroBatchPlan | None:
        """Compile for a micro-batch, and read the budget of an engine beside the program; None if
        that is impossible."""
        config, device, devices = self._config, self._device, self._devices
        try:
            program = self._compile_for(micro_batch, slot_bytes)
            machine = self._read_machine(devices or (device,))  # includes the program
            self._budget_bytes = _one_engine_bytes(
                config, program, config.batch.size // micro_batch, device, machine, devices
            )
        except BudgetError as error:
            self._problem = self._problem or error
            return None
        return MicroBatchPlan(program, micro_batch, slot_bytes)

    def _for_many(self, micro_batch: int) -> MicroBatchPlan:
        """Return the division that needs the least, of those that do not fit, for several
        engines."""
        tried = self._tried[micro_batch]
        if not tried:
            assert self._problem is not None
            raise self._problem
        return replace(min(tried, key=self._needed_bytes), is_for_many=True)

    def _needed_bytes(self, division: MicroBatchPlan) -> int:
        """Return the least memory of one engine for a step."""
        config = self._config
        return bytes_of_choice(
            division.program,
            config.batch.size // division.micro_batch,
            config.engine.recompute,
            self._device,
            dense_gradients=computes_dense_gradients(config),
        )[0]

    def _can_fit(self, division: MicroBatchPlan, micro_batches: int) -> bool:
        config = self._config
        return can_fit(
            division.program,
            micro_batches,
            self._budget_bytes,
            config.engine.recompute,
            self._device,
            computes_dense_gradients(config),
        )


def _largest_bytes(division: MicroBatchPlan) -> int:
    return largest_stage(division.program, lambda weight: weight.stream_bytes)[1]


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
    if cluster.shards == "here" and cluster.has_other_hosts:
        # Refuses a store that does not fit its host, with the remedies that this cluster allows.
        Budget(config, program, micro_batches, device, roles, machine, devices)
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

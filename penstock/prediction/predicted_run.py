"""The prediction of a run: memory, traffic, the time of a step, and what binds it."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property

from penstock.calibration import is_kept
from penstock.config import Config
from penstock.engine import expected_layout_bytes, most_layout_bytes
from penstock.errors import ConfigError
from penstock.machines import MachineDescription
from penstock.planning import ExecutionPlan, mask_rule_of, relay_count, store_factory
from penstock.prediction.operation_times import StepCosts, step_costs
from penstock.prediction.run_price import RunPrice, price_of_engines
from penstock.prediction.step_tasks import Arrangement, StepTasks
from penstock.prediction.task_simulation import simulate
from penstock.spans import Span
from penstock.store import ShardMap
from penstock.store.flash import FlashForecast, forecast

_STEPS = 4  # that are simulated; the last one is that of a long run
_FLOAT_BYTES = {"fp32": 4, "bf16": 2}
_NOT_IN_A_STEP = ("reserve", "writing checkpoints")  # parts of the memory budget
# Fitted to the resident memory of the 22 runs of `benchmarks/planner.py` in one process on AMD
# Zen 4, two of them changed by 10 and 25 MiB for Zen 5 (2026-11-25), and the first by 40 MiB since
# a run whose model is in the cache does not load transformers (8 runs on Zen 5, 2026-11-26): what a
# run adds to the libraries, such as the pages of their code that it reaches; the share of the
# engine's bytes that are freed pages it keeps; and oneDNN's working memory for its products of
# bfloat16. Equal runs differ by up to 116 MiB.
_ADDED_BYTES = 128 << 20
_KEPT_SHARE = 0.08
_BFLOAT16_BYTES = 52 << 20
# Fitted to the two sparse runs of it, in float32 and in bfloat16, where it stands for oneDNN's
# memory too. 66 MiB are machine code of the kernels of sparse products, and their compiler.
_SPARSE_KERNEL_BYTES = 105 << 20
RESOURCE_OF = {
    "forward": "compute",
    "turn": "compute",
    "backward": "compute",
    "update": "update",
    "receive": "receive gradients",
    "weights": "weights out",
    "gradients": "gradients in",
    "flash read": "flash read",
    "flash write": "flash write",
}
"""The resource that each piece of work occupies, as people read it."""


@dataclass(frozen=True)
class Prediction:
    """What a run will do on a machine.

    Attributes:
        config: of the run, with the engines that were planned.
        plan: the decisions that training makes.
        machine: on which it runs.
        costs: of a step's operations.
        flash: traffic of the store, all shards and replicas together; None without flash.
        spans: of one step in the middle of the run, from its begin at 0.
        step_seconds: of that step.
        dense_step_seconds: of a step that computes the gradient of every element of the sparse
            weights; None if no step does.
        length_note: why training may take shorter sequences; None if their length is known.
        full_disk_note: what to do if this host's disk lacks room for the store on flash; else None.
    """

    config: Config
    plan: ExecutionPlan
    machine: MachineDescription
    costs: StepCosts
    flash: FlashForecast | None
    spans: tuple[Span, ...]
    step_seconds: float
    dense_step_seconds: float | None = None
    length_note: str | None = None
    full_disk_note: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens, or samples of a model without a sequence, of a step."""
        return self.config.batch.size * self.plan.sequence_length

    @property
    def shard_bytes(self) -> int | None:
        """Memory of each shard on a host of its own; None if the store is with the coordinator."""
        config = self.config
        if config.cluster.shards == "here" or not config.cluster.has_other_hosts:
            return None
        return -(-self.plan.shares.store // config.store.shards)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all engines."""
        return self.tokens / self.step_seconds

    @property
    def run_seconds(self) -> float:
        """Seconds of all steps, without evaluation and checkpoints."""
        steps = self.config.run.steps
        if self.dense_step_seconds is None:
            return steps * self.step_seconds
        dense = self.dense_steps
        return (steps - dense) * self.step_seconds + dense * self.dense_step_seconds

    @cached_property
    def dense_steps(self) -> int:
        """The number of steps that compute the gradient of every element of sparse weights."""
        is_dense = self.plan.schedule_of.needs_dense_gradients
        return sum(is_dense(step) for step in range(1, self.config.run.steps + 1))

    @property
    def peak_memory_bytes(self) -> int:
        """Resident memory of the process at its peak, between checkpoints, which takes buffers.

        If engines are processes of this host, it is that of all processes.
        """
        parts = sum(
            size for part, size in self.plan.memory.items() if not part.startswith(_NOT_IN_A_STEP)
        )
        parts -= self._unused_store_bytes()
        shares, program = self.plan.shares, self.plan.program
        copies = round(shares.engines / max(1, shares.engine_host))
        planned, layouts = most_layout_bytes(program), expected_layout_bytes(program)
        parts -= copies * (planned - layouts)
        freed = shares.engines - copies * planned  # layouts are not freed between stages
        added = _ADDED_BYTES + int(_KEPT_SHARE * freed)
        if any(weight.is_sparse for weight in program.weights.values()):
            added += _SPARSE_KERNEL_BYTES
        elif self.config.precision == "bf16":
            added += _BFLOAT16_BYTES
        if self.config.cluster.start != "none":  # the limit of this process is not that of all
            return parts + added
        return max(parts, min(parts + added, shares.limit))  # free pages are returned before that

    def _unused_store_bytes(self) -> int:
        """Return what a store on flash leaves of `store.dram`, since all its state fits in less."""
        if self.flash is None or not any(part.startswith("store") for part in self.plan.memory):
            return 0  # it has no limit of its own, or is on other hosts
        assembly = store_factory.assembly_of(self.config, self.plan.program)
        return max(0, self.plan.shares.store - assembly - sum(self.flash.memory.values()))

    @property
    def step_interval(self) -> tuple[float, float] | None:
        """The seconds between which nine of ten measured steps lay; None if it is not known."""
        return self._interval(self.step_seconds)

    @property
    def run_interval(self) -> tuple[float, float] | None:
        """`run_seconds`, if its steps take as long as nine of ten measured steps did."""
        return self._interval(self.run_seconds)

    def _interval(self, seconds: float) -> tuple[float, float] | None:
        accuracy = self.machine.accuracy
        return None if accuracy is None else (seconds * accuracy.low, seconds * accuracy.high)

    @property
    def accuracy_note(self) -> str | None:
        """A sentence that says that predictions on this machine were too low, or too high; None if
        they lay within the interval of nine of ten measured runs, or were not compared."""
        accuracy = self.machine.accuracy
        if accuracy is None or accuracy.low <= 1 <= accuracy.high:
            return None
        again = "run `penstock calibrate --forget` when the host is idle"
        if not is_kept(self.machine):
            again = f"correct the rates of {self.machine.name}"
        low, high = (f"{n:.0f}" if n >= 10 else f"{n:.2f}" for n in (accuracy.low, accuracy.high))
        return (
            f"Predicted times are too {'short' if accuracy.low > 1 else 'long'} on this machine: "
            f"nine of ten of the last {accuracy.runs} measured runs took {low} to {high} times as "
            f"long as predicted. Rely on the measured range, or {again}"
        )

    @property
    def flops(self) -> int:
        """The arithmetic of a step's forward and backward sweeps, without recomputation."""
        return self.plan.flops.of(self.plan.program.capacities)

    @cached_property
    def busy(self) -> dict[str, dict[str, float]]:
        """Share of the time that each resource is busy, by sweep: `forward`, `backward`, `step`."""
        turn = next(span for span in self.spans if span.what == "turn")
        middle = turn.begin
        sweeps = {
            "forward": (0.0, middle),
            "backward": (middle, self.step_seconds),
            "step": (0.0, self.step_seconds),
        }
        return {sweep: self._busy_between(*limits) for sweep, limits in sweeps.items()}

    def _busy_between(self, begin: float, end: float) -> dict[str, float]:
        found = dict.fromkeys(RESOURCE_OF.values(), 0.0)
        for span in self.spans:
            resource = RESOURCE_OF.get(span.what)
            if resource is not None:
                found[resource] += max(0.0, min(span.end, end) - max(span.begin, begin))
        length = max(end - begin, 1e-12)
        return {name: seconds / length for name, seconds in found.items() if seconds}

    @cached_property
    def exclusive_seconds(self) -> dict[str, float]:
        """Seconds of a step in which each resource works and none before it in `RESOURCE_OF` does.

        The rest of the step is time in which only the disk works.
        """
        order = [r for r in dict.fromkeys(RESOURCE_OF.values()) if not r.startswith("flash")]
        active, found = dict.fromkeys(order, 0), dict.fromkeys(order, 0.0)
        changes: list[tuple[float, str, int]] = []
        for span in self.spans:
            resource = RESOURCE_OF.get(span.what)
            if resource in found:
                begin, end = max(span.begin, 0.0), min(span.end, self.step_seconds)
                changes += [(begin, resource, 1), (end, resource, -1)]
        before = 0.0
        for time, resource, change in sorted(changes):
            first = next((each for each in order if active[each]), None)
            if first is not None:
                found[first] += time - before
            active[resource] += change
            before = time
        return found

    def binding(self, sweep: str) -> str:
        """Return the resource that is busy for the largest share of a sweep."""
        busy = self.busy[sweep]
        return max(busy, key=lambda name: busy[name])

    @property
    def relays(self) -> int:
        """Relays of the run. The prediction holds for engines whose links carry their own weights
        and gradients only; with `fabric.relays: auto` it is as many as that takes."""
        return relay_count(self.config, has_links=self.machine.link is not None)

    @property
    def price(self) -> RunPrice:
        """What the engines and the store cost and draw."""
        return price_of_engines(self.machine, self.config.engines)


def predict(
    config: Config,
    plan: ExecutionPlan,
    machine: MachineDescription,
    *,
    micro_batches: int | None = None,
    dram_bytes: int | None = None,
) -> Prediction:
    """Return the prediction of a run that has been planned.

    Args:
        config: of the run.
        plan: the decisions of `plan_execution`, for this machine.
        micro_batches: of a step; by default those of the plan. Another number answers what a larger
            batch would do.
        dram_bytes: memory of a store on flash; by default that of the plan.

    Raises:
        ConfigError: the run needs a disk, and the machine has none.
    """
    total = plan.micro_batches if micro_batches is None else micro_batches
    if micro_batches is not None:
        size = total * plan.micro_batch
        batch = config.batch.model_copy(update={"size": size})
        config = config.model_copy(update={"batch": batch})
        plan = dataclasses.replace(plan, micro_batches=total)
    shards = config.store.shards
    apart = 1.0 / shards if config.cluster.shards == "apart" else 1.0
    costs = plan.schedule_of.map(
        lambda schedule: step_costs(
            plan.program,
            schedule,
            plan.plan,
            machine,
            micro_batches=-(-total // config.engines),
            roles=store_factory.optimizer_of(config).roles,
            gradient_width=_FLOAT_BYTES[config.gradient_precision],
            store_share=apart if machine.link is not None else 1.0,
        )
    )
    flash = None
    if config.store.flash.path is not None:
        flash = _flash(config, plan, machine, dram_bytes or plan.shares.store)
    arrangement = Arrangement(
        machine,
        config.engines,
        plan.plan.slots,
        _depth(machine, config.engines),
        shares_cores=machine.engine.is_host and config.cluster.start != "none",
        messages="socket" if config.cluster.shared_memory == "off" else "shared memory",
        threads=config.engine.threads,
    )
    spans, seconds = _last_step(costs.usual, arrangement, flash)
    dense = None
    if costs.dense is not costs.usual:
        _, dense = _last_step(costs.dense, arrangement, flash)
    return Prediction(config, plan, machine, costs.usual, flash, spans, seconds, dense)


def _last_step(
    costs: StepCosts, arrangement: Arrangement, flash: FlashForecast | None
) -> tuple[tuple[Span, ...], float]:
    """Simulate some equal steps; return the spans of the last one, and its seconds."""
    spans = simulate(StepTasks(costs, arrangement, flash).build(_STEPS))
    commits = [span.end for span in spans if span.what == "commit"]
    begin, end = commits[-2:]
    last = (
        dataclasses.replace(span, begin=span.begin - begin, end=span.end - begin)
        for span in spans
        if span.end > begin and span.begin < end
    )
    return tuple(last), end - begin


def _flash(
    config: Config, plan: ExecutionPlan, machine: MachineDescription, dram_bytes: int
) -> FlashForecast:
    if machine.store.flash is None:
        raise ConfigError(
            f"store.flash.path: the machine {machine.name} has no disk (store.flash); remove the "
            "key, or describe the disk in the machine's file"
        )
    program, optimizer = plan.program, store_factory.optimizer_of(config)
    masks = mask_rule_of(config, program)
    count = config.store.shards
    holding = next(ShardMap.of(program, count).parts(program)) if count > 1 else program
    share = dram_bytes if count == 1 else store_factory.flash_share(config, program, dram_bytes)
    size = config.store.flash.size
    return forecast(
        holding,
        optimizer,
        share,
        half_gradients=config.gradient_precision == "bf16",
        keep_steps=config.store.flash.keep_steps,
        limit=None if size is None else int(size) // config.store.holders,
        masks=masks,
    ).times(config.store.holders)


def _depth(machine: MachineDescription, engines: int) -> int:
    """Return the number of fabric nodes between the store and an engine."""
    if machine.link is None:
        return 0
    fan_out, depth = machine.link.fan_out, 1
    if fan_out is None:
        return 1
    while fan_out**depth < engines:
        depth += 1
    return depth

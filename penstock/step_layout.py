"""How a step is laid out: its micro-batch, its program, and what each part may use of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock import assembly, stores
from penstock.budget import Budget, Shares
from penstock.config import Config
from penstock.engine import EnginePlan, Sharing, predict_bytes
from penstock.errors import BudgetError, ConfigError
from penstock.models import ModelSource
from penstock.program import Program

# Beyond this many tokens a micro-batch gains nothing: the products are large enough.
_MICRO_BATCH_TOKENS = {"cpu": 4096, "cuda": 32768}
_LEAST_TOKENS = 512  # of a micro-batch; smaller products spend their time on starting
_ENGINES = 8  # that a configuration may ask for; see `config/root.py`
_BUDGET_SLOTS = 4  # a stage of a quarter of the budget leaves room for slots and activations


@dataclass(frozen=True)
class Layout:
    """How a step's batch is divided, what an engine keeps of it, and what every part may use.

    `slot_bytes` is what the program's stages had to fit, if anything; with fewer engines than
    `least_engines` a step would not fit the budget of one.
    """

    program: Program
    plan: EnginePlan
    sequence_length: int
    micro_batch: int
    micro_batches: int
    shares: Shares
    slot_bytes: int | None
    least_engines: int = 1

    @property
    def budget_bytes(self) -> int:
        """What one engine may compute with: its budget, less what is on its way to and from it."""
        return self.shares.engine - self.plan.beside_bytes


def lay_out(
    config: Config,
    source: ModelSource,
    device: str,
    length: int,
    recorded_micro_batch: int | None = None,
    recorded_slot_bytes: int | None = None,
    devices: Sequence[str] = (),
) -> Layout:
    """Choose the micro-batch of sequences of `length`, compile, and decide what is recomputed.

    With `batch.micro: auto` it is the largest divisor of the batch that is not beyond what helps
    and, unless that makes it small, leaves `_ENGINES` engines a micro-batch each. The number of
    engines itself must not decide it, or it would decide the last bits. A resumed run keeps the
    micro-batch and the cut that it was started with. Where a step does not fit the budget, stages
    are cut smaller, then (auto) the micro-batch is. `devices` are those of a group.

    **Raises:** `BudgetError` if not even single sequences fit.
    """
    problem: BudgetError | None = None
    for micro_batch in _micro_batch_candidates(config, length, device, recorded_micro_batch):
        micro_batches = config.batch.size // micro_batch
        if micro_batches < config.engines:
            key, what = ("engine.devices", "devices") if devices else ("engines", "engines")
            raise ConfigError(
                f"{key}: {config.engines} {what} cannot share {micro_batches} micro-batch(es) "
                f"of {micro_batch}; lower batch.micro or {key}, or raise batch.size"
            )
        sharing = Sharing(len(devices), micro_batches) if devices else None
        least = _least_engines(config)
        per_engine = -(-micro_batches // least)
        slot_bytes = recorded_slot_bytes
        for _ in ("stages as they are, or were", "stages cut to what an engine may use"):
            try:
                program = assembly.compile_source(
                    source,
                    micro_batch=micro_batch,
                    length=length,
                    precision=config.precision,
                    device=device,
                    train=config.train,
                    freeze=config.freeze,
                    slot_bytes=slot_bytes,
                )
            except BudgetError as error:
                problem = problem or error
                continue
            fitted = slot_bytes
            roles = stores.optimizer_of(config).roles
            budget = Budget(config, program, per_engine, device, roles, devices, sharing)
            try:
                engine_bytes = budget.engine_bytes()
                slot_bytes = engine_bytes // _BUDGET_SLOTS
                plan = budget.plan(engine_bytes)
                shares = budget.divide(plan, engine_bytes)
            except BudgetError as error:
                problem = problem or error
                continue
            least = _fewest(program, plan, micro_batches, least, device, engine_bytes)
            return Layout(program, plan, length, micro_batch, micro_batches, shares, fitted, least)
    assert problem is not None
    raise problem


def _least_engines(config: Config) -> int:
    """Return with how many engines a step must still fit: where some may be lost, with half."""
    return config.engines if config.cluster.start == "none" else -(-config.engines // 2)


def _fewest(
    program: Program,
    plan: EnginePlan,
    micro_batches: int,
    engines: int,
    device: str,
    budget_bytes: int,
) -> int:
    """Return how few engines still have room for a step that is planned for `engines`."""
    while engines > 1:
        share = -(-micro_batches // (engines - 1))
        if predict_bytes(program, share, plan, device).peak_bytes > budget_bytes:
            break
        engines -= 1
    return engines


def _micro_batch_candidates(
    config: Config, length: int, device: str, recorded: int | None
) -> list[int]:
    size = config.batch.size
    if config.batch.micro != "auto":
        return [int(config.batch.micro)]
    if recorded is not None and size % recorded == 0:
        return [recorded]
    share = size * length // _ENGINES
    tokens = max(_LEAST_TOKENS, min(share, _MICRO_BATCH_TOKENS[device]))
    most = max(1, tokens // length)
    return [c for c in range(min(most, size), 0, -1) if size % c == 0]

"""What would make a run faster, and by how much: predictions of the same run with one change."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.config import Config
from penstock.engine import predict_bytes
from penstock.errors import BudgetError, ConfigError
from penstock.prediction.predicted_run import Prediction, predict

_WORTH = 1.03  # a change that gains less is not named
_HIDDEN = 0.95  # of the speed of a very large batch: the stream is hidden
_MOST_TIMES = 64
_OTHER_TRAINING = "this changes the training"

Replan = Callable[[Config], Prediction]


@dataclass(frozen=True)
class Advice:
    """A change, and the factor by which tokens per second rise."""

    text: str
    gain: float


def advise(prediction: Prediction, replan: Replan) -> list[Advice]:
    """Return changes that make a run faster, the largest gain first.

    **Arguments:** `replan` predicts the run with another configuration, on the same machine.
    """
    found = [
        *_larger_batch(prediction),
        *_less_recomputation(prediction, replan),
        *_more_memory(prediction),
        *_narrow_moments(prediction),
    ]
    return sorted((a for a in found if a.gain >= _WORTH), key=lambda advice: -advice.gain)


def tried_changes(prediction: Prediction) -> list[str]:
    """Return the changes that `advise` tries, for a sentence that says that none of them helps."""
    changes = ["a larger batch.size"]
    if prediction.plan.plan.recompute:
        changes += ["a smaller batch.size", "batch.micro halved and doubled"]
    if prediction.flash is not None:
        changes.append("more store.dram")
    if _has_wide_moments(prediction):
        changes.append("optimizer.moments: 8bit")
    return changes


def least_batch_that_hides_the_stream(prediction: Prediction) -> int | None:
    """Return the smallest number of micro-batches with which a step is nearly as fast per token as
    with any; None if the present one is."""
    plan, config = prediction.plan, prediction.config
    limit = _with_micro_batches(prediction, plan.micro_batches * _MOST_TIMES).tokens_per_second

    def hides(count: int) -> bool:
        return _with_micro_batches(prediction, count).tokens_per_second >= _HIDDEN * limit

    if hides(plan.micro_batches):
        return None
    low, high = plan.micro_batches, plan.micro_batches * _MOST_TIMES
    step = config.engines  # every engine gets as many micro-batches
    while high - low > step:
        middle = low + max(step, (high - low) // 2 // step * step)
        low, high = (low, middle) if hides(middle) else (middle, high)
    return high


def least_dram_that_unbinds_flash(prediction: Prediction) -> int | None:
    """Return the least bytes of `store.dram` with which flash slows a step by less than 5 %.

    Returns None if the present ones are enough, or if there is no flash.
    """
    if prediction.flash is None:
        return None
    whole, best = _without_reads(prediction)
    if prediction.tokens_per_second >= _HIDDEN * best.tokens_per_second:
        return None
    low, high = prediction.plan.shares.store, whole
    while high - low > max(1 << 20, low // 50):
        middle = (low + high) // 2
        found = _with_dram(prediction, middle)
        fast = found is not None and found.tokens_per_second >= _HIDDEN * best.tokens_per_second
        low, high = (low, middle) if fast else (middle, high)
    return high


def _larger_batch(prediction: Prediction) -> Iterator[Advice]:
    least = least_batch_that_hides_the_stream(prediction)
    if least is None:
        return
    more = least - prediction.plan.micro_batches
    gain = _gain(_with_micro_batches(prediction, least), prediction)
    if not _fits(prediction, least):
        return
    size = least * prediction.plan.micro_batch
    text = "one more micro-batch" if more == 1 else f"{more} more micro-batches"
    yield Advice(
        f"{text} in a step would hide the stream (batch.size: {size}; {_OTHER_TRAINING})", gain
    )


def _less_recomputation(prediction: Prediction, replan: Replan) -> Iterator[Advice]:
    """Yield what another micro-batch and a smaller batch gain where stages are computed again.

    Without recomputation there is no reason for a smaller batch to take less time per token.
    """
    if not prediction.plan.plan.recompute:
        return
    size, micro = prediction.config.batch.size, prediction.plan.micro_batch
    most = size // prediction.config.engines  # each engine needs a micro-batch
    sizes = [each for each in (micro // 2, 2 * micro) if 1 <= each <= most and size % each == 0]
    if best := _fastest(_with_batch(prediction, replan, micro=each) for each in sizes):
        text = f"batch.micro: {best.plan.micro_batch} (the result changes by rounding alone)"
        yield Advice(text, _gain(best, prediction))
    if best := _fastest(_smaller_batches(prediction, replan)):
        again = len(best.plan.plan.recompute)
        text = (
            f"batch.size: {best.config.batch.size} computes the forward of {again or 'no'} "
            f"stage{'s' if again > 1 else ''} again ({_OTHER_TRAINING})"
        )
        yield Advice(text, _gain(best, prediction))


def _smaller_batches(prediction: Prediction, replan: Replan) -> Iterator[Prediction | None]:
    """Yield predictions with half the batch again and again, until no stage is computed again."""
    size = prediction.config.batch.size
    while size % 2 == 0:
        size //= 2
        found = _with_batch(prediction, replan, size=size)
        yield found
        if found is None or not found.plan.plan.recompute:
            return


def _with_batch(prediction: Prediction, replan: Replan, **batch: Any) -> Prediction | None:
    """Return the prediction with other keys of `batch`; None if there is no such run."""
    config = prediction.config.to_mapping()
    try:
        return replan(Config.from_mapping({**config, "batch": {**config["batch"], **batch}}))
    except (BudgetError, ConfigError):
        return None


def _fastest(predictions: Iterator[Prediction | None]) -> Prediction | None:
    found = [each for each in predictions if each is not None]
    return max(found, key=lambda each: each.tokens_per_second, default=None)


def _gain(found: Prediction, before: Prediction) -> float:
    return found.tokens_per_second / before.tokens_per_second


def _more_memory(prediction: Prediction) -> Iterator[Advice]:
    if prediction.flash is None:
        return
    before = prediction.plan.shares.store
    for share in (0.25, 1.0):
        found = _with_dram(prediction, int(before * (1 + share)))
        if found is None:
            continue
        gain = _gain(found, prediction)
        if gain >= _WORTH:
            sweep = "forward" if prediction.binding("forward").startswith("flash") else "step"
            bound = f"flash binds the {sweep} sweep; " if sweep == "forward" else ""
            yield Advice(f"{bound}{share:.0%} more store.dram saves reads", gain)
            return


def _narrow_moments(prediction: Prediction) -> Iterator[Advice]:
    if not _has_wide_moments(prediction):
        return
    narrow = prediction.config.optimizer.model_copy(update={"moments": "8bit"})
    config = prediction.config.model_copy(update={"optimizer": narrow})
    try:
        found = predict(config, prediction.plan, prediction.machine)
    except BudgetError:
        return
    text = "optimizer.moments: 8bit moves fewer bytes of state"
    yield Advice(text, _gain(found, prediction))


def _has_wide_moments(prediction: Prediction) -> bool:
    optimizer = prediction.config.optimizer
    return optimizer.moments != "8bit" and optimizer.name != "sgd"


def _with_micro_batches(prediction: Prediction, count: int) -> Prediction:
    return predict(prediction.config, prediction.plan, prediction.machine, micro_batches=count)


def _with_dram(prediction: Prediction, size: int) -> Prediction | None:
    try:
        return predict(prediction.config, prediction.plan, prediction.machine, dram_bytes=size)
    except BudgetError:
        return None


def _without_reads(prediction: Prediction) -> tuple[int, Prediction]:
    """Return memory with which a store on flash reads nothing, and the prediction with it."""
    size, found = prediction.plan.shares.store, prediction
    while found.flash is not None and found.flash.read_bytes:
        size *= 2
        found = _with_dram(prediction, size) or found
    return size, found


def _fits(prediction: Prediction, micro_batches: int) -> bool:
    """Return whether an engine has memory for a step of so many micro-batches."""
    plan = prediction.plan
    each = -(-micro_batches // prediction.config.engines)
    found = predict_bytes(plan.program, each, plan.plan, plan.device)
    return found.peak_bytes <= plan.shares.engine

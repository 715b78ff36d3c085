"""What happens with the masks at a commit: nothing, or per weight what to drop and what to grow.

A policy is plain data. It is asked for a step's number and the sizes of the masks, and answers with
numbers of entries and the orders by which they are selected. A radix selection over all shards
selects them (`radix_selection.py`), and a `MaskChange` carries the result to the shards. All
policies keep the numbers exact.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.sparsity.initial_masks import kept_count
from penstock.sparsity.radix_selection import (
    Order,
    Selection,
    begin_selection,
    select_all,
    selection_key,
)
from penstock.sparsity.sparsity_schedules import (
    ChangeTimes,
    DropFraction,
    SparsitySchedule,
    drop_fraction_at,
    sparsity_at,
    steps_of,
)


@dataclass(frozen=True)
class MaskSize:
    """The size of a weight's mask, over all shards."""

    elements: int
    kept: int

    @property
    def absent(self) -> int:
        """Number of entries that do not exist."""
        return self.elements - self.kept


@dataclass(frozen=True)
class CountChange:
    """How many entries of a weight are dropped, and how many absent ones are grown."""

    weight: str
    drop: int
    grow: int


@dataclass(frozen=True)
class MaskUpdate:
    """A change of masks at a commit.

    Attributes:
        step: the step of the commit, from 1.
        changes: the weights whose masks change; no other weight does.
        grow_order: the order by magnitude of the dense gradient (`LARGEST`), or a random one.
            Entries to drop are always those of the smallest magnitude.
        grows_all: whether all absent entries are grown, which needs no round of histograms.
        replaces_update: whether the step changes the masks instead of the weights. Otherwise the
            optimizer's update of the step is applied to the entries that stay.
    """

    step: int
    changes: tuple[CountChange, ...]
    grow_order: Order = Order.RANDOM
    grows_all: bool = False
    replaces_update: bool = False

    def selections(self, seed: int, change: CountChange) -> tuple[Selection, Selection]:
        """Return the selections of a weight's entries to drop and to grow, before any round."""
        drop_key = selection_key(seed, change.weight, self.step, "drop")
        drop = begin_selection(Order.SMALLEST, drop_key, change.drop)
        if self.grows_all:
            return drop, select_all(change.grow)
        grow_key = selection_key(seed, change.weight, self.step, "grow")
        return drop, begin_selection(self.grow_order, grow_key, change.grow)


class SparsityPolicy(ABC):
    """The rule by which masks change during a run."""

    @property
    def updates_between_changes(self) -> int | None:
        """The least number of updates between two changes of a mask, 1 or more; None if no entry is
        ever grown, so that all entries are equally old."""
        return None

    @property
    def grown_by_gradient(self) -> float:
        """The greatest share of its kept entries by which a change grows a weight by its dense
        gradient; 0 if no change does."""
        return 0.0

    def needs_dense_gradients(self, step: int) -> bool:
        """Return whether step `step` computes gradients of absent entries too; known before the
        step begins."""
        return False

    @abstractmethod
    def may_change(self, step: int) -> bool:
        """Return whether the commit of step `step`, from 1, may change masks, whatever their
        sizes."""

    @abstractmethod
    def at(self, step: int, masks: Mapping[str, MaskSize]) -> MaskUpdate | None:
        """Return what happens with the masks at the commit of step `step`, from 1.

        **Raises:** `ConfigError` if a mask would keep no entry.
        """


@dataclass(frozen=True)
class StaticMasks(SparsityPolicy):
    """The masks of the start, for the whole run."""

    def may_change(self, step: int) -> bool:
        return False

    def at(self, step: int, masks: Mapping[str, MaskSize]) -> MaskUpdate | None:
        return None


@dataclass(frozen=True)
class GradualMagnitude(SparsityPolicy):
    """Gradual magnitude pruning: Zhu & Gupta, "To prune, or not to prune", 2017.

    At every change each weight drops the entries of the smallest magnitude, down to its schedule's
    sparsity. A dropped entry does not come back: in the paper it keeps its value behind the mask,
    here the store does not hold it.

    Attributes:
        schedules: the sparsity over the steps, per weight.
        times: when masks change; also at the end of `times`.
    """

    schedules: Mapping[str, SparsitySchedule]
    times: ChangeTimes

    def may_change(self, step: int) -> bool:
        return self.times.is_due(step) or step == max(1, self.times.end)

    def at(self, step: int, masks: Mapping[str, MaskSize]) -> MaskUpdate | None:
        if not self.may_change(step):
            return None
        changes = []
        for weight, schedule in self.schedules.items():
            size = masks[weight]
            kept = kept_count(weight, size.elements, 1 - sparsity_at(schedule, step))
            if kept < size.kept:
                changes.append(CountChange(weight, size.kept - kept, 0))
        return MaskUpdate(step, tuple(changes)) if changes else None


@dataclass(frozen=True)
class _Exchange(SparsityPolicy):
    """Drops a share of every weight's entries, and grows as many; never more than are absent."""

    times: ChangeTimes
    fraction: DropFraction

    @property
    def updates_between_changes(self) -> int | None:
        return self.times.every

    def may_change(self, step: int) -> bool:
        return self.times.is_due(step) and drop_fraction_at(self.fraction, step) > 0

    def _changes(self, step: int, masks: Mapping[str, MaskSize]) -> tuple[CountChange, ...]:
        fraction = drop_fraction_at(self.fraction, step)
        changes = []
        for weight, size in masks.items():
            count = min(int(fraction * size.kept), size.absent)
            if count:
                changes.append(CountChange(weight, count, count))
        return tuple(changes)


@dataclass(frozen=True)
class SparseEvolutionaryTraining(_Exchange):
    """Sparse evolutionary training: Mocanu et al., 2018. Entries are grown at random.

    The paper drops the smallest positive and the largest negative ones, which are those of the
    smallest magnitude up to the balance of signs.
    """

    def at(self, step: int, masks: Mapping[str, MaskSize]) -> MaskUpdate | None:
        changes = self._changes(step, masks) if self.may_change(step) else ()
        return MaskUpdate(step, changes) if changes else None


@dataclass(frozen=True)
class RigL(_Exchange):
    """Evci et al., "Rigging the Lottery: Making All Tickets Winners", 2020, algorithm 1.

    Entries are grown where the dense gradient is largest. A step that changes masks does not update
    weights. Unlike in the paper, an entry that the change drops is not a candidate to be grown: so
    every change exchanges the number of entries that the drop fraction names.
    """

    @property
    def updates_between_changes(self) -> int | None:
        return max(1, self.times.every - 1)  # a change takes the place of an update

    @property
    def grown_by_gradient(self) -> float:
        return self.fraction.initial

    def needs_dense_gradients(self, step: int) -> bool:
        return self.may_change(step)

    def at(self, step: int, masks: Mapping[str, MaskSize]) -> MaskUpdate | None:
        changes = self._changes(step, masks) if self.may_change(step) else ()
        if not changes:
            return None
        return MaskUpdate(step, changes, Order.LARGEST, replaces_update=True)


@dataclass(frozen=True)
class Densify(SparsityPolicy):
    """Another policy up to a step, at whose commit every mask is lifted; grown entries begin at 0.

    Sparse pre-training with dense fine-tuning: Thangarasa et al., "SPDF: Sparse Pre-training and
    Dense Fine-tuning for Large Language Models", 2023.
    """

    until: SparsityPolicy
    step: int

    @property
    def updates_between_changes(self) -> int | None:
        # The last gap, to the step at which masks are lifted, may be shorter than the others: of
        # two gaps or more, the mean is at least half of one of the others.
        between = self.until.updates_between_changes
        return max(1, self.step if between is None else between // 2)

    @property
    def grown_by_gradient(self) -> float:
        return self.until.grown_by_gradient

    def needs_dense_gradients(self, step: int) -> bool:
        return step < self.step and self.until.needs_dense_gradients(step)

    def may_change(self, step: int) -> bool:
        return step == self.step or (step < self.step and self.until.may_change(step))

    def at(self, step: int, masks: Mapping[str, MaskSize]) -> MaskUpdate | None:
        if step < self.step:
            return self.until.at(step, masks)
        changes = tuple(
            CountChange(weight, 0, size.absent)
            for weight, size in masks.items()
            if step == self.step and size.absent
        )
        return MaskUpdate(step, changes, grows_all=True) if changes else None


def gradual_magnitude(
    densities: Mapping[str, float],
    run_steps: int,
    *,
    begin: int | float = 0.25,
    end: int | float = 0.75,
    every: int = 100,
    initial: float = 0.0,
    shape: str = "power",
    power: float = 3.0,
) -> GradualMagnitude:
    """Return gradual magnitude pruning over a run.

    Args:
        densities: the density of every sparse weight at the end.
        run_steps: number of steps of the run.
        begin, end: when pruning begins and ends; a step, or a share of the run.
        every: steps between two changes.
        initial: sparsity at the beginning.
        shape, power: name of the schedule, and exponent of `power`.

    Raises:
        ConfigError: a value is out of its range, or the schedule ends after the run.
    """
    times = ChangeTimes(steps_of(begin, run_steps), steps_of(end, run_steps), every)
    schedules = {
        weight: SparsitySchedule(
            shape, 1 - density, min(initial, 1 - density), times.begin, times.end, power
        )
        for weight, density in densities.items()
    }
    return GradualMagnitude(schedules, times)


def exchanging(
    kind: type[SparseEvolutionaryTraining] | type[RigL],
    run_steps: int,
    *,
    begin: int | float = 0,
    end: int | float = 0.75,
    every: int = 100,
    fraction: float = 0.3,
    decay: str = "cosine",
    power: float = 3.0,
) -> SparseEvolutionaryTraining | RigL:
    """Return a policy that exchanges entries, over a run.

    Args:
        kind: which one.
        run_steps: number of steps of the run.
        begin, end: when masks change; a step, or a share of the run.
        every: steps between two changes.
        fraction: share of the kept entries that a change exchanges at first.
        decay, power: how `fraction` falls until `end`, and exponent of `inverse_power`.

    Raises:
        ConfigError: a value is out of its range, or changes end after the run.
    """
    times = ChangeTimes(steps_of(begin, run_steps), steps_of(end, run_steps), every)
    return kind(times, DropFraction(fraction, times.end, decay, power))

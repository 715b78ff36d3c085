"""Which weights of a run are sparse, how many entries each has at most, and how masks change.

Everything here follows from the configuration and the shapes, but for the numbers of entries that
a checkpoint with zeros has: those are counted once and recorded with the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.config import Config
from penstock.errors import ConfigError, few
from penstock.program import Program
from penstock.sparsity import (
    Densify,
    GradualMagnitude,
    MaskSize,
    PackedIndex,
    RigL,
    SparseEvolutionaryTraining,
    SparsityPolicy,
    StaticMasks,
    densities,
    exchanging,
    gradual_magnitude,
    kept_count,
    sparse_weights,
    steps_of,
)
from penstock.store import InitialMask, MaskRule

if TYPE_CHECKING:
    from penstock.models import ModelSource

_NEAR = 0.005
"""The most by which the sparsity of a checkpoint may differ from the configured one."""


@dataclass(frozen=True)
class SparsePlan:
    """The sparse weights of a run.

    Attributes:
        shapes: of the sparse weights, by name, in the order of the model.
        kept: number of entries that each has at the start.
        capacities: the most entries that each has at any step.
        policy: how masks change.
        initial_mask: which entries exist at the start: `random`, `magnitude`, `balanced`, or
            `zeros` for those that are not zero in the initial weights.
    """

    shapes: Mapping[str, tuple[int, ...]]
    kept: Mapping[str, int]
    capacities: Mapping[str, int]
    policy: SparsityPolicy
    initial_mask: InitialMask

    @property
    def elements(self) -> Mapping[str, int]:
        """The number of elements of every sparse weight, absent ones included."""
        return {name: math.prod(shape) for name, shape in self.shapes.items()}

    def mask_rule(self, source: ModelSource, seed: int) -> MaskRule:
        """Return the rule by which the store makes and changes the masks."""
        elements = self.elements
        shares = {name: count / elements[name] for name, count in self.kept.items()}
        return _RuleWithGivenMasks(self.policy, seed, self.initial_mask, shares, source.mask)

    def reachable_sparsities(self, run_steps: int) -> dict[str, tuple[float, ...]]:
        """Return the sparsities that each weight has in the steps of a run."""
        kept, elements = dict(self.kept), self.elements
        found = {name: {count} for name, count in kept.items()}
        for step in _change_steps(_changing_counts(self.policy), run_steps):
            sizes = {name: MaskSize(elements[name], count) for name, count in kept.items()}
            update = self.policy.at(step, sizes)
            for change in update.changes if update is not None else ():
                kept[change.weight] += change.grow - change.drop
                found[change.weight].add(kept[change.weight])
        return {
            name: tuple(1 - count / elements[name] for count in sorted(counts))
            for name, counts in found.items()
        }

    def first_change(self, run_steps: int) -> int | None:
        """Return the first step of a run at whose commit masks change; None if they never do."""
        elements = self.elements
        sizes = {name: MaskSize(elements[name], count) for name, count in self.kept.items()}
        steps = _change_steps(self.policy, run_steps)
        return next((step for step in steps if self.policy.at(step, sizes)), None)


@dataclass(frozen=True)
class _RuleWithGivenMasks(MaskRule):
    """A rule that takes the masks of a packed checkpoint as they are: a kept entry may be 0."""

    given: Callable[[str], PackedIndex | None]

    def initial(self, name: str, shape: tuple[int, ...], values: np.ndarray) -> PackedIndex:
        index = self.given(name) if self.initial_mask == "zeros" else None
        return super().initial(name, shape, values) if index is None else index


def plan_sparse_weights(
    config: Config,
    source: ModelSource,
    trained: Collection[str],
    recorded: Mapping[str, int] | None = None,
) -> SparsePlan | None:
    """Return the sparse weights of a run; None if it has none.

    Args:
        trained: names of the weights that the run trains; others cannot be sparse yet.
        recorded: the kept entries at the start of the run, by weight, if it is resumed.

    Raises:
        ConfigError: a pattern that matches nothing or an untrained weight, a mask that would keep
            no entry, or a checkpoint of another sparsity.
    """
    section = config.sparsity
    if section.method is None:
        return None
    kept = recorded or _kept_at_start(config, source, trained)
    shapes = {name: shape for name, shape in source.shapes().items() if name in kept}
    missing = [name for name in kept if name not in shapes]
    if missing:
        raise ConfigError(
            f"sparsity: the run has sparse weights that {source.name} lacks: {few(missing)}; give "
            "the model that the run was started with"
        )
    elements = {name: math.prod(shape) for name, shape in shapes.items()}
    if section.method == "gmp":
        assert section.sparsity is not None
        for name, density in densities(section.distribution, shapes, section.sparsity).items():
            kept_count(name, elements[name], density)  # refuses a mask that would end empty
    policy = policy_of(config, shapes)
    lifts = isinstance(policy, Densify)
    return SparsePlan(
        shapes=shapes,
        kept={name: kept[name] for name in shapes},
        capacities={name: elements[name] if lifts else kept[name] for name in shapes},
        policy=policy,
        initial_mask="magnitude" if section.method == "gmp" else section.initial_mask,
    )


def _kept_at_start(config: Config, source: ModelSource, trained: Collection[str]) -> dict[str, int]:
    """Return how many entries each sparse weight of a new run has before its first step."""
    section = config.sparsity
    names = _names(config, source, trained)
    shapes = {name: source.shapes()[name] for name in names}
    if section.initial_mask == "zeros":
        return _kept_of_checkpoint(config, source, names)
    assert section.sparsity is not None
    final = densities(section.distribution, shapes, section.sparsity)
    initial = section.schedule.initial
    return {
        name: kept_count(
            name,
            math.prod(shapes[name]),
            1 - min(initial, 1 - density) if section.method == "gmp" else density,
        )
        for name, density in final.items()
    }


def _names(config: Config, source: ModelSource, trained: Collection[str]) -> tuple[str, ...]:
    section, shapes = config.sparsity, source.shapes()
    frozen = {name for name in shapes if name not in trained}
    dense = source.embeddings_and_head() | frozen
    names = sparse_weights(shapes, section.weights, section.keep_dense, dense, source.aliases)
    if unlike := [name for name in names if name in frozen]:
        raise ConfigError(
            f"sparsity.weights: expected weights that are trained, got {few(unlike)}, which "
            "freeze, train or lora exclude; name them in sparsity.keep_dense, or train them"
        )
    return names


def _kept_of_checkpoint(
    config: Config, source: ModelSource, names: tuple[str, ...]
) -> dict[str, int]:
    """Count the entries that are not zero; weights without a zero stay dense unless named."""
    section, shapes = config.sparsity, source.shapes()
    kept: dict[str, int] = {}
    unmasked = []
    for name in names:
        mask = source.mask(name)
        if mask is not None:
            kept[name] = mask.kept
        else:
            unmasked.append(name)
    for name, tensor in source.initial_weights(config.run.seed, unmasked):
        kept[name] = int(torch.count_nonzero(tensor))
    elements = {name: math.prod(shapes[name]) for name in names}
    if not section.weights:
        kept = {name: count for name, count in kept.items() if count < elements[name]}
    if not kept:
        raise ConfigError(
            f"sparsity.initial_mask: expected weights with zeros in {_origin(source)}, none of "
            f"{few(list(names))} has any; choose initial_mask: magnitude to prune them"
        )
    for name, count in kept.items():
        kept_count(name, elements[name], count / elements[name])  # refuses a weight of zeros
    found = 1 - sum(kept.values()) / sum(elements[name] for name in kept)
    if section.sparsity is not None and abs(found - section.sparsity) > _NEAR:
        raise ConfigError(
            f"sparsity.sparsity: expected {found:.4g}, the sparsity of the {len(kept)} weights "
            f"with zeros in {_origin(source)}, got {section.sparsity}; leave it out to keep "
            "theirs, or choose initial_mask: magnitude to prune them to another one"
        )
    return {name: kept[name] for name in names if name in kept}


def _origin(source: ModelSource) -> str:
    return str(source.weights_folder or source.name)


def mask_rule_of(config: Config, program: Program) -> MaskRule | None:
    """Return the rule by which masks change, without that of the first masks; None if no weight is
    sparse."""
    shapes = {name: program.weights[name].shape for name in program.capacities}
    if not shapes:
        return None
    return MaskRule(policy_of(config, shapes), config.run.seed, "random", {})


def policy_of(config: Config, shapes: Mapping[str, tuple[int, ...]]) -> SparsityPolicy:
    """Return how masks change; `shapes` are those of all sparse weights."""
    section, steps = config.sparsity, config.run.steps
    policy: SparsityPolicy = StaticMasks()
    if section.method == "gmp":
        assert section.sparsity is not None
        schedule = section.schedule
        policy = gradual_magnitude(
            densities(section.distribution, shapes, section.sparsity),
            steps,
            begin=schedule.begin,
            end=schedule.end,
            every=section.update_every,
            initial=schedule.initial,
            shape=schedule.name,
            power=schedule.power,
        )
    elif section.method in ("set", "rigl"):
        policy = exchanging(
            RigL if section.method == "rigl" else SparseEvolutionaryTraining,
            steps,
            begin=section.update_begin,
            end=section.update_end,
            every=section.update_every,
            fraction=section.drop_fraction,
            decay=section.drop_decay,
            power=section.drop_power,
        )
    if section.densify_at is None:
        return policy
    return Densify(policy, steps_of(section.densify_at, steps))


def _change_steps(policy: SparsityPolicy, run_steps: int) -> Iterator[int]:
    """Yield, rising, the steps of a run at whose commit a policy may change masks."""
    lifted = policy.step if isinstance(policy, Densify) else run_steps + 1
    until = policy.until if isinstance(policy, Densify) else policy
    if isinstance(until, GradualMagnitude | SparseEvolutionaryTraining | RigL):
        times = until.times
        last = min(run_steps, lifted - 1)
        due = range(times.begin, min(times.end, last) + 1, times.every)
        yield from (step for step in due if step >= 1)
        end = max(1, times.end)
        if until.may_change(end) and not times.is_due(end) and end <= last:
            yield end
    if lifted <= run_steps:
        yield lifted


def _changing_counts(policy: SparsityPolicy) -> SparsityPolicy:
    """Return a policy without the changes that exchange entries and keep their number."""
    if isinstance(policy, Densify):
        return replace(policy, until=_changing_counts(policy.until))
    return policy if isinstance(policy, GradualMagnitude) else StaticMasks()

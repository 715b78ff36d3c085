"""The reference that sparse training is compared with: a dense model in plain PyTorch, masked.

Weights, gradients and moments are multiplied with masks; AdamW is written out, because every entry
has its own number of updates. What a random choice has selected is taken from the run, and what a
rule must select is checked against that rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from plain_training import Recipe
from tiny_models import IGNORED, Case

Masks = Mapping[str, torch.Tensor]
"""For every sparse weight a bool tensor of its shape."""

NEAR = 1e-5
"""Values whose order may differ between two runs that differ by rounding, as a share."""


@dataclass(frozen=True)
class Change:
    """What a step does with the masks: the numbers of entries to drop and to grow, by weight."""

    counts: Mapping[str, tuple[int, int]]
    by_gradient: bool = False
    replaces_update: bool = False


Policy = Callable[[int, Masks], Change | None]
"""Returns what the commit of a step, from 1, does with the masks before it."""


@dataclass
class Entry:
    """A weight with its moments, and per element the number of updates before it was grown."""

    weight: torch.Tensor
    first: torch.Tensor = field(init=False)
    second: torch.Tensor = field(init=False)
    born: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.first, self.second = torch.zeros_like(self.weight), torch.zeros_like(self.weight)
        self.born = torch.zeros_like(self.weight)

    @torch.no_grad()
    def update(self, gradient: torch.Tensor, updates: int, rate: float, decay: float) -> None:
        """One step of AdamW with betas 0.9 and 0.95 (Loshchilov & Hutter, 2019, algorithm 2)."""
        self.weight.mul_(1 - rate * decay)
        self.first.mul_(0.9).add_(gradient, alpha=0.1)
        self.second.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
        age = (updates - self.born).double()
        first = self.first / (1 - 0.9**age)
        second = self.second / (1 - 0.95**age)
        self.weight.sub_((rate * first / (second.sqrt() + 1e-8)).float())

    @torch.no_grad()
    def mask(self, before: torch.Tensor, after: torch.Tensor, updates: int) -> None:
        """Change the mask: what is grown begins at zero."""
        stays = before & after
        for values in (self.weight, self.first, self.second):
            values.mul_(stays)
        self.born[after & ~before] = updates


@dataclass(frozen=True)
class MaskedRun:
    """The losses of the steps, the weights after the last, and the steps that changed masks."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    changed: list[int]


def masked_training(
    case: Case,
    recipe: Recipe,
    masks: Sequence[Masks],
    policy: Policy,
    order: Callable[[int], Sequence[int]] = range,
) -> MaskedRun:
    """Train densely with masked weights, as `plain_training.plain` does without masks.

    `masks[k]` are those of the run after its step k; those that a rule selects are checked.
    """
    model = case.plain(recipe.seed)
    parameters = dict(model.named_parameters())
    entries = {name: Entry(parameter.data) for name, parameter in parameters.items()}
    for name, mask in masks[0].items():
        entries[name].weight.mul_(mask)
    source, losses, changed, updates = case.data(recipe.seed), [], [], 0
    for number in range(recipe.steps):
        step, before, after = number + 1, masks[number], masks[number + 1]
        losses.append(_gradients(case, recipe, model, source, number, order))
        dense = {name: parameter.grad for name, parameter in parameters.items()}
        kept = {n: g * before[n] if n in before else g for n, g in dense.items()}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in kept.values()))
        scale = min(1.0, recipe.clip_norm / norm)
        change = policy(step, before)
        _check(step, change, before, after, entries, dense)
        if change is None or not change.replaces_update:
            updates += 1
            for name, entry in entries.items():
                decay = recipe.weight_decay if entry.weight.dim() >= 2 else 0.0
                entry.update(kept[name] * scale, updates, recipe.rate(number), decay)
        for name, mask in after.items():
            entries[name].mask(before[name], mask, updates)
        if change is not None:
            changed.append(step)
        model.zero_grad()
    return MaskedRun(losses, {n: e.weight.clone() for n, e in entries.items()}, changed)


def _gradients(case, recipe, model, source, number, order) -> float:
    """Accumulate the gradients of a step; return its loss."""
    batch = source.batch(number, range(recipe.size), recipe.size)
    rows = {name: torch.from_numpy(value) for name, value in batch.items()}
    parts = recipe.size // recipe.micro
    count = int((rows["labels"] != IGNORED).sum()) if case.summed else parts
    found = []
    for part in order(parts):
        here = slice(part * recipe.micro, (part + 1) * recipe.micro)
        loss = case.loss(model, {name: value[here] for name, value in rows.items()})
        (loss / count).backward()
        found.append(float(loss.detach()))
    return math.fsum(found) / count


def _check(
    step: int,
    change: Change | None,
    before: Masks,
    after: Masks,
    entries: Mapping[str, Entry],
    dense: Mapping[str, torch.Tensor],
) -> None:
    """Assert that the run has changed its masks as the policy says."""
    for name, old in before.items():
        dropped, grown = old & ~after[name], after[name] & ~old
        counts = change.counts.get(name, (0, 0)) if change is not None else (0, 0)
        assert (int(dropped.sum()), int(grown.sum())) == counts, f"{name} at step {step}"
        magnitudes = entries[name].weight.abs()
        _assert_below(magnitudes, dropped, old & ~dropped, f"dropped of {name} at step {step}")
        if change is not None and change.by_gradient:
            left = ~old & ~grown
            _assert_below(dense[name].abs(), left, grown, f"grown of {name} at step {step}")


def _assert_below(
    values: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, what: str
) -> None:
    if lower.any() and upper.any():
        most, least = float(values[lower].max()), float(values[upper].min())
        assert most <= least + NEAR * float(values.max()), f"{what}: {most} and {least}"

"""How a flash store divides the memory that it may use.

Every byte of memory that holds a weight, a gradient or a part of the optimizer's state saves a byte
read from flash in the forward sweep, where the updates are made and the disk is busiest. So first
comes what must be there: the weights of two stages, a few blocks of state on their way, the
gradients of tied weights, which arrive in two parts. Then weights and gradients share what is left,
and when both are in memory whole, the rest holds state. Gradients of the first stages stay in
memory rather than those of the last: they arrive last and are used first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import BudgetError
from penstock.program import Program
from penstock.store.flash.frames import least_bytes
from penstock.store.flash.layout import BLOCK_ELEMENTS, FlashLayout, Unit
from penstock.store.roles import Role

_LEAST_BUFFERS, _MOST_BUFFERS = 4, 32
SLABS = 2
"""Stages of gradients that may be on their way to flash."""


@dataclass(frozen=True)
class Division:
    """Bytes and places by what they hold.

    `spilled` are the units whose gradients go to flash, each through one of two slabs of
    `slab_bytes`; `held_bytes` are for state that stays in memory between steps.
    """

    weight_bytes: int
    buffers: int
    buffer_bytes: int
    gradient_bytes: int
    spilled: frozenset[int]
    slab_bytes: int
    held_bytes: int


def divide(
    layout: FlashLayout, half_gradients: bool, least_weights: int, budget_bytes: int
) -> Division:
    """Divide a budget.

    Args:
        layout: the units; gradients of tied ones are float32.
        half_gradients: whether the others are bfloat16.
        least_weights: bytes of weights that must be in memory at once.
        budget_bytes: what there is.

    Raises:
        BudgetError: it is too small, with the arithmetic.
    """
    units = [unit for unit in layout.units if unit.trainable]
    sizes = {unit.index: unit.elements * gradient_width(unit, half_gradients) for unit in units}
    block = max((unit.state_bytes(unit.blocks[0].elements) for unit in units), default=0)
    weights = sum(unit.stream_bytes for unit in layout.units)
    gradients = sum(sizes.values())
    least = _least(units, sizes, block, weights, least_weights)
    rest = budget_bytes - weights - gradients
    if rest >= _LEAST_BUFFERS * block:
        buffers = _buffers(rest // 8, block)
        held = rest - buffers * block
        return Division(weights, buffers, block, gradients, frozenset(), 0, held)
    gradients_stay = _with_gradients(budget_bytes, gradients, block, least_weights)
    if gradients_stay is not None:
        return gradients_stay
    return _spilling(units, sizes, block, least_weights, budget_bytes, least)


def least_dram_bytes(program: Program, roles: Sequence[Role], half_gradients: bool) -> int:
    """Return the least memory with which a store of this program on flash can be opened."""
    layout = FlashLayout.of(program, roles, 1, BLOCK_ELEMENTS)
    least_weights = least_bytes(layout.units, visits_of(program, layout))
    units = [unit for unit in layout.units if unit.trainable]
    sizes = {unit.index: unit.elements * gradient_width(unit, half_gradients) for unit in units}
    block = max((unit.state_bytes(unit.blocks[0].elements) for unit in units), default=0)
    weights = sum(unit.stream_bytes for unit in layout.units)
    return _least(units, sizes, block, weights, least_weights)


def _least(
    units: Sequence[Unit], sizes: dict[int, int], block: int, weights: int, least_weights: int
) -> int:
    """Return the least of the three ways in which `divide` may go."""
    gradients = sum(sizes.values())
    fixed, block_and_gradient, _ = _on_their_way(units, sizes, block)
    return min(
        weights + gradients + _LEAST_BUFFERS * block,
        gradients + max(gradients, least_weights) + _LEAST_BUFFERS * block,
        fixed + _LEAST_BUFFERS * block_and_gradient + least_weights,
    )


def visits_of(program: Program, layout: FlashLayout) -> list[list[int]]:
    """Return the units that each visit of a step needs: every stage forward, and back again."""
    forward = [layout.units_of(stage.weights) for stage in program.stages]
    return [*forward, *forward[-2::-1]]


def gradient_width(unit: Unit, half_gradients: bool) -> int:
    """Return the bytes of an element of a unit's gradient."""
    return 2 if half_gradients and not unit.tied else 4


def _with_gradients(budget: int, gradients: int, block: int, least_weights: int) -> Division | None:
    """All gradients in memory, where they take no more than half of what is not for blocks."""
    buffers = _buffers((budget - gradients) // 8, block)
    rest = budget - buffers * block
    if 2 * gradients > rest or rest - gradients < least_weights:
        return None
    return Division(rest - gradients, buffers, block, gradients, frozenset(), 0, 0)


def _spilling(
    units: Sequence[Unit],
    sizes: dict[int, int],
    block: int,
    least_weights: int,
    budget: int,
    least: int,
) -> Division:
    movable = [unit for unit in units if not unit.tied]
    tied = sum(sizes[unit.index] for unit in units if unit.tied)
    fixed, block, slab = _on_their_way(units, sizes, block)
    buffers = _buffers((budget - fixed) // 8, block)
    rest = budget - fixed - buffers * block
    if rest < least_weights:
        raise BudgetError(
            f"store.dram: the weights of two stages need {least_weights:,} bytes, blocks of state "
            f"on their way {_LEAST_BUFFERS * block:,}, gradients {fixed:,}; the budget is "
            f"{budget:,}; raise store.dram to {least:,} or more"
        )
    resident, left = tied, (rest - least_weights) // 2
    spilled: set[int] = set()
    for unit in movable:
        if sizes[unit.index] <= left and not spilled:
            left -= sizes[unit.index]
            resident += sizes[unit.index]
        else:
            spilled.add(unit.index)
    weights = rest - (resident - tied)
    return Division(weights, buffers, block, resident, frozenset(spilled), slab, 0)


def _on_their_way(units: Sequence[Unit], sizes: dict[int, int], block: int) -> tuple[int, int, int]:
    """Return, where gradients go to flash, the bytes of those that cannot and of all slabs, of a
    block with its gradient, and of a slab."""
    movable = [unit for unit in units if not unit.tied]
    tied = sum(sizes[unit.index] for unit in units if unit.tied)
    tail = max((sizes[u.index] * u.blocks[0].elements // u.elements for u in movable), default=0)
    slab = max((sizes[unit.index] for unit in movable), default=0)
    return tied + SLABS * slab, block + tail, slab


def _buffers(share: int, block: int) -> int:
    return min(_MOST_BUFFERS, max(_LEAST_BUFFERS, share // max(1, block)))

"""How a flash store divides its memory budget.

Every byte of memory that holds a weight, a gradient or optimizer state saves a byte read from flash
in the forward sweep, where the updates run and the disk is busiest. The minimum comes first: the
weights of two stages, a few blocks of state in transit, and the gradients of tied weights, which
arrive in two parts. Weights and gradients then share the remaining memory. If both fit completely,
the rest holds optimizer state. Gradients of the first stages have priority over gradients of the
last stages, because they arrive last and are used first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import BudgetError
from penstock.step_schedule import sweep_order
from penstock.store.flash.frames import Visit, least_bytes
from penstock.store.flash.layout import BLOCK_ELEMENTS, FlashLayout, Unit
from penstock.store.holding import Holding
from penstock.store.roles import Role

_LEAST_BUFFERS, _MOST_BUFFERS = 4, 64
SLABS = 2
"""Stages whose gradients may be in transit to flash."""


@dataclass(frozen=True)
class Division:
    """Bytes and number of buffers by use.

    `spilled` are the units whose gradients go to flash, each through one of two slabs of
    `slab_bytes`; these gradients take `spilled_bytes` on flash. `held_bytes` are for state that
    stays in memory between steps.
    """

    weight_bytes: int
    buffers: int
    buffer_bytes: int
    gradient_bytes: int
    spilled: frozenset[int]
    spilled_bytes: int
    slab_bytes: int
    held_bytes: int


@dataclass(frozen=True)
class _Option:
    """One way to divide the budget: fixed bytes, the minimum for weights, and the bytes of a
    block."""

    fixed_bytes: int
    weight_bytes: int
    block_bytes: int

    @property
    def least_bytes(self) -> int:
        return self.fixed_bytes + self.weight_bytes + _LEAST_BUFFERS * self.block_bytes

    def divided(self, budget: int, blocks: int) -> tuple[int, int]:
        """Return how many of `blocks` fit into memory, and the bytes of the budget that remain.

        Blocks take a quarter of the bytes that are not fixed, and leave at least the minimum for
        weights. The first stages of the next step do not wait for state that was read ahead.
        """
        rest = budget - self.fixed_bytes
        share = min(rest // 4, rest - self.weight_bytes) // max(1, self.block_bytes)
        buffers = min(_MOST_BUFFERS, max(_LEAST_BUFFERS, min(share, blocks)))
        return buffers, rest - self.weight_bytes - buffers * self.block_bytes


class _Options:
    """The three ways to divide a budget, the best first: all weights and gradients in memory; all
    gradients in memory, and at most as many bytes of gradients as of weights; some gradients on
    flash."""

    def __init__(self, layout: FlashLayout, half_gradients: bool, least_weights: int) -> None:
        units = [unit for unit in layout.units if unit.is_updated]
        self.sizes = {u.index: u.elements * gradient_width(u, half_gradients) for u in units}
        self.movable = [unit for unit in units if not unit.tied]
        self.tied = sum(self.sizes[unit.index] for unit in units if unit.tied)
        self.gradients = sum(self.sizes.values())
        self.weights = sum(unit.stream_bytes for unit in layout.units)
        self.blocks = sum(len(unit.blocks) for unit in units)
        self.state = sum(u.state_bytes(block.elements) for u in units for block in u.blocks)
        self.slab = max((self.sizes[unit.index] for unit in self.movable), default=0)
        block = max((unit.state_bytes(unit.blocks[0].elements) for unit in units), default=0)
        tail = max((self._first_gradient(unit) for unit in self.movable), default=0)
        self.all_in_memory = _Option(self.weights + self.gradients, 0, block)
        self.gradients_stay = _Option(self.gradients, max(self.gradients, least_weights), block)
        self.spilling = _Option(self.tied + SLABS * self.slab, least_weights, block + tail)

    def _first_gradient(self, unit: Unit) -> int:
        return self.sizes[unit.index] * unit.blocks[0].elements // unit.elements

    @property
    def least_bytes(self) -> int:
        options = (self.all_in_memory, self.gradients_stay, self.spilling)
        return min(option.least_bytes for option in options)


def divide(
    layout: FlashLayout, half_gradients: bool, least_weights: int, budget_bytes: int
) -> Division:
    """Divide a budget.

    Args:
        layout: the units; gradients of tied units are float32.
        half_gradients: whether the other gradients are bfloat16.
        least_weights: bytes of weights that must be in memory at once.
        budget_bytes: the memory to divide.

    Raises:
        BudgetError: the budget is too small; the message shows the calculation.
    """
    options = _Options(layout, half_gradients, least_weights)
    option = options.all_in_memory
    if budget_bytes >= option.least_bytes:
        buffers, left = option.divided(budget_bytes, options.blocks)
        return _without_flash(options, option, buffers, options.weights, min(left, options.state))
    option = options.gradients_stay
    if budget_bytes >= option.least_bytes:
        buffers, left = option.divided(budget_bytes, options.blocks)
        return _without_flash(options, option, buffers, option.weight_bytes + left, 0)
    return _spilling(options, budget_bytes)


def least_dram_bytes(program: Holding, roles: Sequence[Role], half_gradients: bool) -> int:
    """Return the minimum memory with which a flash store of this program can be opened."""
    layout = FlashLayout.of(program, roles, 1, BLOCK_ELEMENTS)
    least_weights = least_bytes(layout.units, visits_of(program, layout))
    return _Options(layout, half_gradients, least_weights).least_bytes


def visits_of(program: Holding, layout: FlashLayout) -> list[Visit]:
    """Return the units that each operation of a step may need, in schedule order."""
    units = [layout.units_of(stage.weights) for stage in program.stages]
    return [Visit(stage, units[stage]) for stage, _ in sweep_order(len(units))]


def gradient_width(unit: Unit, half_gradients: bool) -> int:
    """Return the bytes per element of a unit's gradient."""
    return 2 if half_gradients and not unit.tied else 4


def _without_flash(
    options: _Options, option: _Option, buffers: int, weights: int, held: int
) -> Division:
    """All gradients are in memory."""
    return Division(
        weight_bytes=weights,
        buffers=buffers,
        buffer_bytes=option.block_bytes,
        gradient_bytes=options.gradients,
        spilled=frozenset(),
        spilled_bytes=0,
        slab_bytes=0,
        held_bytes=held,
    )


def _spilling(options: _Options, budget: int) -> Division:
    option = options.spilling
    if budget < option.least_bytes:
        raise BudgetError(
            f"store.dram: the weights of two stages need {option.weight_bytes:,} bytes, buffers "
            f"for blocks of state {_LEAST_BUFFERS * option.block_bytes:,}, gradients "
            f"{option.fixed_bytes:,}; the budget is {budget:,}; raise store.dram to "
            f"{options.least_bytes:,} or more"
        )
    buffers, left = option.divided(budget, options.blocks)
    resident, room = options.tied, left // 2
    spilled: dict[int, int] = {}
    for unit in options.movable:
        size = options.sizes[unit.index]
        if size <= room and not spilled:
            room -= size
            resident += size
        else:
            spilled[unit.index] = size
    return Division(
        weight_bytes=option.weight_bytes + left - (resident - options.tied),
        buffers=buffers,
        buffer_bytes=option.block_bytes,
        gradient_bytes=resident,
        spilled=frozenset(spilled),
        spilled_bytes=sum(spilled.values()),
        slab_bytes=options.slab,
        held_bytes=0,
    )

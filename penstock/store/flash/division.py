"""How a flash store divides its memory budget.

Every byte of memory that holds a weight, a gradient or optimizer state saves a byte read from flash
in the forward sweep, where the updates run and the disk is busiest. The minimum comes first: the
weights of two stages, a few blocks of state in transit, and the gradients of tied weights, which
arrive in two parts. Weights and gradients then share the remaining memory. If both fit completely,
the rest holds optimizer state. Gradients of the first stages have priority over gradients of the
last stages, because they arrive last and are used first. A store that fits in memory as a whole
needs no more than its size: no block of it is in transit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from penstock.config import size_above
from penstock.errors import BudgetError
from penstock.step_schedule import sweep_order
from penstock.store.flash.frames import Visit, least_bytes
from penstock.store.flash.layout import BLOCK_ELEMENTS, FlashLayout, Unit
from penstock.store.holding import Holding
from penstock.store.interface import FlashTraffic
from penstock.store.mask_rule import CHANGE, MaskRule, mask_memory, passing_bytes
from penstock.store.optimizers import Optimizer
from penstock.store.roles import AGE, Role

_LEAST_BUFFERS, _MOST_BUFFERS = 4, 64
SLABS = 2
"""Units whose gradients may be on their way to flash."""


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

    def memory_bytes(self, masks: Mapping[str, int]) -> dict[str, int]:
        """Return the maximum memory of the store, by use; `masks` is the part for masks."""
        return {
            "weights": self.weight_bytes,
            "gradient": self.gradient_bytes + SLABS * self.slab_bytes,
            "blocks": self.buffers * self.buffer_bytes,
            "state": self.held_bytes,
            **masks,
        }


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
    """The four ways to divide a budget, the best first: everything in memory; all weights and
    gradients in memory; all gradients in memory, and at most as many bytes of gradients as of
    weights; some gradients on flash."""

    def __init__(self, layout: FlashLayout, half_gradients: bool, least_weights: int) -> None:
        units = [unit for unit in layout.units if unit.is_updated]
        widths = {unit.index: gradient_width(unit, half_gradients) for unit in units}
        self.sizes = {u.index: u.expected.elements * widths[u.index] for u in units}
        self.movable = [unit for unit in units if not unit.tied]
        self.tied = sum(self.sizes[unit.index] for unit in units if unit.tied)
        self.gradients = sum(self.sizes.values())
        self.weights = sum(unit.expected.stream_bytes for unit in layout.units)
        self.blocks = sum(unit.block_count for unit in units)
        self.state = sum(unit.expected.state_room for unit in units)
        slabs = (unit.elements * widths[unit.index] for unit in self.movable)
        self.slab = max(slabs, default=0)
        block = max((unit.largest_state_bytes for unit in units), default=0)
        tails = (unit.largest_gradient_bytes(widths[unit.index]) for unit in self.movable)
        tail = max(tails, default=0)
        self.everything = _Option(self.weights + self.gradients + self.state, 0, 0)
        self.all_in_memory = _Option(self.weights + self.gradients, 0, block)
        self.gradients_stay = _Option(self.gradients, max(self.gradients, least_weights), block)
        self.spilling = _Option(self.tied + SLABS * self.slab, least_weights, block + tail)

    @property
    def least(self) -> _Option:
        """The option that needs the fewest bytes."""
        options = (self.spilling, self.gradients_stay, self.all_in_memory, self.everything)
        return min(options, key=lambda option: option.least_bytes)

    def parts(self, option: _Option) -> str:
        """Return the bytes that an option needs, by use."""
        if option is self.everything:
            return f"all weights, gradients and optimizer state need {option.fixed_bytes:,} bytes"
        buffers = f"buffers for blocks of state {_LEAST_BUFFERS * option.block_bytes:,}"
        if option is self.all_in_memory:
            return f"all weights and gradients need {option.fixed_bytes:,} bytes, {buffers}"
        weights = "the weights of two stages" if option is self.spilling else "weights"
        return (
            f"{weights} need {option.weight_bytes:,} bytes, {buffers}, gradients "
            f"{option.fixed_bytes:,}"
        )


def divide(
    layout: FlashLayout,
    half_gradients: bool,
    least_weights: int,
    budget_bytes: int,
    masks: Mapping[str, int] = MappingProxyType({}),
) -> Division:
    """Divide a budget.

    Args:
        layout: the units; gradients of tied units are float32.
        half_gradients: whether the other gradients are bfloat16.
        least_weights: bytes of weights that must be in memory at once.
        budget_bytes: the memory to divide.
        masks: the memory of masks, by use, of which the rest of the budget is divided.

    Raises:
        BudgetError: the budget is too small; the message shows the calculation.
    """
    options = _Options(layout, half_gradients, least_weights)
    beside = sum(masks.values())
    budget_bytes -= beside
    option = options.everything
    if options.state and budget_bytes >= option.least_bytes:  # no block needs a buffer
        return _without_flash(options, option, 0, options.weights, options.state)
    option = options.all_in_memory
    if budget_bytes >= option.least_bytes:
        buffers, left = option.divided(budget_bytes, options.blocks)
        return _without_flash(options, option, buffers, options.weights, min(left, options.state))
    option = options.gradients_stay
    if budget_bytes >= option.least_bytes:
        buffers, left = option.divided(budget_bytes, options.blocks)
        return _without_flash(options, option, buffers, option.weight_bytes + left, 0)
    return _spilling(options, budget_bytes, beside)


def least_dram_bytes(
    program: Holding, optimizer: Optimizer, half_gradients: bool, masks: MaskRule | None = None
) -> int:
    """Return the minimum memory with which a flash store of this program can be opened.

    **Arguments:** `masks` is the rule of sparse weights, if there are any.
    """
    age = age_role(optimizer, masks)
    layout = FlashLayout.of(program, optimizer.roles, 1, BLOCK_ELEMENTS, age)
    least_weights = least_bytes(layout.units, visits_of(program, layout))
    beside = sum(memory_of_masks(layout, program, masks).values())
    return _Options(layout, half_gradients, least_weights).least.least_bytes + beside


def mask_change_bytes(program: Holding, optimizer: Optimizer, masks: MaskRule | None) -> int:
    """Return the memory of a store on flash that only a step that changes masks takes."""
    layout = FlashLayout.of(program, optimizer.roles, 1, BLOCK_ELEMENTS, age_role(optimizer, masks))
    return passing_bytes(memory_of_masks(layout, program, masks))


def age_role(optimizer: Optimizer, masks: MaskRule | None) -> Role | None:
    """Return the role of the ages of sparse weights' entries; None if they are not needed."""
    age = None if masks is None else masks.age_type(optimizer.corrected_betas)
    return None if age is None else Role(AGE, np.dtype(age).name)


def memory_of_masks(
    layout: FlashLayout, program: Holding, masks: MaskRule | None
) -> dict[str, int]:
    """Return the memory of masks and of their changes, by use; empty if no weight is sparse.

    A weight whose mask changes has all its state in memory, before and after the change; one weight
    at a time.
    """
    memory = mask_memory(program, masks)
    if memory.get(CHANGE):
        state = max(unit.expected.state_room for unit in layout.sparse if unit.trainable)
        memory[CHANGE] += 2 * state
    return memory


def visits_of(program: Holding, layout: FlashLayout) -> list[Visit]:
    """Return the units that each operation of a step may need, in schedule order."""
    units = [layout.units_of(stage.weights) for stage in program.stages]
    return [Visit(stage, units[stage]) for stage, _ in sweep_order(len(units))]


def step_traffic(layout: FlashLayout, spilled_bytes: int) -> FlashTraffic:
    """Return the maximum traffic of a step: state once each way, weights read twice and written
    once.

    Gradients that do not fit in memory are written once and read once. A step that changes masks
    also reads the weights that lose entries (a shard once per round of their selection), and writes
    the masks.
    """
    units = [unit.expected for unit in layout.units]
    updated = sum(unit.place_bytes for unit in units if unit.trainable)
    once = sum(unit.stream_bytes for unit in units)
    frozen = sum(unit.stream_bytes for unit in units if not unit.trainable)
    return FlashTraffic(updated + frozen + once + spilled_bytes, updated + spilled_bytes)


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


def _spilling(options: _Options, budget: int, beside: int) -> Division:
    option = options.spilling
    if budget < option.least_bytes:
        raise _too_small(options, budget, beside)
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


def _too_small(options: _Options, budget: int, beside: int) -> BudgetError:
    """Return the error of a budget in which no option fits; both sizes without the masks."""
    least = options.least
    need, budget = least.least_bytes + beside, budget + beside
    masks = f", masks and their changes {beside:,}" if beside else ""
    is_all = least is options.everything
    why = "; the model is so small that this is the whole store" if is_all else ""
    instead = "; with that much the store needs no flash" if is_all else ""
    return BudgetError(
        f"store.dram: a store on flash needs at least {size_above(need)} of memory for this model, "
        f"got {size_above(budget)}{why}: {options.parts(least)}{masks}; the budget is {budget:,}; "
        f"raise store.dram to {need:,} or more (store.dram={size_above(need).replace(' ', '')})"
        f"{instead}"
    )

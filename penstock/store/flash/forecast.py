"""The traffic of a flash store in a step, before any store exists.

The forecast uses the store's own code: the layout, the division of `store.dram`, the blocks of
state that stay in memory, and the eviction of weights over the schedule. It allocates nothing, so
that a store of any size can be forecast on a small machine. It is the forecast of a step in the
middle of a run, in which every step is durable.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from penstock.store.flash.blocks import StateBlocks
from penstock.store.flash.division import (
    Division,
    age_role,
    divide,
    gradient_width,
    memory_of_masks,
    visits_of,
)
from penstock.store.flash.frames import Frames, Visit, least_bytes
from penstock.store.flash.layout import BLOCK_ELEMENTS, FlashLayout, Unit
from penstock.store.flash.opening import require_flash
from penstock.store.holding import Holding
from penstock.store.mask_rule import MaskRule
from penstock.store.optimizers import Optimizer

_STEPS = 3  # after which the weights in memory repeat from step to step


@dataclass(frozen=True)
class WeightRead:
    """Weights that are read from flash, as weights alone.

    Attributes:
        needed: number of the operation, in the schedule, that computes with them.
        room: number of the operation from which on there is memory for them. If it is after
            `needed`, it belongs to the step before.
        bytes: read.
    """

    needed: int
    room: int
    bytes: int


@dataclass(frozen=True)
class UnitUpdate:
    """The update of a unit, in the order of the updates.

    Attributes:
        stage: the home stage of the unit's weights.
        state_read, gradient_read, written: bytes from and to flash.
        gradient_written: bytes of the gradient that go to flash in the backward sweep.
        names: the weights.
    """

    stage: int
    state_read: int
    gradient_read: int
    written: int
    gradient_written: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class FlashForecast:
    """The traffic of a step.

    Attributes:
        weights: the reads of weights, in the order of their need.
        updates: the updates, in their order.
        window_bytes: state that may be in memory on its way to and from flash: that of the
            buffers, or all state of a store that has no buffers since it holds everything.
        memory: maximum memory of the store in bytes, by use.
        flash_bytes: bytes of the store on flash.
    """

    weights: tuple[WeightRead, ...]
    updates: tuple[UnitUpdate, ...]
    window_bytes: int
    memory: dict[str, int]
    flash_bytes: int

    @property
    def read_bytes(self) -> int:
        """Bytes that a step reads, however far the disk gets ahead."""
        updates = sum(update.state_read + update.gradient_read for update in self.updates)
        return updates + sum(read.bytes for read in self.weights)

    @property
    def written_bytes(self) -> int:
        """Bytes that a step writes."""
        return sum(update.written + update.gradient_written for update in self.updates)

    def times(self, stores: int) -> FlashForecast:
        """Return the traffic of so many equal stores together: of all shards and replicas."""
        reads = (replace(read, bytes=stores * read.bytes) for read in self.weights)
        updates = (
            replace(
                update,
                state_read=stores * update.state_read,
                gradient_read=stores * update.gradient_read,
                written=stores * update.written,
                gradient_written=stores * update.gradient_written,
            )
            for update in self.updates
        )
        return FlashForecast(
            tuple(reads),
            tuple(updates),
            stores * self.window_bytes,
            {use: stores * size for use, size in self.memory.items()},
            stores * self.flash_bytes,
        )


def forecast(
    program: Holding,
    optimizer: Optimizer,
    dram_bytes: int,
    *,
    half_gradients: bool,
    keep_steps: int,
    limit: int | None = None,
    masks: MaskRule | None = None,
    block_elements: int = BLOCK_ELEMENTS,
) -> FlashForecast:
    """Return the traffic of one store, or of one shard.

    Args:
        program: the weights and their stages.
        dram_bytes: memory of the store.
        half_gradients: whether gradients are stored as bfloat16.
        keep_steps: durable steps that can be opened again.
        limit: of the bytes on flash; None for no limit.
        masks: the rule of sparse weights, if there are any.
        block_elements: elements that are read, updated and written at once.

    Raises:
        BudgetError: `dram_bytes` cannot hold the minimum working set, or the store exceeds `limit`.
    """
    age = age_role(optimizer, masks)
    layout = FlashLayout.of(program, optimizer.roles, keep_steps, block_elements, age)
    visits = visits_of(program, layout)
    beside = memory_of_masks(layout, program, masks)
    least = least_bytes(layout.units, visits)
    division = divide(layout, half_gradients, least, dram_bytes, beside)
    require_flash(program, layout, division, limit, keep_steps)
    return FlashForecast(
        tuple(_weight_reads(layout, visits, division)),
        tuple(_updates(layout, division, half_gradients)),
        division.buffers * division.buffer_bytes or division.held_bytes,
        division.memory_bytes(beside),
        layout.planned_bytes + division.spilled_bytes,
    )


def _updates(layout: FlashLayout, division: Division, half: bool) -> list[UnitUpdate]:
    """Return the updates of all trained units; sparse ones with the most entries that they keep."""
    blocks = [[] if unit.is_sparse else unit.blocks for unit in layout.units]
    state = StateBlocks(layout, blocks, division.held_bytes, 0, 0)
    found = []
    for unit in layout.units:
        if not unit.is_updated:
            continue
        if unit.is_sparse:
            moved = 0 if state.stay_whole(unit) else unit.expected.state_room
        else:
            passing = (b for b in unit.blocks if not state.is_resident(unit, b))
            moved = sum(block.state_bytes for block in passing)
        room = (
            unit.expected.state_room if unit.is_sparse else sum(b.state_bytes for b in unit.blocks)
        )
        gradient = 0
        if unit.index in division.spilled:
            gradient = unit.expected.elements * gradient_width(unit, half)
        written = room + unit.expected.stream_bytes
        found.append(UnitUpdate(unit.stage, moved, gradient, written, gradient, unit.names))
    return found


def _weight_reads(layout: FlashLayout, visits: list[Visit], division: Division) -> list[WeightRead]:
    """Follow the weights in memory over some steps, as the store's reader fills and evicts them;
    return the reads of the last."""
    frames = Frames(layout.units, visits, division.weight_bytes, _address_space)
    found: list[WeightRead] = []

    def fill(unit: Unit, pinned: set[int], room: int, needed: int, ahead: bool) -> bool:
        if not frames.make_room(unit.index, pinned, ahead=ahead):
            return False
        found.append(WeightRead(needed, room, unit.expected.stream_bytes))
        return True

    for _ in range(_STEPS):
        found.clear()
        before: set[int] = set()
        for number, visit in enumerate(visits):
            frames.visit(visit.stage)
            pinned = before | set(visit.units)
            for index in visit.units:
                if index not in frames:
                    fill(layout.units[index], pinned, number, number, ahead=False)
            for coming in frames.upcoming():
                if coming in frames:
                    continue
                needed = (frames.cursor + frames.next_use(coming)) % len(visits)
                if not fill(layout.units[coming], pinned, number, needed, ahead=True):
                    break
            before = set(visit.units)
    return sorted(found, key=lambda read: read.needed)


def _address_space(size: int) -> np.ndarray:
    """Return an array of this many bytes that takes no memory."""
    return np.broadcast_to(np.zeros(1, np.uint8), (size,))

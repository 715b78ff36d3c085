"""Loading weights: a unit is written to flash when all its values have arrived."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.kernels.memory import allocate
from penstock.store.codecs import encode_saved, saved_values
from penstock.store.flash.layout import Block, Unit
from penstock.store.flash.version import state_roles, weight_parts
from penstock.store.roles import MASTER, Role


class Staging:
    """Gathers values in any order of weights and roles; hands over complete units.

    Memory is allocated for units that have arrived in part: one unit, if weights arrive in the
    order of the stages.
    """

    def __init__(self, hand_over: Callable[[StagedUnit], None]) -> None:
        self._hand_over = hand_over
        self._units: dict[int, StagedUnit] = {}

    def take(self, unit: Unit, name: str, role: str, begin: int, values: np.ndarray) -> None:
        """Accept values of a unit's weights or state, each value once; `name` is the weight.

        Raises:
            ConfigError: the unit's format cannot hold the values exactly.
        """
        if not values.size:
            return  # the unit may be complete without a weight of no elements
        staged = self._of(unit)
        if role == MASTER:
            values = saved_values(unit.format, name, values)
        staged.values[role][begin : begin + values.size] = values
        self._count_received(staged, role, values.size)

    def skip(self, unit: Unit, role: str, count: int) -> None:
        """Leave values at zero, the initial value of state."""
        if not count:
            return
        self._count_received(self._of(unit), role, count)

    def _of(self, unit: Unit) -> StagedUnit:
        return self._units.setdefault(unit.index, StagedUnit(unit))

    def _count_received(self, staged: StagedUnit, role: str, count: int) -> None:
        staged.missing[role] -= count
        if not any(staged.missing.values()):
            self._hand_over(staged)
            del self._units[staged.unit.index]

    @property
    def unfinished(self) -> list[str]:
        """The weights of each unit that have arrived in part."""
        return [staged.unit.names[0] for staged in self._units.values()]


class StagedUnit:
    """The values of a unit by role, and the number of values still missing."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        roles = (Role(MASTER, unit.format.saved_numpy), *unit.roles)
        self.values = {r.name: allocate(r.bytes(unit.elements)).view(r.numpy) for r in roles}
        self.missing = {r.name: sum(map(r.count, unit.sizes)) for r in roles}

    def block(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """Return a block's stream and state, uint8, in the layout of flash."""
        unit, here = self.unit, slice(block.begin, block.end)
        stream = allocate(block.elements * unit.stream_width)
        state = allocate(unit.state_bytes(block.elements))
        weight = weight_parts(unit, block, stream, state)
        encode_saved(unit.format, self.values[MASTER][here], weight)
        roles = state_roles(unit, block, state)
        for role in unit.roles:
            begin = block.begin // role.group
            values = roles[role.name]
            values[:] = self.values[role.name][begin : begin + values.size]
        return stream, state

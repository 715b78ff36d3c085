"""Loading weights: a unit is written to flash when all its values have arrived.

How many values a sparse weight has is known only from its whole mask. A weight that is loaded dense
gets its mask at once. A shard's part is written when its state is cleared, after its entries have
arrived. Those that are restored from a checkpoint stay in memory, as entries, until all have
arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from penstock.errors import CorruptionError
from penstock.kernels.memory import allocate
from penstock.sparsity import PackedIndex
from penstock.store.codecs import encode, encode_saved, saved_values
from penstock.store.flash.layout import Block, FlashLayout, Unit
from penstock.store.flash.stored_masks import is_history
from penstock.store.flash.version import Version, checksum, state_roles, weight_parts
from penstock.store.holding import Holding
from penstock.store.masks import Masks
from penstock.store.optimizer_state import require_length
from penstock.store.packed import length_of, room_of, with_room
from penstock.store.roles import AGE, CHANGES, INDEX, MASTER, VALUES, Role


class Staging:
    """Gathers values in any order of weights and roles; writes complete units to their next places.

    Memory is allocated for units that have arrived in part: one unit, if weights arrive in the
    order of the stages.

    Args:
        program: the weights.
        layout: their units.
        version: takes the written units.
        put: writes to the extents.
        masks: gets those of sparse weights.
    """

    def __init__(
        self,
        program: Holding,
        layout: FlashLayout,
        version: Version,
        put: Callable[[int, np.ndarray], None],
        masks: Masks,
    ) -> None:
        self._program, self._layout = program, layout
        self._version, self._put, self._masks = version, put, masks
        self._units: dict[int, _StagedUnit] = {}
        self._sparse: dict[str, dict[str, np.ndarray]] = {}
        self._written: dict[str, dict[str, int]] = {}
        self._missing = set(masks.names)  # sparse weights of which nothing has been written
        self._is_copied = False

    def write(self, name: str, role: str, begin: int, values: np.ndarray) -> None:
        """Accept values of a weight or of its state, each value once.

        Raises:
            ConfigError: the weight's format cannot hold the values exactly.
        """
        if name in self._masks:
            self._write_sparse(name, role, begin, values)
            return
        unit = self._layout.unit(name)
        origin = self._layout.begin_of(name) // unit.role(role).group
        if not values.size:
            return  # the unit may be complete without a weight of no elements
        staged = self._of(unit)
        if role == MASTER:
            values = saved_values(unit.format, name, values)
        staged.values[role][origin + begin : origin + begin + values.size] = values
        self._count_received(staged, role, values.size)

    def clear_state(self, name: str) -> None:
        """Leave the state of a weight at zero, its initial value; a sparse weight's is that anyway
        until it arrives. If mask and entries of a sparse weight have arrived, write it."""
        if name in self._masks:
            if INDEX in self._written.get(name, {}):
                written = self._written.pop(name)
                (index,) = self._masks.restore({name: written.get(VALUES, 0)}, 0).values()
                self._put_first(name, index, self._sparse.pop(name, {}).get(VALUES))
            return
        unit, elements = self._layout.unit(name), self._program.weights[name].elements
        for role in unit.roles if elements else ():
            self._count_received(self._of(unit), role.name, role.count(elements))

    def start(self, name: str, values: np.ndarray) -> None:
        """Accept a sparse weight, dense float32, and write the entries of its first mask.

        Raises:
            ConfigError: the mask would keep no entry, or more than the weight has room for.
        """
        index = self._masks.start(name, values)
        self._put_first(name, index, values[index.positions() - index.begin])

    def _put_first(self, name: str, index: PackedIndex, values: np.ndarray | None) -> None:
        """Write a sparse weight of which no entry was ever regrown; `values` may have more room."""
        unit = self._layout.unit(name)
        self._missing.discard(name)
        state = {r.name: _initial(r, length_of(index, r.group)) for r in unit.roles}
        entries = np.empty(0, np.float32) if values is None else values[: index.kept]
        self._put_sparse(unit, index, {VALUES: entries, **state})

    def copied(self) -> None:
        """Record that all masks were copied from another store, with their history."""
        self._is_copied = True
        self._missing.clear()

    def finish(self, step: int, updates: int | None = None) -> None:
        """Write what is still in memory; the state is that after `step` commits.

        **Arguments:** `updates` is the number of these that updated weights, if a shard may hold no
        sparse weight that says so.

        Raises:
            CorruptionError: the parts of a sparse weight do not belong together.
            ConfigError: a mask keeps more entries than its weight has room for.
            RuntimeError: a unit has arrived in part.
        """
        unfinished = [staged.unit.names[0] for staged in self._units.values()]
        if unfinished := [*unfinished, *self._missing.difference(self._written)]:
            raise RuntimeError(f"received only a part of {', '.join(unfinished[:5])}")
        if self._is_copied:
            self._require_history(step)
            self._version.masks.resume(self._masks, step)
            return
        kept = {name: written.get(VALUES, 0) for name, written in self._written.items()}
        for name, index in self._masks.restore(kept, step, updates).items():
            unit, arrays = self._layout.unit(name), self._sparse.pop(name, {})
            lengths = {VALUES: index.kept}
            for role in unit.roles:
                lengths[role.name] = length_of(index, role.group)
                got = self._written[name].get(role.name, 0)
                require_length(name, role.name, lengths[role.name], got)
            found = {role: _array(unit, arrays, role)[:n] for role, n in lengths.items()}
            self._put_sparse(unit, index, found)

    def _require_history(self, step: int) -> None:
        """Refuse a copied history that the journal could not be read with later."""
        history = self._version.masks.history
        if history is None:
            return
        lists = [[*numbers] for numbers in history.changes.values()]
        if not is_history(lists, history.updates, step):
            raise CorruptionError(
                f"the copied masks have a history of {history.updates} updates that is not one of "
                f"step {step}: expected rising numbers of updates, none above the step; do all "
                "nodes run the same version of Penstock with the same configuration?"
            )

    def _of(self, unit: Unit) -> _StagedUnit:
        return self._units.setdefault(unit.index, _StagedUnit(unit))

    def _count_received(self, staged: _StagedUnit, role: str, count: int) -> None:
        staged.missing[role] -= count
        if not any(staged.missing.values()):
            self._put_unit(staged.unit, staged.unit.blocks, staged.block)
            del self._units[staged.unit.index]

    def _write_sparse(self, name: str, role: str, begin: int, values: np.ndarray) -> None:
        self._written.setdefault(name, {})[role] = begin + values.size
        if role in (INDEX, CHANGES):
            self._masks.write(name, role, begin, values)
            return
        arrays = self._sparse.setdefault(name, {})
        if role not in arrays:
            kind = self._layout.unit(name).role(role)
            room = room_of(self._program.weights[name], kind.group)
            arrays[role] = allocate(room * kind.numpy.itemsize).view(kind.numpy)
        arrays[role] = with_room(arrays[role], begin + values.size)
        arrays[role][begin : begin + values.size] = values

    def _put_sparse(self, unit: Unit, index: PackedIndex, arrays: Mapping[str, np.ndarray]) -> None:
        """Write a sparse weight: its mask, the values of its entries, and their state."""
        self._version.masks.write(unit, index, self._put)
        begins = dict.fromkeys(arrays, 0)

        def packed(block: Block) -> tuple[np.ndarray, np.ndarray]:
            stream, state = _memory_of(unit, block)
            here = slice(block.begin, block.end)
            parts = weight_parts(unit, block, stream, state)
            encode(unit.format, unit.names[0], arrays[VALUES][here], parts)
            for role, values in state_roles(unit, block, state).items():
                begins[role] += values.size
                values[:] = arrays[role][begins[role] - values.size : begins[role]]
            return stream, state

        self._put_unit(unit, unit.blocks_of(index), packed)

    def _put_unit(
        self,
        unit: Unit,
        blocks: Sequence[Block],
        content: Callable[[Block], tuple[np.ndarray, np.ndarray]],
    ) -> None:
        """Write a complete unit to its next place; `content` returns a block's stream and state."""
        place = self._version.next_place(unit)
        checks: list[list[bytes]] = [[], []]
        # Blocks of a sparse weight end within pages, so all their streams are written together.
        whole = allocate(unit.used_stream_bytes(blocks)) if unit.is_sparse else None
        for block in blocks:
            stream, state = content(block)
            if whole is None:
                self._put(unit.stream_offset(place, block.begin), stream)
            else:
                begin = block.begin * unit.stream_width
                whole[begin : begin + stream.nbytes] = stream
            self._put(unit.state_offset(place, block), state)
            checks[0].append(checksum(stream))
            checks[1].append(checksum(state))
        if whole is not None:
            self._put(unit.stream_offset(place), whole)
        self._version.advance(unit, checks, blocks)


def _array(unit: Unit, arrays: Mapping[str, np.ndarray], role: str) -> np.ndarray:
    """Return the values of a role that have arrived; none may have, if the mask keeps nothing."""
    return arrays.get(role, np.empty(0, unit.role(role).numpy))


def _initial(role: Role, length: int) -> np.ndarray:
    """Return the state of entries of which none was ever regrown."""
    values = np.zeros(length, role.numpy)
    if role.name == AGE:
        values.fill(np.iinfo(role.numpy).max)
    return values


def _memory_of(unit: Unit, block: Block) -> tuple[np.ndarray, np.ndarray]:
    """Return memory for a block's stream and state."""
    return allocate(block.elements * unit.stream_width), allocate(block.state_bytes)


class _StagedUnit:
    """The values of a unit by role, and the number of values still missing."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        roles = (Role(MASTER, unit.format.saved_numpy), *unit.roles)
        self.values = {r.name: allocate(r.bytes(unit.elements)).view(r.numpy) for r in roles}
        self.missing = {r.name: sum(map(r.count, unit.sizes)) for r in roles}

    def block(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """Return a block's stream and state, uint8, in the layout of flash."""
        unit, here = self.unit, slice(block.begin, block.end)
        stream, state = _memory_of(unit, block)
        weight = weight_parts(unit, block, stream, state)
        encode_saved(unit.format, self.values[MASTER][here], weight)
        roles = state_roles(unit, block, state)
        for role in unit.roles:
            begin = block.begin // role.group
            values = roles[role.name]
            values[:] = self.values[role.name][begin : begin + values.size]
        return stream, state

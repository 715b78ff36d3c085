"""The optimizer's state of all trained weights, in memory: moments, and the ages of entries."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import CorruptionError
from penstock.kernels.moments import rounding_keys
from penstock.kernels.packed_moments import decode_packed, encode_moment_packed
from penstock.store.holding import Holding
from penstock.store.layout import allocate_role
from penstock.store.optimizers import is_signed, rounding_key, scale_of
from penstock.store.packed import length_of, with_room
from penstock.store.roles import AGE, Role, Stored

if TYPE_CHECKING:
    from penstock.sparsity import PackedIndex, Remap


class OptimizerState:
    """Flat arrays by weight and role. A sparse weight has a value per kept entry, or per group.

    Args:
        holding: the weights.
        trained: the weights with a state.
        roles: the optimizer's arrays.
        age: type of the ages of sparse weights' entries; None if there are none.
    """

    def __init__(
        self,
        holding: Holding,
        trained: Collection[str],
        roles: Sequence[Role],
        age: type[np.unsignedinteger] | None,
    ) -> None:
        self._specs = holding.weights
        sparse = [name for name in trained if holding.weights[name].is_sparse]
        self.memory_bytes: dict[str, int] = {}
        self._roles: dict[str, dict[str, Role]] = {name: {} for name in trained}
        self._room: dict[str, dict[str, np.ndarray]] = {name: {} for name in trained}
        ages = [] if age is None or not sparse else [Role(AGE, np.dtype(age).name)]
        for role, names in [*((r, trained) for r in roles), *((r, sparse) for r in ages)]:
            arrays, size = allocate_role(holding, dict.fromkeys(names, role.numpy), role.group)
            self.memory_bytes[role.name] = size
            for name, array in arrays.items():
                self._room[name][role.name] = array
                self._roles[name][role.name] = role
        self._arrays = {name: dict(room) for name, room in self._room.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def arrays(self, name: str) -> Mapping[str, np.ndarray]:
        """Return the state of a weight; none if it is not trained."""
        return self._arrays.get(name, {})

    def room(self, name: str, role: str) -> np.ndarray:
        """Return an array with all its room, during a restore."""
        return self._room[name][role]

    def stored(self, name: str) -> dict[str, Stored]:
        """Return the types and shapes of these arrays in a checkpoint."""
        spec = self._specs[name]
        return {
            role.name: Stored(role.torch, array.shape if spec.is_sparse else role.shape(spec.shape))
            for role, array in (
                (self._roles[name][each], array) for each, array in self.arrays(name).items()
            )
        }

    def write(self, name: str, role: str, begin: int, values: np.ndarray) -> None:
        """Overwrite values from `begin` on, during a restore."""
        end = begin + values.size
        if self._specs[name].is_sparse:
            self._require_room(name, role, end)
        self._room[name][role][begin:end] = values

    def clear(self, name: str) -> None:
        """Set the state of a weight to that of the start: no entry was ever regrown."""
        for role, array in self._room.get(name, {}).items():
            array.fill(np.iinfo(array.dtype).max if role == AGE else 0)

    def begin_ages(self, name: str) -> None:
        """Set the ages of a weight to those of the start."""
        if AGE in self.arrays(name):
            ages = self._room[name][AGE]
            ages.fill(np.iinfo(ages.dtype).max)

    def keep(self, name: str, index: PackedIndex) -> None:
        """Set the mask to which the state of a sparse weight belongs."""
        for role in self._room.get(name, {}):
            length = length_of(index, self._roles[name][role].group)
            self._require_room(name, role, length)
            self._arrays[name][role] = self._room[name][role][:length]

    def _require_room(self, name: str, role: str, length: int) -> None:
        """Make room for so many values; further ages are those of the start."""
        room = self._room[name][role]
        larger = with_room(room, length)
        if larger is not room:
            if role == AGE:
                larger[room.size :] = np.iinfo(room.dtype).max
            self._room[name][role] = larger
            self.memory_bytes[role] += larger.nbytes

    def require_written(self, name: str, written: Mapping[str, int]) -> None:
        """Check that a checkpoint had as many values of a sparse weight's state as its mask needs.

        **Arguments:** `written` is the number of values by role.

        Raises:
            CorruptionError: it had more or fewer.
        """
        for role, array in self.arrays(name).items():
            require_length(name, role, array.size, written.get(role, 0))

    def move(self, name: str, before: PackedIndex, remap: Remap, updates: int) -> None:
        """Move the state of a sparse weight to its places after a change of its mask
        (`move_state`)."""
        old = dict(self.arrays(name))
        self.keep(name, remap.index)
        move_state(name, old, self.arrays(name), before, remap, updates)


def move_state(
    name: str,
    old: Mapping[str, np.ndarray],
    new: Mapping[str, np.ndarray],
    before: PackedIndex,
    remap: Remap,
    updates: int,
) -> None:
    """Move the state of a sparse weight to its places after a change of its mask.

    Moments of grown entries are 0. 8-bit moments get new groups, so they are rounded again.

    Args:
        name: the weight.
        old, new: its state before and after, by role; may share memory role by role.
        before: the mask before the change.
        remap: the change.
        updates: number of the weight's updates, a seed of the rounding.
    """
    keys = rounding_keys(rounding_key(f"{name}/mask change"), updates)
    scales = {scale_of(role) for role in old}
    for role, array in new.items():
        if role == AGE:
            array[:] = remap.move_and_count(old[role], 1)
        elif scale_of(role) in old:
            coded, signed = (old[role], old[scale_of(role)]), is_signed(role)
            values = remap.move(decode_packed(coded, signed, before.entry_offsets))
            encode_moment_packed(
                values,
                (array, new[scale_of(role)]),
                signed,
                remap.index.entry_offsets,
                keys[0 if signed else 1],
                remap.index.begin,
            )
        elif role not in scales:
            array[:] = remap.move(old[role])


def require_length(name: str, role: str, expected: int, got: int) -> None:
    """Check that a checkpoint had as many values of a sparse weight's role as its mask needs.

    Raises:
        CorruptionError: it had more or fewer.
    """
    if got != expected:
        raise CorruptionError(
            f"{role} of {name}: its mask needs {expected} values, got {got}; use another checkpoint"
        )

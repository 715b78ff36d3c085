"""The masks of a store's sparse weights: what a commit decides about them, and what is saved.

Entries to drop are selected by the masters of the last commit, before the update of the step is
applied, so updates stay lazy: the pending update of a weight is the optimizer's update, unless the
mask change replaces it, followed by the change of its mask. Entries that are grown by dense
gradients are selected weight by weight as these gradients arrive, so that they are never held for
the whole model.

Ages are counted in updates, not in steps, because a step may change masks instead of weights.
`step` and `updates` are the numbers of committed steps and of those that update weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from penstock.errors import ConfigError, CorruptionError, NonFiniteError
from penstock.kernels.packed_entries import PackedEntries
from penstock.sparsity import (
    CountChange,
    MaskChange,
    MaskSize,
    MaskUpdate,
    PackedIndex,
    Remap,
    Selection,
    SparseWeight,
    apply_change,
    compact_bytes,
    empty_index,
    grown_entries,
    index_from_compact,
    require_exact,
    select,
    select_absent,
    updates_by_age,
)
from penstock.store.holding import Holding, home_stages
from penstock.store.interface import Decision
from penstock.store.mask_plan import MaskPlan
from penstock.store.mask_rule import MaskRule, mask_memory
from penstock.store.packed import dense_values
from penstock.store.roles import CHANGES, INDEX, Stored

Values = Callable[[str], np.ndarray]
"""Returns the float32 values of a sparse weight's entries."""


@dataclass(frozen=True)
class Growth:
    """Entries of a weight that are grown by the dense gradient, which is not held."""

    selection: Selection
    entries: PackedIndex


class Masks:
    """The masks of one store; empty if no weight is sparse.

    Args:
        holding: the weights.
        rule: decides the masks; None if the store neither loads dense weights nor trains.

    Attributes:
        memory_bytes: the most memory of masks and of their changes (`mask_memory`).
    """

    def __init__(self, holding: Holding, rule: MaskRule | None) -> None:
        self._specs = {name: spec for name, spec in holding.weights.items() if spec.is_sparse}
        self._rule = rule
        self.memory_bytes = mask_memory(holding, rule)
        self._trained = tuple(
            name
            for name in home_stages(holding)
            if name in self._specs and self._specs[name].trainable
        )
        self.step = self.updates = 0
        self._indices = {n: empty_index(w.elements, w.begin) for n, w in self._specs.items()}
        self._changes: dict[str, list[int]] = {name: [] for name in self._specs}
        self._plan = MaskPlan(self._specs, self._trained, rule)
        self._counts = dict.fromkeys(self._specs, 0)  # updates that were applied to each weight
        self._compact: tuple[str, np.ndarray] | None = None  # of one weight
        self._restored: dict[tuple[str, str], bytearray] = {}
        self._forget_plans()

    def _forget_plans(self) -> None:
        self._pending: dict[str, MaskChange] = {}
        self._decided: dict[str, Growth] = {}
        self._arrived: dict[str, Growth] = {}
        self._plan.begin()

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sparse weights."""
        return tuple(self._specs)

    def index(self, name: str) -> PackedIndex | None:
        """Return the mask of a weight; None if the weight is dense."""
        return self._indices.get(name)

    def kept(self, name: str) -> int:
        """Return the number of entries of a weight."""
        return self._indices[name].kept

    def changes(self, name: str) -> tuple[int, ...]:
        """Return the numbers of updates at the changes of a weight's mask."""
        return tuple(self._changes[name])

    @property
    def sizes(self) -> dict[str, MaskSize]:
        """The sizes of all masks after the changes that are decided, pending ones included."""
        return self._plan.sizes

    # --- one step ---------------------------------------------------------------------------------

    def needs_dense_gradient(self, name: str) -> bool:
        """Return whether the next step needs the gradients of a weight's absent entries too."""
        return self._plan.needs_dense_gradient(name, self.step + 1)

    def may_change(self, step: int) -> bool:
        """Return whether a step may change masks, of this store or of another shard."""
        return self._plan.may_change(step)

    def streamed(self, name: str, values: torch.Tensor) -> SparseWeight:
        """Return a sparse weight as engines get it, with the values of its entries."""
        return SparseWeight(
            name,
            self._specs[name].shape,
            values,
            self._indices[name],
            len(self._changes[name]),
            self.needs_dense_gradient(name),
        )

    def entries(self, name: str, ages: np.ndarray | None) -> PackedEntries:
        """Return what an optimizer needs to know of a weight's entries in the pending update."""
        offsets, changes = self._indices[name].entry_offsets, self._changes[name]
        if ages is None or not changes:
            return PackedEntries(offsets)
        by_age = updates_by_age(self.updates, changes, ages.dtype.type)
        return PackedEntries(offsets, ages, by_age[: int(np.iinfo(ages.dtype).max) + 1])

    def grow(self, name: str, dense_gradient: np.ndarray) -> None:
        """Select the entries that the next step grows by the dense gradient, which may then be
        freed.

        **Arguments:** `dense_gradient` is float32 `[elements]`, and finite.
        """
        update = self._plan.update_at(self.step + 1)
        changes = () if update is None else update.changes
        for change in (change for change in changes if change.weight == name):
            assert update is not None
            _, grow = update.selections(self._plan.seed, change)
            index = self._indices[name]
            if not grow.is_decided:
                grow = select_absent(grow.order, grow.key, grow.count, index, dense_gradient)
            entries = grown_entries(name, grow, index, dense_gradient)
            self._arrived[name] = Growth(grow, entries)

    def discard(self) -> None:
        """Forget what was selected since the last commit."""
        self._arrived.clear()

    def decide(self, decision: Decision, values: Values) -> Decision:
        """Return a decision with the mask changes of its step.

        Args:
            decision: on a step all of whose gradients have arrived.
            values: the masters of the last commit.

        Raises:
            ConfigError: a mask would keep no entry.
            NonFiniteError: the value of an entry is NaN or infinite.
        """
        update = self._plan.update_at(decision.step)
        if update is None:
            return decision
        changes = tuple(self._decided_change(update, change, values) for change in update.changes)
        return replace(decision, masks=changes, replaces_update=update.replaces_update)

    def _decided_change(
        self, update: MaskUpdate, change: CountChange, values: Values
    ) -> MaskChange:
        name = change.weight
        index = self._indices[name]
        drop, grow = update.selections(self._plan.seed, change)
        if not drop.is_decided:
            try:
                drop = select(drop.order, drop.key, drop.count, index, values(name))
            except NonFiniteError as error:
                raise NonFiniteError(f"mask of {name}: {error}") from error
        if name in self._arrived:
            grow = self._arrived[name].selection
        elif not grow.is_decided:
            grow = select_absent(grow.order, grow.key, grow.count, index)
        return MaskChange(name, index.kept, drop, grow)

    def accept(self, decision: Decision) -> None:
        """Make the changes of a decision pending.

        Raises:
            StorageError: they are not those that the policy makes of this step; nothing has
                changed.
        """
        self._plan.require(decision)
        self._pending = {change.weight: change for change in decision.masks}
        self._decided, self._arrived = self._arrived, {}
        self._plan.accept(decision)
        self.step = decision.step
        if not decision.replaces_update:
            self.updates += 1

    def remap(self, name: str, values: Values) -> Remap | None:
        """Return what the pending change of a mask does to its entries; None if there is none.

        **Arguments:** `values` are the masters by which the entries to drop were selected.
        """
        change = self._pending.get(name)
        if change is None:
            return None
        magnitudes = values(name) if change.drop.count else None
        growth = self._decided.get(name)
        grown = growth.entries if growth is not None else None
        remap = apply_change(change, self._indices[name], magnitudes, grown=grown)
        require_exact(change, [remap])
        return remap

    def is_changing(self, name: str) -> bool:
        """Return whether the pending update of a weight changes its mask."""
        return name in self._pending

    def updated(self, name: str) -> None:
        """Record that the pending update of a weight was applied."""
        self._counts[name] = self.updates

    def replace(self, name: str, remap: Remap) -> PackedIndex:
        """Make the pending change of a mask; return the mask before."""
        before, self._indices[name] = self._indices[name], remap.index
        self._changes[name].append(self.updates)
        self._compact = None
        del self._pending[name]
        self._decided.pop(name, None)
        return before

    # --- reading and restoring --------------------------------------------------------------------

    def dense(
        self, name: str, read: Callable[[str, int, int], np.ndarray], begin: int, end: int
    ) -> np.ndarray:
        """Return elements `begin` to `end` of a weight, float32; `read` returns values of
        entries."""
        return dense_values(self._indices[name], lambda b, e: read(name, b, e), begin, end)

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """Return what a checkpoint holds of a mask, by role."""
        compact = self._compact
        if compact is None or compact[0] != name:
            compact = name, np.frombuffer(compact_bytes(self._indices[name]), np.uint8)
            self._compact = compact
        arrays = {INDEX: compact[1]}
        if self._specs[name].trainable:
            arrays[CHANGES] = np.array([self._counts[name], *self._changes[name]], np.int64)
        return arrays

    def stored(self, name: str) -> dict[str, Stored]:
        """Return the types and shapes of these arrays."""
        types = {INDEX: torch.uint8, CHANGES: torch.int64}
        return {role: Stored(types[role], a.shape) for role, a in self.arrays(name).items()}

    def begin_restore(self) -> None:
        """Forget all that is pending; masks are set by `start` or `restore`."""
        self._forget_plans()
        self._restored.clear()
        self._compact = None

    def start(self, name: str, values: np.ndarray) -> PackedIndex:
        """Set and return the first mask of a weight.

        **Arguments:** `values` are those of the dense weight, float32 `[elements]`.

        Raises:
            ConfigError: the mask would keep no entry, or more than the weight has room for.
        """
        spec = self._specs[name]
        if self._rule is None:
            raise ValueError(f"{name}: a store needs a mask rule to load sparse weights")
        index = self._rule.initial(name, spec.shape, values)
        self._require_room(name, index)
        self._set(name, index, 0, [])
        return index

    def write(self, name: str, role: str, begin: int, values: np.ndarray) -> None:
        """Take a piece of what a checkpoint holds of a mask."""
        data, first = self._restored.setdefault((name, role), bytearray()), begin * values.itemsize
        data[first : first + values.nbytes] = values.tobytes()

    def restored(self, name: str, role: str) -> np.ndarray:
        """Return what was written of a mask, during a restore."""
        kind = np.uint8 if role == INDEX else np.int64
        return np.frombuffer(bytes(self._restored.get((name, role), b"")), kind)

    def restore(
        self, kept: Mapping[str, int], step: int, updates: int | None = None
    ) -> dict[str, PackedIndex]:
        """Set and return the masks that were written, with these numbers of entries, at step
        `step`.

        **Arguments:** `updates` is the number of steps that updated weights, where no sparse weight
        says so.

        Raises:
            CorruptionError: one is damaged.
            ConfigError: one keeps more entries than its weight has room for.
        """
        self.step = self.updates = step
        found, counts = {}, {}
        for name in (name for name in self._specs if name in kept):
            spec, data = self._specs[name], bytes(self._restored.pop((name, INDEX), b""))
            index = index_from_compact(data, spec.elements, kept[name], spec.begin)
            self._require_room(name, index)
            count, *changes = self._restored_counts(name, step) if spec.trainable else [step]
            counts[name] = count
            self._set(name, index, count, changes)
            found[name] = index
        trained = {counts[name] for name in self._trained if name in counts}
        if len(trained) > 1:
            raise CorruptionError(
                f"expected equally many updates of all sparse weights, got {sorted(trained)}; use "
                "another checkpoint"
            )
        unsaid = step if updates is None else updates
        self.updates = trained.pop() if trained else unsaid
        return found

    def resume(
        self,
        step: int,
        updates: int,
        indices: Mapping[str, PackedIndex],
        changes: Mapping[str, Sequence[int]],
    ) -> None:
        """Set the masks after step `step`, all of whose updates are applied.

        Args:
            step: number of committed steps.
            updates: number of those that updated weights.
            indices: all masks, by weight.
            changes: the numbers of updates at the changes of each mask.
        """
        self.step, self.updates = step, updates
        for name, index in indices.items():
            self._set(name, index, updates, list(changes[name]))

    def _restored_counts(self, name: str, step: int) -> list[int]:
        """The number of updates up to now, followed by those at the changes of a mask."""
        data = bytes(self._restored.pop((name, CHANGES), b""))
        numbers = np.frombuffer(data, np.int64).tolist() if len(data) % 8 == 0 else []
        in_order = [0, *numbers[1:], *numbers[:1], step]
        if not numbers or in_order != sorted(in_order):
            raise CorruptionError(
                f"{CHANGES} of {name}: expected numbers of updates from 0 to {step}, rising, got "
                f"{numbers[:5]}; use another checkpoint"
            )
        return numbers

    def _set(self, name: str, index: PackedIndex, updates: int, changes: list[int]) -> None:
        self._indices[name], self._plan.kept[name] = index, index.kept
        self._counts[name], self._changes[name] = updates, changes
        self._compact = None

    def _require_room(self, name: str, index: PackedIndex) -> None:
        require_room(name, index, self._specs[name].capacity)


def require_room(name: str, index: PackedIndex, capacity: int) -> None:
    """Check that a weight may keep as many entries as its mask does.

    **Raises:** `ConfigError` if it may not.
    """
    if index.kept > capacity:
        raise ConfigError(
            f"sparsity: the mask of {name} has {index.kept} entries, its capacity is {capacity}; "
            "use the sparsity with which the run was started"
        )

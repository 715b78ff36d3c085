"""All weights of a store in memory, with their optimizer state and their masks.

Nothing is pending here: `DramStore` applies updates before it reads. A sparse weight has memory for
its capacity, of which the entries that its mask keeps are in use.
"""

import math
from collections.abc import Collection, Iterable, Iterator

import numpy as np
import torch

from penstock.kernels.split_master import Weight
from penstock.sparsity import PackedIndex, Remap, StreamedWeight
from penstock.store.comparing import Rotation
from penstock.store.content_hash import hash_read
from penstock.store.holding import Holding, home_stages
from penstock.store.incoming import checked_weights
from penstock.store.layout import slabs_of
from penstock.store.mask_rule import MaskRule
from penstock.store.masters import Masters
from penstock.store.optimizer_state import OptimizerState
from penstock.store.optimizers import Optimizer
from penstock.store.part_masks import masks_of
from penstock.store.portions import Portions, SlabPortions
from penstock.store.roles import CHANGES, INDEX, MASTER, VALUES, Stored, holds_weight, stored_of
from penstock.store.sparse_portions import ContentPortions


class WeightMemory:
    """Masters, optimizer state and masks, by weight.

    Args:
        program: names the weights.
        trained: the weights with optimizer state.
        optimizer: says which state.
        rule: decides masks, if weights are sparse.
    """

    def __init__(
        self,
        program: Holding,
        trained: Collection[str],
        optimizer: Optimizer | None,
        rule: MaskRule | None,
    ) -> None:
        self._program = program
        self.masks = masks_of(program, rule)
        self.masters = Masters(program)
        if optimizer is None:
            self.state = OptimizerState(program, (), (), None)
        else:
            age = None if rule is None else rule.age_type(optimizer.corrected_betas)
            self.state = OptimizerState(program, trained, optimizer.roles, age)
        self.is_loaded = False
        self.state_is_zero = True
        self._written: dict[str, dict[str, int]] = {}
        self._has_first_state: set[str] = set()
        self._updates: int | None = None  # those of the content that is restored, if it says so
        self._has_rule = rule is not None

    @property
    def state_bytes(self) -> dict[str, int]:
        """The memory of optimizer state and masks, by use."""
        return {**self.state.memory_bytes, **self.masks.memory_bytes}

    # --- one step ---------------------------------------------------------------------------------

    def streamed(self, name: str) -> StreamedWeight:
        """Return a weight as engines get it: a view of its memory."""
        values = self.masters.stream(name)
        return self.masks.streamed(name, values) if name in self.masks else values

    def entries(self, name: str) -> np.ndarray:
        """Return the values of a sparse weight's entries, float32; maybe a view."""
        return self.masters.read(name, 0, self.masks.kept(name))

    def change_mask(self, name: str, remap: Remap) -> None:
        """Make the pending change of a mask: move the entries and their state."""
        before = self.masks.replace(name, remap)
        self.masters.move(name, remap)
        self.state.move(name, before, remap, self.masks.updates)

    # --- reading ----------------------------------------------------------------------------------

    def roles(self, name: str) -> dict[str, Stored]:
        """Return the arrays of a weight: its master, then its state; of a sparse weight, its
        entries, their state, and its mask."""
        spec, state = self._program.weights[name], self.state.stored(name)
        if name not in self.masks:
            return {**stored_of(spec, ()), **state}
        values = Stored(spec.format.saved_dtype, (self.masks.kept(name),))
        return {VALUES: values, **state, **self.masks.stored(name)}

    def read(self, name: str, role: str, begin: int, end: int) -> np.ndarray:
        """Return values `begin` to `end` of a weight or of its state, flat; maybe a view."""
        if role == MASTER and name in self.masks:
            return self.masks.dense(name, self.masters.read, begin, end)
        if holds_weight(role):
            return self.masters.read(name, begin, end)
        return self._array(name, role)[begin:end]

    def memory_of(self, name: str, role: str) -> Weight:
        """Return the memory of a weight or of its state, of which updates overwrite all but the
        mask."""
        return self.masters.weight(name) if holds_weight(role) else (self._array(name, role),)

    def _array(self, name: str, role: str) -> np.ndarray:
        arrays = self.masks.arrays(name) if role in (INDEX, CHANGES) else self.state.arrays(name)
        return arrays[role]

    def content_hash(self) -> str:
        """Return a hash of all weights (`content_hash.py`)."""
        shapes = {name: spec.shape for name, spec in self._program.weights.items()}
        return hash_read(shapes, self.masters.read, self.masks.index)

    def slabs(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the memory of all weights and their state, stage by stage, with descriptions."""
        by_stage: dict[int, list[str]] = {}
        for name, home in home_stages(self._program).items():
            by_stage.setdefault(home, []).append(name)
        for home, names in by_stage.items():
            stage = self._program.stages[home].name
            for slab in slabs_of(part for name in names for part in self.masters.weight(name)):
                yield f"the weights of stage {stage}", slab
            states = [self.state.arrays(name) for name in names]
            for slab in slabs_of(array for state in states for array in state.values()):
                yield f"the optimizer's state of stage {stage}", slab

    def portions(self, portion_bytes: int) -> Portions:
        """Return the whole content, in portions of at most so many bytes (`portions.py`)."""
        if self._has_rule:
            return ContentPortions(self, portion_bytes)
        return SlabPortions((slab for _, slab in self.slabs()), portion_bytes)

    def rotation(self, before: Rotation | None) -> Rotation:
        """Return the parts that replicas compare (`comparing.py`); those of `before`, unless they
        depend on masks."""
        if before is None or self._has_rule:
            return Rotation(self._contents() if self._has_rule else self.slabs())
        return before

    def _contents(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield everything that depends on masks, and the rest, with descriptions."""
        for name in self._program.weights:
            for part in self.masters.weight(name):
                yield f"the weight {name}", part.view(np.uint8)
            for array in self.state.arrays(name).values():
                yield f"the optimizer's state of {name}", array.view(np.uint8)
            index = self.masks.index(name)
            if index is not None:
                yield f"the mask of {name}", index.codes
                yield f"the mask of {name}", index.code_sizes.view(np.uint8)

    # --- being copied -----------------------------------------------------------------------------

    @property
    def weights(self) -> Collection[str]:
        """Names of the weights."""
        return self._program.weights

    @property
    def updates(self) -> int:
        """The number of steps that updated weights, of the present or of the restored content."""
        if self.is_loaded:
            return self.masks.updates
        return self._updates or 0

    def role_names(self, name: str) -> list[str]:
        """Return the names of a weight's arrays; none for another name."""
        return list(self.roles(name)) if name in self._program.weights else []

    def restored_size(self, name: str, role: str) -> int:
        """Return the number of values of an array; during a restore, of those that were written."""
        if not self.is_loaded:
            return self._written.get(name, {}).get(role, 0)
        return math.prod(self.roles(name)[role].shape)

    def read_restored(self, name: str, role: str, begin: int, end: int) -> np.ndarray:
        """Return values of an array; during a restore, of those that were written."""
        if self.is_loaded:
            return self.read(name, role, begin, end)
        if role in (INDEX, CHANGES):
            return self.masks.restored(name, role)[begin:end]
        if holds_weight(role):
            return self.masters.read_room(name, begin, end)
        return self.state.room(name, role)[begin:end]

    # --- loading and restoring --------------------------------------------------------------------

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill all weights, one at a time, after `begin_restore`; errors are those of
        `DramStore.load`."""
        for name, values in checked_weights(self._program, weights):
            self.clear_state(name)
            if name in self.masks:
                index = self.masks.start(name, values)
                self._keep(name, index)
                values = values[index.positions()]
            self.masters.write(name, 0, values)
        self.finish_restore(0)
        self.state_is_zero = True

    def begin_restore(self) -> None:
        """Make the content unusable until `finish_restore`."""
        self.is_loaded = False
        self.masks.begin_restore()
        self._written.clear()
        self._has_first_state.clear()
        self._updates = None

    def expect_updates(self, updates: int) -> None:
        """Set the number of steps that updated weights, during a restore."""
        self._updates = updates

    def write(self, name: str, role: str, begin: int, values: np.ndarray) -> None:
        """Overwrite values of a weight or of its state from `begin` on, during a restore."""
        self._written.setdefault(name, {})[role] = begin + values.size
        if role in (INDEX, CHANGES):
            self.masks.write(name, role, begin, values)
        elif holds_weight(role):
            self.masters.write(name, begin, values)
        else:
            self.state_is_zero = False
            self._has_first_state.discard(name)
            self.state.write(name, role, begin, values)

    def clear_state(self, name: str) -> None:
        """Set the optimizer state of a weight to that of the start, during a restore."""
        if not self.state_is_zero:  # zeroing again would only allocate untouched pages
            self.state.clear(name)
        self.state.begin_ages(name)
        self._has_first_state.add(name)

    def finish_restore(self, step: int, updates: int | None = None) -> None:
        """Make the content usable: the state after `step` commits. Arguments and errors are those
        of `DramStore.finish_restore`."""
        kept = {name: written.get(VALUES, 0) for name, written in self._written.items()}
        said = self._updates if updates is None else updates
        for name, index in self.masks.restore(kept, step, said).items():
            self._keep(name, index)
            if name not in self._has_first_state:
                self.state.require_written(name, self._written[name])
        self.is_loaded = True

    def _keep(self, name: str, index: PackedIndex) -> None:
        self.masters.keep(name, index.kept)
        self.state.keep(name, index)

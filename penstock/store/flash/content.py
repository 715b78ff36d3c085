"""The content of a flash store outside of steps: loading, restoring, copying and reading it.

Flash is read after all updates are written. What is written during a restore goes to places that no
record names, and counts when the caller seals it.
"""

from collections.abc import Iterable

import numpy as np
import torch
import xxhash

from penstock.sparsity import PackedIndex, StreamedWeight
from penstock.store.comparing import Compared
from penstock.store.flash.extent_writes import ExtentWrites
from penstock.store.flash.layout import FlashLayout
from penstock.store.flash.pipeline import Pipeline
from penstock.store.flash.portions import BlockPortions, MaskPortions
from penstock.store.flash.staging import Staging
from penstock.store.flash.stored_masks import MaskHistory
from penstock.store.flash.version import Version
from penstock.store.holding import Holding
from penstock.store.incoming import checked_weights
from penstock.store.masks import Masks
from penstock.store.masters import stream_of
from penstock.store.packed import length_of
from penstock.store.roles import CHANGES, INDEX, MASTER, VALUES, Stored, stored_of


class FlashContent:
    """Weights, optimizer state and masks on flash; called from one thread.

    Args:
        program: names the weights.
        layout: their units.
        version: the present places and checksums.
        writes: writes to the extents.
        pipeline: applies the pending updates.
        masks: those of the sparse weights.
        may_change_masks: whether steps may change masks, here or in other shards.
        is_loaded: whether a step is durable.
    """

    def __init__(
        self,
        program: Holding,
        layout: FlashLayout,
        version: Version,
        writes: ExtentWrites,
        pipeline: Pipeline,
        masks: Masks,
        *,
        may_change_masks: bool,
        is_loaded: bool,
    ) -> None:
        self._program, self._layout, self._version = program, layout, version
        self._writes, self._pipeline, self._masks = writes, pipeline, masks
        self._may_change_masks = may_change_masks
        self.is_loaded = is_loaded
        self._staging: Staging | None = None
        self._mask_checks: dict[str, tuple[int, bytes]] = {}  # after so many changes

    def require_loaded(self) -> None:
        """Raise an error unless the store holds all weights."""
        if not self.is_loaded:
            raise RuntimeError("the store holds no weights yet: load them, or restore a checkpoint")

    def settle(self) -> None:
        """Write all updates to flash, so that flash can be read."""
        self.require_loaded()
        self._pipeline.finish_pass()
        self._pipeline.write_out()
        self._pipeline.drain()

    # --- loading and restoring --------------------------------------------------------------------

    def begin_restore(self) -> None:
        """Discard everything; only after all updates."""
        self.is_loaded = False
        self._mask_checks.clear()
        self._masks.begin_restore()
        self._pipeline.drain()
        self._pipeline.forget()
        self._staging = Staging(
            self._program, self._layout, self._version, self._writes.put, self._masks
        )

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write all weights, one at a time; errors are those of `DramStore.load`."""
        staging = self._required_staging()
        for name, values in checked_weights(self._program, weights):
            if name in self._masks:
                staging.start(name, values)
                continue
            staging.clear_state(name)
            staging.write(name, MASTER, 0, values)

    def write(self, name: str, role: str, begin: int, values: np.ndarray) -> None:
        """Overwrite values of a weight or of its state; each value once."""
        self._required_staging().write(name, role, begin, values)

    def clear_state(self, name: str) -> None:
        """Leave the optimizer state of a weight at its initial zeros."""
        self._required_staging().clear_state(name)

    def finish(self, step: int, updates: int | None) -> None:
        """Write what is still in memory (`Staging.finish`); the content can be read then."""
        if self._staging is None:
            raise RuntimeError("received only a part of the weights")
        self._staging.finish(step, updates)
        self._staging = None
        self._pipeline.restored()
        self.is_loaded = True

    def _required_staging(self) -> Staging:
        if self._staging is None:
            raise RuntimeError("state is written only between begin_restore and finish_restore")
        return self._staging

    # --- copying and comparing --------------------------------------------------------------------

    def portions(self, portion_bytes: int) -> BlockPortions:
        """Return the whole content, in portions of at most so many bytes (`portions.py`)."""
        staging = self._staging
        if staging is None:
            self.settle()
        parts = self._layout, self._version, self._writes.put, portion_bytes
        if not self._may_change_masks:
            return BlockPortions(*parts)
        history = None
        if staging is None:
            names = self._masks.names
            changes = {name: self._masks.changes(name) for name in names}
            history = MaskHistory(self._masks.updates, changes)

        def received() -> None:
            assert staging is not None
            staging.copied()

        return BlockPortions(*parts, MaskPortions(*parts, history=history, received=received))

    def compared(self) -> Compared:
        """Return checksums of the whole content as of the last update (`comparing.py`)."""
        found = self._pipeline.compared()
        if self._masks.names:
            masks = xxhash.xxh3_64()
            for name in self._masks.names:
                masks.update(self._mask_check(name))
            found.append(("the masks of sparse weights", masks.hexdigest()))
        return found

    def _mask_check(self, name: str) -> bytes:
        """Return the checksum of a mask; computed once after each of its changes."""
        changes = len(self._masks.changes(name))
        if name not in self._mask_checks or self._mask_checks[name][0] != changes:
            index = self._masks.index(name)
            assert index is not None
            check = xxhash.xxh3_64(index.codes.data)
            check.update(index.code_sizes.view(np.uint8).data)
            self._mask_checks[name] = changes, check.digest()
        return self._mask_checks[name][1]

    # --- reading ----------------------------------------------------------------------------------

    def view(self, name: str, frame: np.ndarray) -> StreamedWeight:
        """Return a weight as engines get it: a view of the memory of its unit."""
        spec, unit = self._program.weights[name], self._layout.unit(name)
        begin = self._layout.begin_of(name) * unit.stream_width
        count = self._masks.kept(name) if spec.is_sparse else spec.elements
        part = frame[begin : begin + count * unit.stream_width]
        values = stream_of(part.view(unit.format.stream.dtype), spec)
        return self._masks.streamed(name, values) if spec.is_sparse else values

    def read(self, name: str, role: str, begin: int, end: int) -> np.ndarray:
        """Return values `begin` to `end` of a weight or of its state, flat."""
        self.settle()
        if role in (INDEX, CHANGES):
            return self._masks.arrays(name)[role][begin:end]
        return self._version.read(name, role, begin, end)

    def roles(self, name: str) -> dict[str, Stored]:
        """Return the arrays of a weight that `read` and `write` accept (`DramStore.roles`)."""
        spec, roles = self._program.weights[name], self._layout.unit(name).roles
        index = self.mask(name) if self.is_loaded else self._masks.index(name)
        if index is None:
            return stored_of(spec, roles)
        state = {r.name: Stored(r.torch, (length_of(index, r.group),)) for r in roles}
        values = Stored(spec.format.saved_dtype, (index.kept,))
        return {VALUES: values, **state, **self._masks.stored(name)}

    def mask(self, name: str) -> PackedIndex | None:
        """Return the mask of a weight, after any pending update; None if the weight is dense."""
        self.require_loaded()
        if self._masks.is_changing(name):
            self._pipeline.finish_pass()
        return self._masks.index(name)

    def content_hash(self) -> str:
        """Return a hash of all weights (`content_hash.py`)."""
        self.settle()
        return self._version.content_hash()

"""What is written to the extents of a flash store, and how a step becomes durable."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.io import failpoints
from penstock.sparsity import PackedIndex
from penstock.store import files
from penstock.store.flash.journal import Journal
from penstock.store.flash.layout import Block, Unit
from penstock.store.flash.medium import ExtentFile
from penstock.store.flash.stored_masks import MaskHistory
from penstock.store.flash.version import Version


class ExtentWrites:
    """Writes parts of units to their next places; used by one thread at a time.

    **Arguments:** `keep_steps` is the number of durable steps that the journal keeps.
    """

    def __init__(
        self, file: ExtentFile, version: Version, journal: Journal, keep_steps: int
    ) -> None:
        self._file, self._version, self._journal = file, version, journal
        self._keep = keep_steps
        self.path = file.path

    def put(self, offset: int, data: np.ndarray) -> None:
        """Write to the extents, from any thread."""
        with files.storage_errors(self._file.path.parent, data.nbytes):
            self._file.write(offset, data)

    def state(self, unit: Unit, block: Block, data: np.ndarray) -> int:
        """Write the state of a block, or of all blocks from this one on; return the bytes."""
        failpoints.point("flash.before_block")
        self.put(unit.state_offset(self._version.next_place(unit), block), data)
        return data.nbytes

    def weights(self, unit: Unit, blocks: Sequence[Block], frame: np.ndarray) -> int:
        """Write the streamed values of a unit; return the bytes."""
        failpoints.point("flash.before_weights")
        used = frame[: unit.used_stream_bytes(blocks)]
        self.put(unit.stream_offset(self._version.next_place(unit)), used)
        return used.nbytes

    def mask(self, unit: Unit, index: PackedIndex) -> int:
        """Write the mask of a sparse weight; return the bytes."""
        failpoints.point("flash.before_mask")
        return self._version.masks.write(unit, index, self.put)

    def seal(self, step: int, extra: Mapping[str, Any], history: MaskHistory | None) -> int:
        """Make a step durable: sync its extents, then append the record that names them.

        Returns 0: no extent is written.
        """
        failpoints.point("flash.before_sync")
        record = self._version.record(step, extra, history)
        with files.storage_errors(self._file.path.parent, len(record.blob)):
            self._file.sync()
            failpoints.point("flash.after_sync")
            self._journal.append(record, self._keep)
        return 0

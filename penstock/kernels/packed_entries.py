"""The place of a sparse weight's entries in the dense weight, as the optimizers need it.

Only the kept entries of a sparse weight exist, one after the other. What is computed per granule or
per group of a weight (sums of squares, scales of 8-bit moments) begins anew in every dense granule,
so that the parts of a weight have the bits of the whole, and a full mask those of a dense weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.kernels.arguments import require_flat


@dataclass(frozen=True, eq=False)
class PackedEntries:
    """The entries of a sparse weight in an update.

    Attributes:
        offsets: int64 `[granules + 1]`, the number of kept entries before each dense granule.
        ages: uint8, uint16 or uint32 `[kept]`, for each entry its place in `updates`, which stops
            at the last one; None if all entries are equally old.
        updates: int64 `[ages]`, for each age the number of this update of such an entry, from 1.
    """

    offsets: np.ndarray
    ages: np.ndarray | None = None
    updates: np.ndarray | None = None

    def check(self, kept: int) -> None:
        """Reject arrays that do not describe a weight of `kept` entries.

        Raises:
            ValueError: naming the array, the expected and the actual value.
        """
        require_flat("entry offsets", self.offsets, self.offsets.size, np.int64)
        if not self.offsets.size or self.offsets[-1] != kept:
            found = self.offsets[-1] if self.offsets.size else "none"
            raise ValueError(f"entry offsets: expected {kept} as the last one, got {found}")
        if self.ages is not None:
            require_flat("ages", self.ages, kept, np.uint8, np.uint16, np.uint32)
            if self.updates is None or not self.updates.size or self.updates.min() < 1:
                raise ValueError(
                    f"numbers of updates by age: expected 1 or more for every age, got "
                    f"{self.updates}"
                )
            require_flat("numbers of updates by age", self.updates, self.updates.size, np.int64)


def group_offsets(entry_offsets: np.ndarray, group: int) -> np.ndarray:
    """Return int64 `[granules + 1]`: the number of groups before each dense granule.

    **Arguments:** `entry_offsets` are those of a mask; `group` is the greatest number of entries in
    a group.
    """
    offsets = np.zeros(entry_offsets.size, np.int64)
    np.cumsum((np.diff(entry_offsets) + group - 1) // group, out=offsets[1:])
    return offsets


def max_groups(kept: int, elements: int, group: int, granule: int) -> int:
    """Return the greatest number of groups that a mask of `kept` of `elements` entries can have."""
    first = min(kept, -(-elements // granule))
    return min(first + (kept - first) // group, -(-elements // group))

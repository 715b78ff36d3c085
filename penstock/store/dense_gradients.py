"""Dense gradients of sparse weights, in a step that grows entries by them.

The gradient of a weight that several stages use arrives in parts. Only such a weight's dense
gradient is held, until its last part has arrived.
"""

from collections.abc import Mapping

import numpy as np


class DenseGradients:
    """The dense gradients that have not arrived completely.

    **Arguments:** `uses` is the number of stages that use each weight.
    """

    def __init__(self, uses: Mapping[str, int]) -> None:
        self._uses = uses
        self._arrived: dict[str, int] = {}
        self._sums: dict[str, np.ndarray] = {}

    def add(self, name: str, part: np.ndarray | None) -> np.ndarray | None:
        """Take one part of a gradient, float32 `[elements]`, or None for a part without gradient.

        Returns:
            The sum of all parts, if this was the last one and any had a gradient; may be `part`.
        """
        count = self._arrived[name] = self._arrived.get(name, 0) + 1
        before = self._sums.pop(name, None)
        total = part if before is None else before
        if before is not None and part is not None:
            np.add(before, part, out=before)
        if count == self._uses[name]:
            return total
        if total is not None:
            self._sums[name] = total.copy() if total is part else total
        return None

    def clear(self) -> None:
        """Discard the arrivals since the last commit."""
        self._arrived.clear()
        self._sums.clear()

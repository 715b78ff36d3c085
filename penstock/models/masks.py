"""Keeps masks out of the graph if attention is purely causal.

`transformers` omits the [1, 1, tokens, tokens] mask and lets the attention kernel apply causality
(`is_causal=True`, which is faster and avoids the mask's traffic). It does not do so during an
export, because a graph for any length could not guarantee the result. Penstock exports at one fixed
length, so this reason does not apply. Sliding windows, padding masks and other patterns still get
their mask.

Outside an export, `transformers` also checks whether `position_ids` count several sequences in a
row, and separates these sequences. A graph cannot check this. Positions that the model counts
itself are the same in every batch, and are checked while the graph is created. Positions that
depend on the batch always get the mask of packed sequences, which equals the causal mask if a row
contains one sequence.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from penstock.models.traced_constants import constant_value

Finder = Callable[[torch.Tensor], torch.Tensor | None]


def _not_exporting() -> bool:
    return False


def _find_packed_sequences(find: Finder, position_ids: torch.Tensor) -> torch.Tensor | None:
    """Return the number of each token's sequence in its row; None: every row is one sequence."""
    constant = constant_value(position_ids)
    if constant is not None and bool((np.diff(constant, axis=-1) == 1).all()):
        return None
    return find(position_ids)


@contextmanager
def fixed_shape_masks() -> Iterator[None]:
    """Within the body, `transformers` selects masks as outside an export."""
    from transformers import masking_utils

    find = masking_utils.find_packed_sequence_indices
    replacements: dict[str, Any] = {
        "is_torchdynamo_exporting": _not_exporting,
        "find_packed_sequence_indices": partial(_find_packed_sequences, find),
    }
    originals = {name: getattr(masking_utils, name) for name in replacements}
    for name, replacement in replacements.items():
        setattr(masking_utils, name, replacement)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(masking_utils, name, original)

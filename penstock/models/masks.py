"""Keep masks out of the graph where attention is simply causal.

`transformers` skips the [1, 1, tokens, tokens] mask and lets the attention kernel do the causal
part (`is_causal=True`, faster and without the mask's traffic), but not while exporting: a graph for
any length could not promise it. Ours are exported at one fixed length, so this reason to hold back
is void. Sliding windows, padding masks and other patterns still get their mask.

Outside of an export `transformers` also looks whether `position_ids` count several sequences in a
row, and keeps these apart. A graph cannot look. Positions that the model counts itself are the same
in every batch, and are looked at while the graph is made. Positions that depend on the batch always
get the mask of packed sequences, which is the causal one where a row holds one sequence.
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
    """Within the body, `transformers` decides about masks as it does outside of an export."""
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

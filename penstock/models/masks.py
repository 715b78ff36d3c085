"""Keep masks out of the graph where attention is simply causal.

`transformers` skips the [1, 1, tokens, tokens] mask and lets the attention kernel do the causal
part (`is_causal=True`, faster and without the mask's traffic), but not while exporting: a graph for
any length could not promise it. Ours are exported at one fixed length, with position ids that the
model counts itself, so both reasons to hold back are void. Sliding windows, padding masks and other
patterns still get their mask.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def _not_exporting() -> bool:
    return False


def _no_packed_sequences(position_ids: Any) -> None:
    return None


_REPLACEMENTS = {
    "is_torchdynamo_exporting": _not_exporting,
    "find_packed_sequence_indices": _no_packed_sequences,
}


@contextmanager
def fixed_shape_masks() -> Iterator[None]:
    """Within the body, `transformers` decides about masks as it does outside of an export.

    Only for models called without `position_ids`: those of a packed sequence would be ignored.
    """
    from transformers import masking_utils

    originals = {
        name: getattr(masking_utils, name) for name in _REPLACEMENTS if hasattr(masking_utils, name)
    }
    for name in originals:
        setattr(masking_utils, name, _REPLACEMENTS[name])
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(masking_utils, name, original)

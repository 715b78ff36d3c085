"""Activations between their two layouts: `[tokens, features]` and panels of tokens.

Panels are `[panel][feature][token]`, where a panel has a fixed number of tokens. The last panel is
filled with zeros. Squares of 16 tokens are transposed in registers; what is left at the ends of
tokens and features goes element by element.
"""

import numpy as np
from numba import prange

from penstock.kernels.arguments import require_flat
from penstock.kernels.compilation import inlined, kernel
from penstock.kernels.sparse_shuffles import (
    transpose_floats,
    transpose_to_features,
    transpose_to_tokens,
)
from penstock.kernels.vectors import LANES

_STRIPE = 256  # features of a unit of work


@inlined
def _works(tokens, features, panel_tokens):
    """The number of units of work: stripes of features of a panel."""
    stripes = (features + _STRIPE - 1) // _STRIPE
    return stripes * ((tokens + panel_tokens - 1) // panel_tokens)


@inlined
def _stripe(work, panel_tokens, tokens, features):
    """The panel, the features and the tokens of a unit of work."""
    stripes = (features + _STRIPE - 1) // _STRIPE
    panel = work // stripes
    first = work % stripes * _STRIPE
    token = panel * panel_tokens
    return panel, first, min(first + _STRIPE, features), token, min(token + panel_tokens, tokens)


@inlined
def _pack(square, size, work, source, panels, tokens, features, panel_tokens):
    panel, first, last, token, end = _stripe(work, panel_tokens, tokens, features)
    # The place of token t of a feature is `base + feature * panel_tokens + t`.
    base = panel * features * panel_tokens - token
    whole = first + (last - first) // size * size
    squares = token + (end - token) // LANES * LANES
    for t in range(token, squares, LANES):
        for f in range(first, whole, size):
            at = base + f * panel_tokens + t
            square(source, t * features + f, features, panels, at, panel_tokens)
    for f in range(first, last):
        for t in range(squares if f < whole else token, end):
            panels[base + f * panel_tokens + t] = source[t * features + f]
        for t in range(end, token + panel_tokens):
            panels[base + f * panel_tokens + t] = 0


@inlined
def _unpack(square, size, work, panels, target, tokens, features, panel_tokens):
    panel, first, last, token, end = _stripe(work, panel_tokens, tokens, features)
    base = panel * features * panel_tokens - token
    whole = first + (last - first) // size * size
    squares = token + (end - token) // LANES * LANES
    for t in range(token, squares, LANES):
        for f in range(first, whole, size):
            at = base + f * panel_tokens + t
            square(panels, at, panel_tokens, target, t * features + f, features)
    for t in range(token, end):
        for f in range(whole if t < squares else first, last):
            target[t * features + f] = panels[base + f * panel_tokens + t]


@inlined
def _square_of_floats(source, at, stride, target, target_at, target_stride):
    transpose_floats(source, at, stride, target, target_at, target_stride)


@inlined
def _square_to_features(source, at, stride, target, target_at, target_stride):
    transpose_to_features(source, at, stride, target, target_at, target_stride)


@inlined
def _square_to_tokens(source, at, stride, target, target_at, target_stride):
    transpose_to_tokens(source, at, stride, target, target_at, target_stride)


@kernel
def _pack_floats(source, panels, tokens, features, panel_tokens):
    for work in prange(_works(tokens, features, panel_tokens)):
        _pack(_square_of_floats, LANES, work, source, panels, tokens, features, panel_tokens)


@kernel
def _pack_shorts(source, panels, tokens, features, panel_tokens):
    for work in prange(_works(tokens, features, panel_tokens)):
        _pack(_square_to_features, 2 * LANES, work, source, panels, tokens, features, panel_tokens)


@kernel
def _unpack_floats(panels, target, tokens, features, panel_tokens):
    for work in prange(_works(tokens, features, panel_tokens)):
        _unpack(_square_of_floats, LANES, work, panels, target, tokens, features, panel_tokens)


@kernel
def _unpack_shorts(panels, target, tokens, features, panel_tokens):
    for work in prange(_works(tokens, features, panel_tokens)):
        _unpack(_square_to_tokens, 2 * LANES, work, panels, target, tokens, features, panel_tokens)


def panel_count(tokens: int, panel_tokens: int) -> int:
    """Return how many panels of `panel_tokens` hold `tokens`."""
    return -(-tokens // panel_tokens)


def pack(source: np.ndarray, panels: np.ndarray, shape: tuple[int, int], panel_tokens: int) -> None:
    """Write activations into panels.

    Args:
        source: float32, or uint16 for bfloat16 patterns, `[tokens * features]`.
        panels: the same type, `[panels * features * panel_tokens]`; tokens that fill the last
            panel become 0.
        shape: tokens and features.
        panel_tokens: a multiple of 16.

    Raises:
        ValueError: an array has another type, length or layout.
    """
    _require(source, panels, shape, panel_tokens)
    _require_writeable("panels", panels)
    run = _pack_floats if source.dtype == np.float32 else _pack_shorts
    run(source, panels, *shape, panel_tokens)


def unpack(
    panels: np.ndarray, target: np.ndarray, shape: tuple[int, int], panel_tokens: int
) -> None:
    """Write panels into activations: the inverse of `pack`, with its arguments and errors."""
    _require(target, panels, shape, panel_tokens)
    _require_writeable("activations", target)
    run = _unpack_floats if target.dtype == np.float32 else _unpack_shorts
    run(panels, target, *shape, panel_tokens)


def _require(
    activations: np.ndarray, panels: np.ndarray, shape: tuple[int, int], panel_tokens: int
) -> None:
    tokens, features = shape
    if panel_tokens <= 0 or panel_tokens % LANES:
        raise ValueError(f"panel_tokens: expected a multiple of {LANES}, got {panel_tokens}")
    length = panel_count(tokens, panel_tokens) * features * panel_tokens
    require_flat("activations", activations, tokens * features, np.float32, np.uint16)
    require_flat("panels", panels, length, activations.dtype.type)


def _require_writeable(name: str, array: np.ndarray) -> None:
    if not array.flags.writeable:
        raise ValueError(f"{name}: expected memory that can be written, got a read-only array")

"""Activations between their two layouts: `[tokens, features]` and panels of tokens.

A panel has a fixed number of tokens of all features, feature after feature: `[feature][token]`.
Tokens that fill the last panel are 0. Squares of 16 tokens are transposed in registers; what is
left at the ends of tokens and features goes element by element. Packing prefetches the lines of
later squares, since 16 rows are more streams than the hardware prefetcher follows.
"""

from penstock.kernels.compilation import inlined
from penstock.kernels.transposition import (
    fetch_square,
    transpose_floats,
    transpose_to_features,
    transpose_to_tokens,
)
from penstock.kernels.vectors import LANES

_SQUARES_AHEAD = 4  # on Zen 5, 2 is as good; 8 and 16 are worse
STRIPE = 256
"""Features that a thread packs at once where threads share a panel."""


@inlined
def _pack(square, size, x, sizes, panels, at, panel_tokens, first, last):
    features, token, end = sizes
    # The place of token t of a feature is `base + feature * panel_tokens + t`.
    base = at - token
    whole = first + (last - first) // size * size
    squares = token + (end - token) // LANES * LANES
    for t in range(token, squares, LANES):
        for f in range(first, whole, size):
            place = base + f * panel_tokens + t
            later = f + _SQUARES_AHEAD * size
            if later < whole:
                fetch_square(x, t * features + later, features)
            else:  # of the next 16 tokens
                fetch_square(x, (t + LANES) * features + first + later - whole, features)
            square(x, t * features + f, features, panels, place, panel_tokens)
    for f in range(first, last):
        for t in range(squares if f < whole else token, end):
            panels[base + f * panel_tokens + t] = x[t * features + f]
        for t in range(end, token + panel_tokens):
            panels[base + f * panel_tokens + t] = 0


@inlined
def _unpack(square, size, panels, at, panel_tokens, x, sizes, first, last):
    features, token, end = sizes
    base = at - first * panel_tokens - token
    whole = first + (last - first) // size * size
    squares = token + (end - token) // LANES * LANES
    for t in range(token, squares, LANES):
        for f in range(first, whole, size):
            place = base + f * panel_tokens + t
            square(panels, place, panel_tokens, x, t * features + f, features)
    for t in range(token, end):
        for f in range(whole if t < squares else first, last):
            x[t * features + f] = panels[base + f * panel_tokens + t]


@inlined
def _square_of_floats(source, at, stride, target, target_at, target_stride):
    transpose_floats(source, at, stride, target, target_at, target_stride)


@inlined
def _square_to_features(source, at, stride, target, target_at, target_stride):
    transpose_to_features(source, at, stride, target, target_at, target_stride)


@inlined
def _square_to_tokens(source, at, stride, target, target_at, target_stride):
    transpose_to_tokens(source, at, stride, target, target_at, target_stride)


@inlined
def pack_floats(x, sizes, panels, at, panel_tokens, first, last):
    """Write features of a panel's tokens into the panel that begins at `at`.

    `x`: activations, flat; `sizes`: their features, the panel's first token and the end of its
    tokens; `first`, `last`: the features that are written.
    """
    _pack(_square_of_floats, LANES, x, sizes, panels, at, panel_tokens, first, last)


@inlined
def pack_shorts(x, sizes, panels, at, panel_tokens, first, last):
    """The same for bfloat16 patterns (uint16)."""
    _pack(_square_to_features, 2 * LANES, x, sizes, panels, at, panel_tokens, first, last)


@inlined
def unpack_floats(panels, at, panel_tokens, x, sizes, first, last):
    """Write a band of features, which begins at `at` in panels, into the activations of its tokens.

    Arguments as in `pack_floats`.
    """
    _unpack(_square_of_floats, LANES, panels, at, panel_tokens, x, sizes, first, last)


@inlined
def unpack_shorts(panels, at, panel_tokens, x, sizes, first, last):
    """The same for bfloat16 patterns (uint16)."""
    _unpack(_square_to_tokens, 2 * LANES, panels, at, panel_tokens, x, sizes, first, last)

"""Masks of sparse weights, drawn at random."""

import numpy as np


def drawn_mask(shape: tuple[int, int], sparsity: float, spread: float, seed: int = 0) -> np.ndarray:
    """Return a mask, booleans [outputs, inputs], whose input features differ in their entries.

    Args:
        spread: deviation of the logarithm of a feature's share of entries; 0 for equal shares.
    """
    random = np.random.default_rng(seed)
    shares = np.exp(spread * random.standard_normal(shape[1]))
    shares = np.minimum(1.0, shares * (1 - sparsity) / shares.mean())
    return random.random(shape) < shares

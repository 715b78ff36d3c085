"""Check that all initial weights are finite."""

import torch

from penstock.errors import ConfigError

_PIECE = 2 << 20  # elements that are checked at once


def refuse_non_finite(weight: torch.Tensor, where: str, advice: str) -> None:
    """Raise `ConfigError` if a weight contains NaN or infinity.

    `where` names the weight and its source; `advice` is the next action for the user.
    """
    if not weight.is_floating_point():
        return
    pieces = weight.reshape(-1).split(_PIECE)
    bad = sum(piece.numel() - int(torch.isfinite(piece).sum()) for piece in pieces)
    if bad:
        raise ConfigError(
            f"{where}: {bad:,} of its {weight.numel():,} values are NaN or infinite, and no run "
            f"can start from them; {advice}"
        )

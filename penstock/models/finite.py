"""Initial weights are finite numbers, or the run does not begin."""

import torch

from penstock.errors import ConfigError

_PIECE = 2 << 20  # elements that are looked at in one go


def refuse_non_finite(weight: torch.Tensor, where: str, advice: str) -> None:
    """Raise `ConfigError` if a weight holds NaN or infinity.

    `where` names the weight and where it comes from, `advice` says what to do.
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

"""Division of a step's rows into micro-batches."""

from collections.abc import Mapping

import torch

Rows = Mapping[str, torch.Tensor]


def micro_batches(rows: Rows, count: int) -> list[dict[str, torch.Tensor]]:
    """Divide rows into so many micro-batches."""
    return [
        dict(zip(rows, cut, strict=True))
        for cut in zip(*(value.chunk(count) for value in rows.values()), strict=True)
    ]

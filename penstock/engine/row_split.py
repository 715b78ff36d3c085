"""Division of a step's rows into micro-batches."""

from collections.abc import Mapping

import torch

Rows = Mapping[str, torch.Tensor]


def micro_batches(rows: Rows, count: int) -> list[dict[str, torch.Tensor]]:
    """Divide rows into so many micro-batches, each with the fields of the rows."""
    cuts = {name: value.chunk(count) for name, value in rows.items()}
    return [{name: cut[number] for name, cut in cuts.items()} for number in range(count)]

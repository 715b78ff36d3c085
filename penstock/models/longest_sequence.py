"""The longest sequence that a model of `transformers` takes.

RoBERTa and its descendants number positions from `padding_idx + 1` on, and their table of positions
has `max_position_embeddings` rows in all: a sequence is shorter by `padding_idx + 1` tokens. Other
models number from 0, or have rows for their offset besides (OPT, BART).
"""

from typing import Any

from torch import nn


def longest_sequence(module: nn.Module, config: Any) -> int | None:
    """Return the most tokens of a sequence; None if the configuration has no limit.

    Args:
        module: the model, perhaps on fake tensors.
        config: its configuration of `transformers`, or None.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None:
        return None
    unused = (
        int(table.padding_idx) + 1
        for name, table in module.named_modules()
        if "position" in name.rpartition(".")[2] and _has_row_of_padding(table, positions)
    )
    return positions - max(unused, default=0)


def _has_row_of_padding(table: Any, positions: int) -> bool:
    """Return whether one of exactly `positions` rows is that of padding.

    The type is not compared: I-BERT's table is no `nn.Embedding`.
    """
    weight, padding = getattr(table, "weight", None), getattr(table, "padding_idx", None)
    return padding is not None and weight is not None and weight.shape[0] == positions

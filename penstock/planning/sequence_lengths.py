"""The number of tokens in a sequence of a run, as training and plans of it choose it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.models import ModelSource

if TYPE_CHECKING:
    from penstock.data import TokenDataset


def awaits_records(config: Config) -> bool:
    """Tell whether the length of a run's sequences depends on records that are not built yet."""
    data = config.data
    return (
        data.sequence_length is None and data.content == "records" and not config.data_dir.exists()
    )


def shown_length(config: Config, source: ModelSource) -> int:
    """Return the tokens per sequence of training, as far as they are known before it.

    They are the most that the model takes if `awaits_records`, and 1 if nothing limits them.

    **Raises:** `DataError`, `CorruptionError` if the folder of the data set has none, or a damaged
    one.
    """
    if config.data.sequence_length is None and config.data_dir.exists():
        from penstock.data import TokenDataset

        dataset = TokenDataset.open(config.data_dir)
        if dataset.content == "records":
            return sequence_length(config, source, dataset)
    return config.data.sequence_length or source.max_sequence_length or 1


def sequence_length(
    config: Config, source: ModelSource, dataset: TokenDataset | None = None
) -> int:
    """Return the tokens per sequence: as configured, or the model's maximum.

    For records, at most the length of the longest record, since the rest of every row would be
    padding.

    **Raises:** `ConfigError` if neither is known.
    """
    length = config.data.sequence_length or source.max_sequence_length
    if not config.data.sequence_length and dataset is not None and dataset.content == "records":
        longest = max(dataset.records(split).longest() for split in dataset.splits)
        return longest if length is None else min(longest, length)
    if length is None:
        if source.task == "custom":
            return 1
        raise ConfigError(
            f"data.sequence_length: {source.name} defines no maximum length of a sequence; set "
            "this key"
        )
    return length

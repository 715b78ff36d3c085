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


def built_dataset(config: Config) -> TokenDataset | None:
    """Return the built data set of a run that configures no length; None if there is none.

    **Raises:** `DataError`, `CorruptionError` if the folder of the data set has none, or a damaged
    one.
    """
    if config.data.sequence_length is not None or not config.data_dir.exists():
        return None
    from penstock.data import TokenDataset

    return TokenDataset.open(config.data_dir)


def shown_length(config: Config, source: ModelSource) -> int:
    """Return the tokens per sequence of training, as far as they are known before it.

    They are the most that the model takes if `awaits_records`, and 1 if nothing limits them.

    **Raises:** as `built_dataset`.
    """
    return _longest(config, source, built_dataset(config)) or 1


def sequence_length(
    config: Config, source: ModelSource, dataset: TokenDataset | None = None
) -> int:
    """Return the tokens per sequence: as configured, or the model's maximum.

    For records, at most the length of the longest record, since the rest of every row would be
    padding.

    **Raises:** `ConfigError` if neither is known.
    """
    length = _longest(config, source, dataset)
    if length is not None:
        return length
    if source.task == "custom":
        return 1
    raise ConfigError(
        f"data.sequence_length: {source.name} defines no maximum length of a sequence; set this key"
    )


def _longest(config: Config, source: ModelSource, dataset: TokenDataset | None) -> int | None:
    """Return the length that configuration, model and records allow; None if none limits it."""
    if config.data.sequence_length:
        return config.data.sequence_length
    limits = [] if source.max_sequence_length is None else [source.max_sequence_length]
    if dataset is not None and dataset.content == "records":
        limits.append(max(dataset.records(split).longest() for split in dataset.splits))
    return min(limits, default=None)

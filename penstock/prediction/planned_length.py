"""The tokens per sequence of a planned run: those of its data set, if that is built."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.models import ModelSource
from penstock.planning import awaits_records, built_dataset, sequence_length


@dataclass(frozen=True)
class PlannedLength:
    """The tokens per sequence of a plan.

    Attributes:
        tokens: per sequence; 1 for a model without a sequence.
        note: why training may take fewer, and what to do; None if training takes as many.
    """

    tokens: int
    note: str | None = None


def planned_length(config: Config, source: ModelSource) -> PlannedLength:
    """Return the tokens per sequence of training, or the most that they can be.

    Raises:
        ConfigError: the length is not known before the data set is built, and has no limit.
        DataError, CorruptionError: the folder of the data set has none, or a damaged one.
    """
    if awaits_records(config):
        return _longest_possible(config, source)
    return PlannedLength(sequence_length(config, source, built_dataset(config)))


def _longest_possible(config: Config, source: ModelSource) -> PlannedLength:
    """Return the longest sequence of the model, for records that are not built yet."""
    folder, tokens = config.data_dir, source.max_sequence_length
    unknown = f"the longest record is not known before the data set {folder} is built"
    advice = f"set this key, or build the data set first (`penstock data build ... --out {folder}`)"
    if tokens is None:
        raise ConfigError(
            f"data.sequence_length: {unknown}, and {source.name} defines no maximum length of a "
            f"sequence; {advice}"
        )
    return PlannedLength(
        tokens,
        f"data.sequence_length: {unknown}; planned for {tokens:,} tokens, the longest sequence of "
        f"{source.name}; {advice}",
    )


def most_tokens(tokens: int) -> str:
    """Return the sentence of a page whose sequences may be longer than those of training."""
    return (
        f"This is for sequences of {tokens:,} tokens, the most that the model takes: the longest "
        "record is not known before the data set is built."
    )

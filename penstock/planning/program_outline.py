"""The outline of a configuration's program: its stages, weights, values and costs, to be shown."""

from __future__ import annotations

from typing import Any

from penstock.config import Config
from penstock.models import ModelSource
from penstock.planning.model_sources import source_of
from penstock.planning.program_cache import OutlinedModels
from penstock.planning.selected_weights import kept_as_bfloat16, sparse_weights_of
from penstock.planning.sequence_lengths import shown_length
from penstock.program import Program


def outline_program(
    config: Config, *, micro_batch: int, sequence_length: int | None, precision: str
) -> Program:
    """Return the program of a model, perhaps without its graphs and executables.

    **Arguments:** `sequence_length` None is that of the run (`shown_length`).
    """
    models = OutlinedModels(_source_of, _compile)
    source = models.model(config)
    sparse = sparse_weights_of(config, source)
    return models.program(
        source,
        micro_batch=micro_batch,
        length=sequence_length or shown_length(config, source),
        precision="bf16" if precision == "bf16" else "fp32",
        train=config.train,
        freeze=config.freeze,
        bfloat16=kept_as_bfloat16(config, source),
        sparse=sparse.capacities if sparse is not None else None,
        with_buffers=False,
    )


def _source_of(config: Config) -> ModelSource:
    return source_of(config, None, False, notice=lambda text: None)


def _compile(source: ModelSource, **options: Any) -> Program:
    from penstock.planning import builders  # which imports all that traces

    return builders.compile_source(source, **options)

"""What a user should know of a run before its first step, in sentences: nothing here is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import few
from penstock.models import ModelSource, parts_in_eval_mode
from penstock.program import Program


def cautions(source: ModelSource, program: Program) -> Iterator[str]:
    """Yield what may not be what the author of a model meant."""
    yield from _trained_in_eval_mode(source, program)


def _trained_in_eval_mode(source: ModelSource, program: Program) -> Iterator[str]:
    trained = {n for w in program.weights.values() if w.trainable for n in (w.name, *w.aliases)}
    paths = [path.removeprefix(source.weight_prefix) for path in parts_in_eval_mode(source.module)]
    parts = [path for path in paths if any(name.startswith(f"{path}.") for name in trained)]
    if parts:
        yield (
            f"{few(parts)}: in eval mode when the model was handed over, and trained so, without "
            "dropout; to train in train mode, call .train() on the whole model before"
        )

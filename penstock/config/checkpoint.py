"""`checkpoint`: when the run is saved and what is kept."""

from __future__ import annotations

from penstock.config.section import Section, setting


class CheckpointConfig(Section):
    """Saving; the end of a run and a requested stop always save."""

    every: int | None = setting(
        500, "steps between checkpoints; null: only at the end", unit="steps", example=500, ge=1
    )
    keep_last: int = setting(2, "newest checkpoints to keep", unit="checkpoints", ge=1)
    best: bool = setting(
        True, "also keep the checkpoint with the least held-out loss, if there are evaluations"
    )

"""`evaluation`: the loss on held-out text, while training."""

from __future__ import annotations

from pydantic import model_validator

from penstock.config.section import Section, refuse, setting


class EvaluationConfig(Section):
    """When to evaluate, on how much, and when to give up."""

    every: int | None = setting(
        200,
        "steps between evaluations, besides the one after the last step; null: none",
        unit="steps",
        example=200,
        ge=1,
    )
    batches: int = setting(
        8, "batches of batch.size held-out sequences per evaluation", unit="batches", ge=1, le=10**9
    )
    early_stop_patience: int | None = setting(
        None,
        "evaluations without a better loss after which the run stops; null: never",
        unit="evaluations",
        example=5,
        ge=1,
    )

    @model_validator(mode="after")
    def _patience_needs_evaluations(self) -> EvaluationConfig:
        if self.early_stop_patience is not None and self.every is None:
            raise refuse(
                "early_stop_patience",
                f"expected null without evaluations, got {self.early_stop_patience}; "
                "set evaluation.every",
            )
        return self

"""Figures of GPT models by the formulas of Narayanan et al. 2021 (arXiv:2104.04473, equations 2 and
3) and Korthikanti et al. 2022 (arXiv:2205.05198, equation 1)."""

from __future__ import annotations

from penstock.prediction import ModelFigures


def gpt(
    layers: int,
    width: int,
    heads: int,
    batch: int,
    *,
    length: int = 2048,
    vocabulary: int = 51200,
    kept_scores: bool = True,
) -> ModelFigures:
    """Return the figures of a GPT in 16 bits; `kept_scores`: attention keeps its scores."""
    layer = 12 * width * width + 13 * width
    head = 2.0 * vocabulary * width
    forward = layers * (24.0 * width * width + 4.0 * length * width) + head
    scores = 5.0 * heads * length if kept_scores else 0.0
    return ModelFigures(
        parameters=layers * layer + (vocabulary + length) * width,
        trainable_parameters=layers * layer + (vocabulary + length) * width,
        layer_parameters=layer,
        stages=layers,
        heads=heads,
        forward_flops_per_token=forward,
        backward_flops_per_token=2 * forward,
        saved_bytes_per_token=layers * (34.0 * width + scores),
        boundary_bytes_per_token=2.0 * width,
        batch_tokens=batch * length,
        sequence_length=length,
        head_flops_per_token=head,
    )


def flops_of_step(layers: int, width: int, batch: int) -> float:
    """Return equation 3 of Narayanan et al. 2021: FLOPs of a step with recomputation."""
    length, vocabulary = 2048, 51200
    rest = 1 + length / (6 * width) + vocabulary / (16 * layers * width)
    return 96.0 * batch * length * layers * width * width * rest

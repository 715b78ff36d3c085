"""The figures of a model on which its division among GPUs depends, from its program."""

from collections import Counter

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.prediction.gpu_cluster import ModelFigures
from penstock.program import Program


def figures_of(
    program: Program, config: Config, micro_batch: int, sequence_length: int, heads: int
) -> ModelFigures:
    """Return the figures of a compiled model.

    The layers are the stages of the most frequent kind. What the stages before them compute counts
    as part of the first, what the stages behind them compute as the head.

    Args:
        program: of the model.
        config: of the run.
        micro_batch: samples for which the program was compiled.
        sequence_length: tokens of a sample.
        heads: attention heads, which tensor parallelism divides.

    Raises:
        ConfigError: no two stages are equal.
    """
    tokens = micro_batch * sequence_length
    digest, count = Counter(stage.kind.digest for stage in program.stages).most_common(1)[0]
    if count < 2:
        raise ConfigError(
            f"{program.name} has no two equal stages, so no pipeline of GPUs can divide it"
        )
    layers = [stage for stage in program.stages if stage.kind.digest == digest]
    behind = [stage for stage in program.stages if stage.index > layers[-1].index]
    boundary = sum(program.values[name].bytes for name in layers[0].outputs)
    saved = sum(stage.kind.saved_bytes for stage in layers) + count * boundary
    return ModelFigures(
        parameters=program.parameters,
        trainable_parameters=program.trainable_parameters,
        layer_parameters=sum(program.weights[name].elements for name in layers[0].weights),
        stages=count,
        heads=heads,
        forward_flops_per_token=sum(s.kind.forward_flops for s in program.stages) / tokens,
        backward_flops_per_token=sum(s.kind.backward_flops for s in program.stages) / tokens,
        saved_bytes_per_token=saved / tokens,
        boundary_bytes_per_token=boundary / tokens,
        batch_tokens=config.batch.size * sequence_length,
        sequence_length=sequence_length,
        head_flops_per_token=sum(stage.kind.forward_flops for stage in behind) / tokens,
        dtype="bfloat16" if config.precision == "bf16" else "float32",
    )

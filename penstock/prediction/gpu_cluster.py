"""Time and memory of a training step on a conventional GPU cluster.

The model is divided among GPUs by data, tensor and pipeline parallelism, with ZeRO and activation
recomputation. The formulas come from

- Narayanan et al. 2021 (arXiv:2104.04473): pipeline bubble, all-reduces of tensor parallelism,
  transfers between pipeline stages;
- Korthikanti et al. 2022 (arXiv:2205.05198): memory of activations, sequence parallelism;
- Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054): memory and traffic of the ZeRO stages;
- Thakur et al. 2005 (Int. J. High Perform. Comput. Appl. 19(1)): time of ring collectives.

The cluster is at its best here: no straggler, no failure, no load on data, and gradients of data
parallelism overlap with backward.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from penstock.errors import ConfigError, few
from penstock.machines import GpuCluster, ValueType

SECONDS_PER_DAY = 86400.0

_STATE_BYTES: dict[str, tuple[int, int, int]] = {"bfloat16": (2, 2, 12), "float32": (4, 4, 8)}
"""Bytes of weight, gradient and optimizer state per parameter: the 16 bytes of ZeRO section 3.1.

16-bit weights have a float32 copy among the optimizer state.
"""

_REPLICATED_BYTES = 5.0
"""Activations that tensor parallelism alone keeps whole: 10sbh bytes of a layer whose boundary has
2sbh (Korthikanti et al. 2022, equation 2)."""

_FORWARD_TRAFFIC, _BACKWARD_TRAFFIC = 2.0, 3.0
"""How often the bytes of saved activations pass memory besides the products: forward writes each
tensor and reads it once, backward reads it, and writes and reads its gradient. An assumption."""


@dataclass(frozen=True)
class ModelFigures:
    """What the division of a model among GPUs depends on.

    **Arguments:** `stages` is the number of equal stages between which a pipeline can be cut (the
    layers of a transformer), `layer_parameters` the parameters of the largest; embedding and head
    are the rest of `parameters`, and belong to the first and the last stage. The FLOPs are those of
    one token in the whole model, `head_flops_per_token` the part of forward that only the last
    stage computes. `saved_bytes_per_token` is what all stages keep for backward without
    recomputation, `boundary_bytes_per_token` what one stage hands to the next.

    Raises:
        ConfigError: a figure that no model has.
    """

    parameters: int
    trainable_parameters: int
    layer_parameters: int
    stages: int
    heads: int
    forward_flops_per_token: float
    backward_flops_per_token: float
    saved_bytes_per_token: float
    boundary_bytes_per_token: float
    batch_tokens: int
    sequence_length: int
    head_flops_per_token: float = 0.0
    dtype: ValueType = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("parameters", "trainable_parameters", "layer_parameters", "stages", "heads"):
            _expect_from_one(name, getattr(self, name))
        for name in ("batch_tokens", "sequence_length"):
            _expect_from_one(name, getattr(self, name))
        for name in (
            "forward_flops_per_token",
            "backward_flops_per_token",
            "saved_bytes_per_token",
            "boundary_bytes_per_token",
        ):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name}: expected a number above 0, got {value:g}")
        for name in ("trainable_parameters", "layer_parameters"):
            value = getattr(self, name)
            if value > self.parameters:
                raise ConfigError(
                    f"{name}: expected at most the {self.parameters} parameters of the model, "
                    f"got {value}"
                )
        if not 0 <= self.head_flops_per_token <= self.forward_flops_per_token:
            raise ConfigError(
                "head_flops_per_token: expected a number from 0 to forward_flops_per_token "
                f"({self.forward_flops_per_token:g}), got {self.head_flops_per_token:g}"
            )
        if self.batch_tokens % self.sequence_length:
            raise ConfigError(
                f"batch_tokens: expected a multiple of sequence_length ({self.sequence_length}), "
                f"got {self.batch_tokens}"
            )
        if self.dtype not in _STATE_BYTES:
            raise ConfigError(
                f"dtype: expected one of {', '.join(_STATE_BYTES)}, got {self.dtype!r}"
            )

    @cached_property
    def sequences(self) -> int:
        """Sequences of a batch."""
        return self.batch_tokens // self.sequence_length


@dataclass(frozen=True, order=True)
class Degrees:
    """How a model is divided among GPUs.

    **Arguments:** `micro_batch` counts sequences; `chunks` is the number of separate parts of the
    pipeline that one GPU has (interleaved schedule); `zero` is the ZeRO stage: 0 shares nothing, 1
    the optimizer state, 2 also gradients, 3 also weights; `recompute` keeps only the input of each
    stage for backward; `sequence_parallel` also shares what tensor parallelism alone keeps whole.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    micro_batch: int = 1
    chunks: int = 1
    zero: int = 0
    recompute: bool = False
    sequence_parallel: bool = True

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self.data * self.tensor * self.pipeline


@dataclass(frozen=True)
class Division:
    """A division with the predicted time of its step and the memory of its fullest GPU.

    `step_seconds` is the sum of `compute_seconds`, `exposed_seconds` (communication that nothing
    hides), `bubble_seconds` (waiting for the pipeline to fill and drain) and `update_seconds` (the
    optimizer).
    """

    degrees: Degrees
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    bubble_seconds: float
    update_seconds: float
    memory_bytes: float
    limit_bytes: int

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self.degrees.gpus

    @property
    def fits(self) -> bool:
        """Whether the fullest GPU has enough memory."""
        return self.memory_bytes <= self.limit_bytes

    @property
    def bubble(self) -> float:
        """The share of a step that a GPU waits for the pipeline."""
        return self.bubble_seconds / self.step_seconds

    def days(self, figures: ModelFigures, total_tokens: float) -> float:
        """Return the days that training on a number of tokens takes."""
        return total_tokens / figures.batch_tokens * self.step_seconds / SECONDS_PER_DAY


def divide(
    figures: ModelFigures,
    cluster: GpuCluster,
    degrees: Degrees,
    *,
    tensor_across_nodes: bool = False,
) -> Division:
    """Return the predicted step and memory of a division, whether or not it fits.

    Raises:
        ConfigError: degrees that do not divide the model, its batch or the cluster's nodes.
    """
    _check(figures, cluster, degrees, tensor_across_nodes)
    return predict(figures, cluster, degrees)


def predict(figures: ModelFigures, cluster: GpuCluster, degrees: Degrees) -> Division:
    """Do the same as `divide` for degrees that are known to be valid."""
    sequences = figures.sequences // degrees.data
    micro_batches = sequences // degrees.micro_batch
    forward, backward = _compute_seconds(figures, cluster, degrees)
    each, once = _data_parallel_seconds(figures, cluster, degrees, forward, backward)
    each += _tensor_seconds(figures, cluster, degrees)
    each += _transfer_seconds(figures, cluster, degrees)
    slot = forward + backward + each
    # Narayanan et al. 2021, section 2.2.2: the bubble is (p - 1) / v micro-batches long.
    bubble = (degrees.pipeline - 1) / degrees.chunks * slot
    compute = micro_batches * (forward + backward)
    exposed = micro_batches * each + once
    update = _update_seconds(figures, cluster, degrees)
    return Division(
        degrees=degrees,
        step_seconds=compute + exposed + bubble + update,
        compute_seconds=compute,
        exposed_seconds=exposed,
        bubble_seconds=bubble,
        update_seconds=update,
        memory_bytes=memory_bytes(figures, degrees),
        limit_bytes=cluster.gpu.memory - cluster.gpu.reserved,
    )


def least_compute_seconds(
    figures: ModelFigures, cluster: GpuCluster, data: int, tensor: int, pipeline: int
) -> float:
    """Return the time for which the slowest GPU multiplies matrices in a step, whatever else a
    division does: a lower bound of the step's time."""
    flops = _stage_flops(figures, tensor, pipeline)
    rate = cluster.gpu.product_flops[figures.dtype]
    return figures.batch_tokens // data * sum(flops) / rate


def memory_bytes(figures: ModelFigures, degrees: Degrees) -> float:
    """Return the memory of the fullest GPU: weights, gradients, optimizer state, activations.

    The state follows ZeRO section 5, the activations Korthikanti et al. 2022, sections 4 and 5. A
    GPU that gathers weights (ZeRO 3), or reduces gradients by parts (ZeRO 2), holds two stages and
    one stage of them.
    """
    weight, gradient, optimizer = _STATE_BYTES[figures.dtype]
    local = _local_parameters(figures, degrees)
    trained = local * figures.trainable_parameters / figures.parameters
    layer = figures.layer_parameters / degrees.tensor
    weights, gradients = weight * local, gradient * trained
    if degrees.zero >= 3:
        weights = min(weights, weights / degrees.data + 2 * weight * layer)
    if degrees.zero >= 2:
        gradients = min(gradients, gradients / degrees.data + gradient * layer)
    moments = optimizer * trained / (degrees.data if degrees.zero >= 1 else 1)
    return weights + gradients + moments + _activation_bytes(figures, degrees)


def _activation_bytes(figures: ModelFigures, degrees: Degrees) -> float:
    """The first stage of the pipeline holds the activations of `pipeline` micro-batches; more with
    an interleaved schedule (Korthikanti et al. 2022, section 4.2.3)."""
    pipeline, chunks = degrees.pipeline, degrees.chunks
    micro_batches = figures.sequences // degrees.data // degrees.micro_batch
    held = float(min(pipeline, micro_batches))
    if chunks > 1:
        held = pipeline + (pipeline - 1) / chunks
    whole = _kept_bytes(figures, degrees)
    if not degrees.recompute:
        return held * whole / pipeline
    shared = degrees.tensor if degrees.sequence_parallel else 1
    tokens = degrees.micro_batch * figures.sequence_length
    inputs = figures.boundary_bytes_per_token * tokens * figures.stages / shared
    return held * inputs / pipeline + whole / figures.stages


def _kept_bytes(figures: ModelFigures, degrees: Degrees) -> float:
    """Bytes that a micro-batch saves for backward in all stages, on one GPU of each tensor group
    (Korthikanti et al. 2022, equations 2 and 4)."""
    saved, tensor = figures.saved_bytes_per_token, degrees.tensor
    whole = 0.0
    if not degrees.sequence_parallel:
        whole = min(saved, _REPLICATED_BYTES * figures.boundary_bytes_per_token * figures.stages)
    tokens = degrees.micro_batch * figures.sequence_length
    return (whole + (saved - whole) / tensor) * tokens


def _local_parameters(figures: ModelFigures, degrees: Degrees) -> float:
    """Parameters of the fullest GPU; with a pipeline, embedding and head count whole, since both
    can be one table that the first and the last stage hold."""
    if degrees.pipeline == 1:
        return figures.parameters / degrees.tensor
    equal = figures.stages * figures.layer_parameters
    rest = max(0, figures.parameters - equal)
    return min(figures.parameters, equal / degrees.pipeline + rest) / degrees.tensor


def _stage_flops(figures: ModelFigures, tensor: int, pipeline: int) -> tuple[float, float]:
    """FLOPs per token, forward and backward, of the GPU that computes most: the last stage."""
    head = figures.head_flops_per_token / figures.forward_flops_per_token
    share = ((1 - head) / pipeline + head) / tensor
    return figures.forward_flops_per_token * share, figures.backward_flops_per_token * share


def _compute_seconds(
    figures: ModelFigures, cluster: GpuCluster, degrees: Degrees
) -> tuple[float, float]:
    """Time of a micro-batch on the slowest GPU, forward and backward with recomputation.

    Products take the time of their FLOPs, or of reading their weights where that is longer; all
    other operators take the time of the memory traffic of the activations.
    """
    tokens = degrees.micro_batch * figures.sequence_length
    rate = cluster.gpu.product_flops[figures.dtype]
    memory = cluster.gpu.memory_rate.attained
    weights = _STATE_BYTES[figures.dtype][0] * _local_parameters(figures, degrees) / memory
    traffic = _kept_bytes(figures, degrees) / degrees.pipeline / memory
    ahead, back = _stage_flops(figures, degrees.tensor, degrees.pipeline)
    forward = max(ahead * tokens / rate, weights) + _FORWARD_TRAFFIC * traffic
    backward = max(back * tokens / rate, weights) + _BACKWARD_TRAFFIC * traffic
    if degrees.recompute:  # of the stages; the head's output is not dropped
        stages = figures.forward_flops_per_token - figures.head_flops_per_token
        again = stages / degrees.pipeline / degrees.tensor
        backward += max(again * tokens / rate, weights) + _FORWARD_TRAFFIC * traffic
    return forward, backward


def _tensor_seconds(figures: ModelFigures, cluster: GpuCluster, degrees: Degrees) -> float:
    """Two all-reduces of a stage's output per pass, of each stage and micro-batch (Narayanan et al.
    2021, section 3.2); nothing hides them. Sequence parallelism moves the same bytes (Korthikanti
    et al. 2022, section 4.2.2)."""
    passes = 3 if degrees.recompute else 2
    tokens = degrees.micro_batch * figures.sequence_length
    one = _ring_seconds(cluster, degrees.tensor, 1, figures.boundary_bytes_per_token * tokens)
    return figures.stages / degrees.pipeline * passes * 2 * 2 * one


def _transfer_seconds(figures: ModelFigures, cluster: GpuCluster, degrees: Degrees) -> float:
    """Transfers between the parts of the pipeline per micro-batch, each GPU of a tensor group
    sending its share (Narayanan et al. 2021, section 4.1)."""
    if degrees.pipeline == 1:
        return 0.0
    link = cluster.node if degrees.gpus <= cluster.node.gpus else cluster.network
    tokens = degrees.micro_batch * figures.sequence_length
    share = figures.boundary_bytes_per_token * tokens / degrees.tensor
    return 2 * degrees.chunks * (share / link.link.attained + link.seconds)


def _data_parallel_seconds(
    figures: ModelFigures,
    cluster: GpuCluster,
    degrees: Degrees,
    forward: float,
    backward: float,
) -> tuple[float, float]:
    """Return the exposed time of weights and gradients, per micro-batch and once per step.

    ZeRO section 7: an all-reduce moves a weight twice, ZeRO 1 and 2 as much (gradients reduced to
    their owners, weights gathered after the update), ZeRO 3 half as much again. ZeRO 2 and 3 keep
    no whole gradient, so that they reduce per micro-batch. The traffic overlaps with the pass to
    which it belongs; only weights that are gathered after the update wait.
    """
    if degrees.data == 1:
        return 0.0, 0.0
    weight, gradient, _ = _STATE_BYTES[figures.dtype]
    local = _local_parameters(figures, degrees)
    trained = local * figures.trainable_parameters / figures.parameters
    messages = figures.stages / degrees.pipeline
    group = (cluster, degrees.data, degrees.tensor)
    reduce = _ring_seconds(*group, gradient * trained, messages)
    if degrees.zero == 0:
        return 0.0, max(0.0, 2 * reduce - backward)
    if degrees.zero == 3:
        gather = _ring_seconds(*group, weight * local, messages)
        return max(0.0, gather - forward) + max(0.0, gather + reduce - backward), 0.0
    gather = _ring_seconds(*group, weight * trained, messages)
    exposed = max(0.0, reduce - backward)
    return (exposed, gather) if degrees.zero == 2 else (0.0, exposed + gather)


def _ring_seconds(
    cluster: GpuCluster, size: int, stride: int, vector_bytes: float, messages: float = 1
) -> float:
    """Time of an all-gather or reduce-scatter by rings (Thakur et al. 2005); an all-reduce is one
    of each.

    **Arguments:** every `stride`-th GPU belongs to the group, `size` in all. Rings run through all
    its GPUs of a node and leave the node by the adapters of each.
    """
    if size == 1:
        return 0.0
    inside = min(size, max(1, cluster.node.gpus // stride))
    nodes = -(-size // inside)
    link = network = 0.0
    if inside > 1:
        link = (size - 1) / size * vector_bytes / cluster.node.link.attained
    if nodes > 1:
        network = (nodes - 1) / nodes * vector_bytes / (inside * cluster.network.link.attained)
    latency = (inside - 1) * cluster.node.seconds + (nodes - 1) * cluster.network.seconds
    return max(link, network) + messages * latency


def _update_seconds(figures: ModelFigures, cluster: GpuCluster, degrees: Degrees) -> float:
    """The optimizer reads a gradient and its state, and writes its state and the weight."""
    weight, gradient, optimizer = _STATE_BYTES[figures.dtype]
    trained = _local_parameters(figures, degrees)
    trained *= figures.trainable_parameters / figures.parameters
    if degrees.zero >= 1:
        trained /= degrees.data
    return trained * (gradient + 2 * optimizer + weight) / cluster.gpu.memory_rate.attained


def check_cluster(figures: ModelFigures, cluster: GpuCluster) -> None:
    """Raise `ConfigError` for a cluster whose GPUs have no rate for the model's type."""
    if figures.dtype not in cluster.gpu.product_flops:
        raise ConfigError(
            f"gpu.products: expected a rate of {figures.dtype}, got "
            f"{few(sorted(cluster.gpu.product_flops))}; add one to cluster {cluster.name}"
        )


def check_gpus(cluster: GpuCluster, gpus: int) -> None:
    """Raise `ConfigError` for a number of GPUs that the cluster cannot have."""
    _expect_from_one("gpus", gpus)
    if cluster.most is not None and gpus > cluster.most:
        raise ConfigError(
            f"gpus: expected at most the {cluster.most} of cluster {cluster.name}, got {gpus}"
        )


def _check(
    figures: ModelFigures, cluster: GpuCluster, degrees: Degrees, tensor_across_nodes: bool
) -> None:
    check_cluster(figures, cluster)
    for name in ("data", "tensor", "pipeline", "micro_batch", "chunks"):
        _expect_from_one(name, getattr(degrees, name))
    if degrees.zero not in range(4):
        raise ConfigError(f"zero: expected a stage from 0 to 3, got {degrees.zero}")
    check_gpus(cluster, degrees.gpus)
    _expect_divisor("data", degrees.data, figures.sequences, "sequences of the batch")
    share = figures.sequences // degrees.data
    _expect_divisor(
        "micro_batch", degrees.micro_batch, share, "sequences that each data-parallel replica has"
    )
    _expect_divisor("tensor", degrees.tensor, figures.heads, "attention heads")
    _expect_divisor("pipeline", degrees.pipeline, figures.stages, "stages of the model")
    per_gpu = figures.stages // degrees.pipeline
    _expect_divisor("chunks", degrees.chunks, per_gpu, "stages that each GPU has")
    micro_batches = share // degrees.micro_batch
    if degrees.chunks > 1 and (degrees.pipeline == 1 or micro_batches % degrees.pipeline):
        raise ConfigError(
            "chunks: expected 1 where the number of micro-batches is no multiple of the pipeline's "
            f"degree, or the degree is 1; got {degrees.chunks} with {micro_batches} micro-batches "
            f"and a degree of {degrees.pipeline}"
        )
    if not aligned(cluster, degrees.tensor, tensor_across_nodes):
        raise ConfigError(
            f"tensor: expected a divisor of the {cluster.node.gpus} GPUs of a node"
            f"{', or a multiple' if tensor_across_nodes else ''}, got {degrees.tensor}"
            f"{'' if tensor_across_nodes else '; or allow tensor_across_nodes'}"
        )


def aligned(cluster: GpuCluster, tensor: int, tensor_across_nodes: bool) -> bool:
    """Return whether tensor groups fill nodes without remainder."""
    node = cluster.node.gpus
    return node % tensor == 0 or (tensor_across_nodes and tensor % node == 0)


def _expect_from_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name}: expected a number from 1 up, got {value}")


def _expect_divisor(name: str, value: int, whole: int, what: str) -> None:
    if whole % value:
        raise ConfigError(f"{name}: expected a divisor of the {whole} {what}, got {value}")

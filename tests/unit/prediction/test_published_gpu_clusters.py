"""The model of a GPU cluster against published runs.

Of the A100 cluster one figure is fitted: the efficiency of products, to one layer (the first test).
Every other row here is a prediction. The model has no stragglers, data loading, logging or launches
of kernels, so that it is expected to be somewhat too fast, and each tolerance says how much.
"""

from __future__ import annotations

import pytest
from gpt_figures import flops_of_step, gpt

from penstock.machines import load_gpu_cluster
from penstock.prediction import Degrees, Division, ModelFigures, best_division, divide, fewest_gpus

A100 = load_gpu_cluster("a100-cluster")


def test_fitted_row_is_met():
    """arXiv:2205.05198, table 4, row 1: a layer of the 22B model, 4 sequences, 8 GPUs: 19.6 ms."""
    layer = 12 * 6144**2 + 13 * 6144
    forward = 24.0 * 6144**2 + 4.0 * 2048 * 6144
    figures = ModelFigures(
        parameters=layer,
        trainable_parameters=layer,
        layer_parameters=layer,
        stages=1,
        heads=64,
        forward_flops_per_token=forward,
        backward_flops_per_token=2 * forward,
        saved_bytes_per_token=34.0 * 6144 + 5.0 * 64 * 2048,
        boundary_bytes_per_token=2.0 * 6144,
        batch_tokens=4 * 2048,
        sequence_length=2048,
    )
    found = divide(figures, A100, Degrees(tensor=8, micro_batch=4, sequence_parallel=False))
    assert found.compute_seconds + found.exposed_seconds == pytest.approx(19.6e-3, rel=0.02)


def _best_schedule(
    figures: ModelFigures, data: int, tensor: int, pipeline: int, **given
) -> Division:
    """Return the fastest micro-batch and interleaving, which the paper does not name, with its
    other choices: recomputation, whole layer norms on each GPU, no ZeRO."""
    share, per_gpu = figures.sequences // data, figures.stages // pipeline
    sizes = [given["micro_batch"]] if given else [n for n in (1, 2, 4, 8) if share % n == 0]
    found = []
    for size in sizes:
        for chunks in (n for n in range(1, per_gpu + 1) if per_gpu % n == 0):
            if chunks > 1 and (pipeline == 1 or share // size % pipeline):
                continue
            degrees = Degrees(data, tensor, pipeline, size, chunks, 0, True, False)
            found.append(divide(figures, A100, degrees))
    return min((one for one in found if one.fits), key=lambda one: one.step_seconds)


TABLE_1 = [  # layers, width, heads, tensor, pipeline, GPUs, batch, TFLOP/s per GPU
    (24, 2304, 24, 1, 1, 32, 512, 137),
    (30, 3072, 32, 2, 1, 64, 512, 138),
    (36, 4096, 32, 4, 1, 128, 512, 142),
    (40, 6144, 48, 8, 1, 256, 1024, 135),
    (48, 8192, 64, 8, 2, 512, 1536, 138),
    (60, 10240, 80, 8, 4, 1024, 1792, 140),
    (80, 12288, 96, 8, 8, 1536, 2304, 148),
    (96, 16384, 128, 8, 16, 1920, 2160, 155),
    (105, 20480, 128, 8, 35, 2520, 2520, 163),
    (128, 25600, 160, 8, 64, 3072, 3072, 163),
]


@pytest.mark.parametrize(
    ("layers", "width", "heads", "tensor", "pipeline", "gpus", "batch", "published"), TABLE_1
)
def test_megatron_weak_scaling(layers, width, heads, tensor, pipeline, gpus, batch, published):
    """arXiv:2104.04473, table 1: at most 20 % too fast, never too slow (found: 9 to 16 %)."""
    figures = gpt(layers, width, heads, batch)
    found = _best_schedule(figures, gpus // tensor // pipeline, tensor, pipeline)
    ours = flops_of_step(layers, width, batch) / gpus / found.step_seconds / 1e12
    assert 1.0 <= ours / published <= 1.2


@pytest.mark.parametrize(
    ("layers", "width", "heads", "pipeline", "gpus", "batch", "published"),
    [
        (96, 12288, 96, 12, 384, 1536, 153),
        (96, 12288, 96, 12, 768, 1536, 149),
        (96, 12288, 96, 12, 1536, 1536, 141),
        (105, 20480, 128, 35, 560, 2240, 171),
        (105, 20480, 128, 35, 1120, 2240, 167),
        (105, 20480, 128, 35, 2240, 2240, 159),
    ],
)
def test_megatron_strong_scaling(layers, width, heads, pipeline, gpus, batch, published):
    """arXiv:2104.04473, table 2, the rows of PTD parallelism: at most 20 % too fast (found: 7 to
    17 %)."""
    figures = gpt(layers, width, heads, batch)
    found = _best_schedule(figures, gpus // 8 // pipeline, 8, pipeline, micro_batch=1)
    ours = flops_of_step(layers, width, batch) / gpus / found.step_seconds / 1e12
    assert 1.0 <= ours / published <= 1.2


@pytest.mark.parametrize(
    ("layers", "width", "heads", "batch", "data", "pipeline", "tokens", "published"),
    [
        (96, 12288, 96, 1536, 16, 8, 300e9, 34),
        (128, 25600, 160, 3072, 6, 64, 450e9, 84),
    ],
)
def test_megatron_days(layers, width, heads, batch, data, pipeline, tokens, published):
    """arXiv:2104.04473, section 5.1: 175B on 1024 GPUs in 34 days, 1T on 3072 in 84; at most 20 %
    too fast. The paper does not name the degrees of the first: the best with tensor 8 that divides
    it is taken."""
    figures = gpt(layers, width, heads, batch)
    found = _best_schedule(figures, data, 8, pipeline)
    assert 1.0 <= published / found.days(figures, tokens) <= 1.2


@pytest.mark.parametrize(
    ("layers", "width", "heads", "pipeline", "chunks", "batch", "size", "published"),
    [
        (48, 6144, 64, 1, 1, 4, 4, 1.42),
        (96, 12288, 96, 8, 3, 64, 1, 18.13),
        (105, 20480, 128, 35, 3, 280, 1, 49.05),
        (128, 25600, 160, 64, 1, 512, 1, 94.42),
    ],
)
def test_step_with_full_recomputation(
    layers, width, heads, pipeline, chunks, batch, size, published
):
    """arXiv:2205.05198, table 5, full recomputation, in seconds: within 6 %."""
    degrees = Degrees(1, 8, pipeline, size, chunks, 0, True, False)
    found = divide(gpt(layers, width, heads, batch), A100, degrees)
    assert found.fits
    assert found.step_seconds == pytest.approx(published, rel=0.06)


@pytest.mark.parametrize(
    ("layers", "width", "heads", "pipeline", "chunks"),
    [(96, 12288, 96, 8, 3), (105, 20480, 128, 35, 3), (128, 25600, 160, 64, 1)],
)
def test_models_fit_with_recomputation_only(layers, width, heads, pipeline, chunks):
    """arXiv:2205.05198, section 6.1: without savings of activations none of the models fits."""
    figures = gpt(layers, width, heads, pipeline * 8)
    without = Degrees(1, 8, pipeline, 1, chunks, 0, False, False)
    assert not divide(figures, A100, without).fits
    assert divide(figures, A100, Degrees(1, 8, pipeline, 1, chunks, 0, True, False)).fits


SHARDED = [  # cluster, peak, layers, width, heads, GPUs, micro-batch, accumulation, recompute, MFU
    ("a100-cluster", 312e12, 80, 8192, 64, 64, 8, 4, True, 53.33),
    ("a100-cluster", 312e12, 80, 8192, 64, 32, 2, 16, True, 48.56),
    ("a100-cluster", 312e12, 48, 7168, 56, 8, 3, 21, True, 55.30),
    ("a100-cluster", 312e12, 40, 5120, 40, 8, 2, 3, False, 59.57),
    ("a100-cluster", 312e12, 32, 4096, 32, 8, 6, 2, False, 64.23),
    ("h100-cluster", 989e12, 80, 8192, 64, 64, 8, 4, True, 42.57),
    ("h100-cluster", 989e12, 80, 8192, 64, 32, 2, 16, True, 36.15),
    ("h100-cluster", 989e12, 48, 7168, 56, 32, 14, 3, True, 43.92),
    ("h100-cluster", 989e12, 40, 5120, 40, 64, 2, 1, False, 39.86),
    ("h100-cluster", 989e12, 32, 4096, 32, 8, 6, 1, False, 46.44),
]


@pytest.mark.parametrize(
    ("name", "peak", "layers", "width", "heads", "gpus", "size", "turns", "again", "published"),
    SHARDED,
)
def test_sharded_data_parallelism(
    name, peak, layers, width, heads, gpus, size, turns, again, published
):
    """MPT training benchmarks of mosaicml/llm-foundry (scripts/train/benchmarking/README.md at
    061f2c7, 2023; sharding FULL_SHARD is ZeRO 3): model FLOPs over peak, in percent.

    A100: from 5 % too slow to 20 % too fast (found: -4 to +17 %). H100: up to 50 % too fast (found:
    4 to 48 %); its efficiency is an assumption, and these runs used the first software for it.
    """
    batch = gpus * size * turns
    figures = gpt(layers, width, heads, batch, vocabulary=50368, kept_scores=False)
    degrees = Degrees(data=gpus, micro_batch=size, zero=3, recompute=again)
    found = divide(figures, load_gpu_cluster(name), degrees)
    assert found.fits
    flops = (6 * figures.parameters + 12 * layers * width * 2048) * figures.batch_tokens
    ours = 100 * flops / gpus / found.step_seconds / peak
    assert 0.95 <= ours / published <= (1.2 if name.startswith("a100") else 1.5)


@pytest.mark.parametrize(
    ("gpus", "size", "published"), [(384, 4, 144), (768, 2, 88), (1536, 1, 44)]
)
def test_early_zero_3_was_slower_than_the_model(gpus, size, published):
    """arXiv:2104.04473, table 2, ZeRO-3 on 175B: a row that the model does not meet.

    The model hides the weights' traffic behind compute with all adapters of a node, as later
    software does (the rows above). Why that run was up to five times slower is not known here.
    """
    degrees = Degrees(data=gpus, micro_batch=size, zero=3, recompute=True, sequence_parallel=False)
    found = divide(gpt(96, 12288, 96, 1536), A100, degrees)
    ours = flops_of_step(96, 12288, 1536) / gpus / found.step_seconds / 1e12
    assert 1.2 < ours / published < 5


@pytest.mark.parametrize(("zero", "published"), [(0, 120e9), (1, 31.4e9), (2, 16.6e9), (3, 1.9e9)])
def test_state_per_zero_stage(zero, published):
    """arXiv:1910.02054, figure 1: 7.5B parameters on 64 GPUs, in bytes: within 2 %, since the
    figure rounds."""
    figures = ModelFigures(
        parameters=7_500_000_000,
        trainable_parameters=7_500_000_000,
        layer_parameters=1_000,  # no room for gathered weights, of which the figure has none
        stages=1,
        heads=1,
        forward_flops_per_token=1.0,
        backward_flops_per_token=1.0,
        saved_bytes_per_token=1.0,
        boundary_bytes_per_token=1.0,
        batch_tokens=64,
        sequence_length=1,
    )
    found = divide(figures, A100, Degrees(data=64, zero=zero))
    assert found.memory_bytes == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize("name", ["a100-cluster", "v100-cluster"])
def test_ten_times_faster_than_sixteen(name):
    """Cerebras: to be 10 times faster than 16 GPUs took 800. Neither model, batch nor GPU is named.

    Taken here: Cerebras-GPT 1.3B with its batch of 528 sequences (arXiv:2304.03208). The model says
    176: more than 160, since only some numbers of GPUs divide the batch, and far less than 800,
    since it takes the best division, lets traffic overlap, and loses nothing on small kernels. With
    a batch of 64 sequences it says 512.
    """
    cluster = load_gpu_cluster(name)
    for batch, ours in ((528, 176), (64, 512)):
        figures = gpt(24, 2048, 16, batch, vocabulary=50257)
        sixteen = best_division(figures, cluster, 16)
        assert sixteen is not None
        found = fewest_gpus(figures, cluster, step_seconds=sixteen.step_seconds / 10)
        assert found.gpus == ours

"""Divisions of a model on a GPU cluster: time, memory, search, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
from gpt_figures import gpt

from penstock.errors import ConfigError
from penstock.machines import GpuCluster, load_gpu_cluster
from penstock.prediction import (
    Degrees,
    Division,
    ModelFigures,
    best_division,
    divide,
    fewest_gpus,
)

SEEDS = range(8)
ROUNDING = 1 + 1e-12  # hidden traffic is a difference of two times, added to one of them again
RATES = ("memory_rate", "products", "node", "network")


def _cluster(memory: float = 80e9, gpus: int = 4, most: int | None = None, **faster) -> GpuCluster:
    """Return a small cluster; `faster` multiplies rates."""
    rate = {name: faster.get(name, 1.0) for name in RATES}
    return GpuCluster.model_validate(
        {
            "name": "small",
            "most": most,
            "gpu": {
                "memory": int(memory),
                "reserved": 1 << 20,
                "memory_rate": {"peak": 1e12 * rate["memory_rate"], "efficiency": 0.5},
                "products": [
                    {"dtype": "bfloat16", "peak": 1e14 * rate["products"], "efficiency": 0.5}
                ],
            },
            "node": {
                "gpus": gpus,
                "link": {"peak": 1e11 * rate["node"], "efficiency": 0.8},
                "seconds": 1e-6,
            },
            "network": {
                "link": {"peak": 1e10 * rate["network"], "efficiency": 0.8},
                "seconds": 5e-6,
            },
        }
    )


def _random_figures(dice: random.Random) -> ModelFigures:
    width = dice.choice([256, 1024, 4096])
    batch = dice.choice([4, 6, 8, 12, 16])
    layers, heads = dice.choice([2, 4, 6, 8]), dice.choice([2, 4, 8])
    return gpt(layers, width, heads, batch, length=dice.choice([128, 512]), vocabulary=1000)


def _all_divisions(figures: ModelFigures, cluster: GpuCluster, gpus: int) -> list[Division]:
    """Return every division that `divide` accepts and that fits, by trying all numbers."""
    numbers, found = range(1, gpus + 1), []
    for data, tensor, pipeline in itertools.product(numbers, repeat=3):
        if data * tensor * pipeline != gpus:
            continue
        for micro_batch in range(1, figures.sequences + 1):
            for chunks in range(1, figures.stages + 1):
                for zero, again in itertools.product(range(4), (False, True)):
                    degrees = Degrees(data, tensor, pipeline, micro_batch, chunks, zero, again)
                    try:
                        one = divide(figures, cluster, degrees)
                    except ConfigError:
                        break  # whatever the stage: the degrees do not divide
                    if one.fits:
                        found.append(one)
    return found


def _memory_that_binds(figures: ModelFigures, dice: random.Random) -> float:
    return dice.choice([0.05, 0.3, 1.0, 4.0]) * 16 * figures.parameters + 4e6


@pytest.mark.parametrize("seed", SEEDS)
def test_best_division_is_that_of_all_divisions(seed):
    dice = random.Random(seed)
    figures = _random_figures(dice)
    cluster = _cluster(_memory_that_binds(figures, dice))
    gpus = dice.choice([4, 8, 12])
    every = _all_divisions(figures, cluster, gpus)
    found = best_division(figures, cluster, gpus)
    if not every:
        assert found is None
    else:
        assert found is not None
        assert found.step_seconds == min(one.step_seconds for one in every)


@pytest.mark.parametrize("seed", SEEDS)
def test_fewest_gpus_is_the_first_number_that_is_fast_enough(seed):
    dice = random.Random(seed)
    figures, cluster = _random_figures(dice), _cluster()
    slowest = best_division(figures, cluster, 1)
    assert slowest is not None
    target = slowest.step_seconds / dice.uniform(1.5, 3.5)
    found = fewest_gpus(figures, cluster, step_seconds=target)
    for gpus in range(1, found.gpus + 1):
        best = best_division(figures, cluster, gpus)
        fast = best is not None and best.step_seconds <= target
        assert fast == (gpus == found.gpus)
        assert not fast or best == found


def test_search_of_4096_gpus_finds_one_that_fits():
    figures = gpt(128, 25600, 160, 3072)
    cluster = load_gpu_cluster("a100-cluster")
    found = best_division(figures, cluster, 4096, zero_stages=(0, 1))
    assert found is not None
    assert found.gpus == 4096
    assert found.fits
    assert found.degrees.zero <= 1
    assert found == best_division(figures, cluster, 4096, zero_stages=[1, 0])


def test_no_division_is_none():
    assert best_division(gpt(4, 256, 4, 8), _cluster(), 7) is None  # 7 divides nothing
    assert best_division(gpt(4, 4096, 4, 8), _cluster(memory=2e6), 8) is None  # nothing fits


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("seed", SEEDS)
def test_more_of_a_rate_is_never_slower(seed, name):
    dice = random.Random(seed)
    figures = _random_figures(dice)
    memory = _memory_that_binds(figures, dice) * 4
    slow, fast = _cluster(memory), _cluster(memory, **{name: 1.7})
    for one in _all_divisions(figures, slow, 8):
        assert divide(figures, fast, one.degrees).step_seconds <= one.step_seconds * ROUNDING
    before, after = best_division(figures, slow, 8), best_division(figures, fast, 8)
    assert (before is None) == (after is None)
    if before is not None and after is not None:
        assert after.step_seconds <= before.step_seconds * ROUNDING


@pytest.mark.parametrize("seed", SEEDS)
def test_each_zero_stage_needs_no_more_memory_than_the_one_before(seed):
    figures = _random_figures(random.Random(seed))
    for one in _all_divisions(figures, _cluster(), 8):
        if one.degrees.zero < 3:
            further = dataclasses.replace(one.degrees, zero=one.degrees.zero + 1)
            assert divide(figures, _cluster(), further).memory_bytes <= one.memory_bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_recomputation_and_sequence_parallelism_need_no_more_memory(seed):
    figures = _random_figures(random.Random(seed))
    for one in _all_divisions(figures, _cluster(), 8):
        whole = dataclasses.replace(one.degrees, sequence_parallel=False)
        assert divide(figures, _cluster(), whole).memory_bytes >= one.memory_bytes
        if not one.degrees.recompute:
            again = divide(figures, _cluster(), dataclasses.replace(one.degrees, recompute=True))
            assert again.compute_seconds > one.compute_seconds


@pytest.mark.parametrize("seed", SEEDS)
def test_step_is_the_sum_of_its_parts(seed):
    figures = _random_figures(random.Random(seed))
    for one in _all_divisions(figures, _cluster(), 8):
        parts = (
            one.compute_seconds,
            one.exposed_seconds,
            one.bubble_seconds,
            one.update_seconds,
        )
        assert min(parts) >= 0
        assert one.step_seconds == pytest.approx(sum(parts), rel=1e-12)


def test_bubble_is_that_of_the_paper():
    """arXiv:2104.04473, section 2.2.2: (p - 1) / (v m) of the time without it."""
    figures = gpt(16, 1024, 8, 32)
    for chunks in (1, 2, 4):
        one = divide(figures, _cluster(), Degrees(1, 1, 4, 1, chunks))
        ideal = one.compute_seconds + one.exposed_seconds
        assert one.bubble_seconds / ideal == pytest.approx(3 / (chunks * 32), rel=1e-12)
        assert one.bubble == one.bubble_seconds / one.step_seconds


def test_activations_are_those_of_the_paper():
    """arXiv:2205.05198, equations 2, 4 and the factor of section 4.2.3."""
    layers, width, heads, length, size, tensor, pipeline = 8, 1024, 16, 512, 2, 4, 4
    figures = gpt(layers, width, heads, 32, length=length)
    scores = 5 * heads * length / width
    whole = length * size * width * layers

    def activations(chunks: int, sequence_parallel: bool) -> float:
        degrees = Degrees(1, tensor, pipeline, size, chunks, 0, False, sequence_parallel)
        total = divide(figures, _cluster(), degrees).memory_bytes
        rest = figures.parameters - layers * figures.layer_parameters
        state = 16 * (layers * figures.layer_parameters / pipeline + rest) / tensor
        return total - state

    assert activations(1, False) == pytest.approx(whole * (10 + (24 + scores) / tensor))
    assert activations(1, True) == pytest.approx(whole * (34 + scores) / tensor)
    factor = 1 + (pipeline - 1) / (pipeline * 2)
    assert activations(2, True) == pytest.approx(factor * whole * (34 + scores) / tensor)


def test_tensor_traffic_is_that_of_the_paper():
    """arXiv:2104.04473, section 3.2: 8 b s h (t - 1) / t values per layer and micro-batch."""
    layers, width, length, size, tensor = 3, 1024, 512, 2, 4
    figures = gpt(layers, width, 8, size, length=length)
    found = divide(figures, _cluster(), Degrees(tensor=tensor, micro_batch=size))
    moved = layers * 8 * size * length * width * (tensor - 1) / tensor * 2  # bytes of 16-bit values
    latency = layers * 4 * 2 * (tensor - 1) * 1e-6
    assert found.exposed_seconds == pytest.approx(moved / (1e11 * 0.8) + latency, rel=1e-12)


def test_frozen_weights_have_no_state():
    figures = gpt(4, 1024, 8, 8)
    few = dataclasses.replace(figures, trainable_parameters=figures.parameters // 100)
    all_trained, few_trained = (
        divide(one, _cluster(), Degrees(data=8)).memory_bytes for one in (figures, few)
    )
    saved = 14 * (figures.parameters - few.trainable_parameters)
    assert all_trained - few_trained == pytest.approx(saved, rel=1e-9)


def test_tensor_parallelism_across_nodes_uses_the_network():
    figures = gpt(4, 1024, 8, 8)
    inside = divide(figures, _cluster(), Degrees(tensor=4))
    across = divide(figures, _cluster(), Degrees(tensor=8), tensor_across_nodes=True)
    assert across.exposed_seconds > inside.exposed_seconds
    found = best_division(figures, _cluster(), 64, tensor_across_nodes=True)
    assert found is not None
    assert best_division(gpt(1, 256, 8, 1), _cluster(), 8) is None
    assert best_division(gpt(1, 256, 8, 1), _cluster(), 8, tensor_across_nodes=True) is not None


def test_days():
    figures = gpt(4, 1024, 8, 8, length=512)
    found = divide(figures, _cluster(), Degrees())
    assert found.days(figures, 4096e6) == pytest.approx(1e6 * found.step_seconds / 86400)
    target = fewest_gpus(figures, _cluster(), days=found.days(figures, 1e9) / 3, total_tokens=1e9)
    assert target == fewest_gpus(figures, _cluster(), step_seconds=found.step_seconds / 3)


@pytest.mark.parametrize(
    ("degrees", "text"),
    [
        ({"data": 0}, "data: expected a number from 1 up, got 0"),
        ({"tensor": -1}, "tensor: expected a number from 1 up, got -1"),
        ({"zero": 4}, "zero: expected a stage from 0 to 3, got 4"),
        ({"data": 16}, "data: expected a divisor of the 8 sequences of the batch, got 16"),
        (
            {"data": 4, "micro_batch": 4},
            "micro_batch: expected a divisor of the 2 sequences that each data-parallel replica "
            "has, got 4",
        ),
        ({"tensor": 3}, "tensor: expected a divisor of the 8 attention heads, got 3"),
        (
            {"tensor": 8},
            "tensor: expected a divisor of the 4 GPUs of a node, got 8; or allow "
            "tensor_across_nodes",
        ),
        ({"pipeline": 3}, "pipeline: expected a divisor of the 4 stages of the model, got 3"),
        (
            {"pipeline": 2, "chunks": 4},
            "chunks: expected a divisor of the 2 stages that each GPU has, got 4",
        ),
        (
            {"data": 8, "pipeline": 2, "chunks": 2},
            "chunks: expected 1 where the number of micro-batches is no multiple of the "
            "pipeline's degree, or the degree is 1; got 2 with 1 micro-batches and a degree of 2",
        ),
        ({"data": 8, "tensor": 8}, "gpus: expected at most the 32 of cluster small, got 64"),
    ],
)
def test_degrees_that_do_not_divide_are_refused(degrees, text):
    with pytest.raises(ConfigError) as error:
        divide(gpt(4, 256, 8, 8), _cluster(most=32), Degrees(**degrees))
    assert str(error.value) == text


def test_a_number_of_gpus_that_the_cluster_cannot_have_is_refused():
    for gpus, text in (
        (0, "gpus: expected a number from 1 up, got 0"),
        (64, "gpus: expected at most the 32 of cluster small, got 64"),
    ):
        with pytest.raises(ConfigError) as error:
            best_division(gpt(4, 256, 8, 8), _cluster(most=32), gpus)
        assert str(error.value) == text


def test_a_target_that_no_number_of_gpus_reaches_is_refused():
    with pytest.raises(ConfigError) as error:
        fewest_gpus(gpt(4, 256, 8, 8), _cluster(most=32), step_seconds=1e-9)
    assert str(error.value) == (
        "expected a division with a step of at most 1e-09 s on cluster small, found none on 1 to "
        "32 GPUs; allow more time, or raise the batch so that more GPUs can share it"
    )


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (
            {},
            "expected either step_seconds, or days and total_tokens, got step_seconds=None, "
            "days=None, total_tokens=None",
        ),
        (
            {"days": 3.0},
            "expected either step_seconds, or days and total_tokens, got step_seconds=None, "
            "days=3.0, total_tokens=None",
        ),
        (
            {"days": 3.0, "step_seconds": 1.0},
            "expected either step_seconds, or days and total_tokens, got step_seconds=1.0, "
            "days=3.0, total_tokens=None",
        ),
        ({"step_seconds": 0.0}, "step_seconds: expected a number above 0, got 0"),
        ({"step_seconds": math.nan}, "step_seconds: expected a number above 0, got nan"),
        ({"days": -1.0, "total_tokens": 1.0}, "days: expected a number above 0, got -1"),
        (
            {"step_seconds": 1.0, "zero_stages": (0, 5)},
            "zero_stages: expected one or more of [0, 1, 2, 3], got [0, 5]",
        ),
    ],
)
def test_a_target_that_is_none_is_refused(target, text):
    with pytest.raises(ConfigError) as error:
        fewest_gpus(gpt(4, 256, 8, 8), _cluster(), **target)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"parameters": 0}, "parameters: expected a number from 1 up, got 0"),
        ({"stages": 0}, "stages: expected a number from 1 up, got 0"),
        (
            {"saved_bytes_per_token": 0.0},
            "saved_bytes_per_token: expected a number above 0, got 0",
        ),
        (
            {"forward_flops_per_token": math.nan},
            "forward_flops_per_token: expected a number above 0, got nan",
        ),
        (
            {"parameters": 10},
            "trainable_parameters: expected at most the 10 parameters of the model, got 4207616",
        ),
        (
            {"head_flops_per_token": -1.0},
            "head_flops_per_token: expected a number from 0 to forward_flops_per_token "
            "(1.57286e+07), got -1",
        ),
        (
            {"batch_tokens": 2049},
            "batch_tokens: expected a multiple of sequence_length (2048), got 2049",
        ),
        ({"dtype": "int8"}, "dtype: expected one of bfloat16, float32, got 'int8'"),
    ],
)
def test_figures_that_no_model_has_are_refused(changes, text):
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(gpt(4, 256, 8, 8, vocabulary=2048), **changes)
    assert str(error.value) == text


def test_a_type_without_a_rate_is_refused():
    figures = dataclasses.replace(gpt(4, 256, 8, 8), dtype="float32")
    with pytest.raises(ConfigError) as error:
        best_division(figures, _cluster(), 8)
    assert str(error.value) == (
        "gpu.products: expected a rate of float32, got bfloat16; add one to cluster small"
    )

"""The fused updates against `torch.optim` and, for Lion, against the paper's program."""

from collections.abc import Callable

import numba
import numpy as np
import pytest
import torch

from penstock.kernels.adamw import adamw
from penstock.kernels.lion import lion
from penstock.kernels.sgd import sgd, sgd_momentum
from penstock.kernels.split_master import join, split

STEPS = 25
LENGTHS = [*range(1, 41), 63, 65, 65535, 65537]
HYPER = {"learning_rate": 1e-2, "weight_decay": 0.1}
Update = Callable[[tuple, np.ndarray, list, int], None]


def by_adamw(weight, gradient, state, step, **other):
    numbers = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8}
    adamw(weight, gradient, *state, step=step, **numbers, **HYPER, **other)


def by_sgd(weight, gradient, state, step):
    sgd(weight, gradient, **HYPER)


def by_momentum(weight, gradient, state, step, **other):
    numbers = {"momentum": 0.9, "nesterov": False}
    sgd_momentum(weight, gradient, state[0], step=step, **numbers, **HYPER, **other)


def by_nesterov(weight, gradient, state, step, **other):
    numbers = {"momentum": 0.9, "nesterov": True}
    sgd_momentum(weight, gradient, state[0], step=step, **numbers, **HYPER, **other)


def by_lion(weight, gradient, state, step, **other):
    lion(weight, gradient, state[0], step=step, beta1=0.9, beta2=0.99, **HYPER, **other)


TORCH = {
    by_adamw: lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
    by_sgd: lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1),
    by_momentum: lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1),
    by_nesterov: lambda p: torch.optim.SGD(
        p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
}
EVERY = [*TORCH, by_lion]


def random_run(length: int, seed: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """A weight and a gradient for each step."""
    generator = np.random.default_rng(seed)
    weight = generator.standard_normal(length).astype(np.float32)
    scale = 10.0 ** generator.uniform(-4, 1, length)
    gradients = [
        (generator.standard_normal(length) * scale).astype(np.float32) for _ in range(STEPS)
    ]
    return weight, gradients


def zeros(length: int) -> list[np.ndarray]:
    return [np.zeros(length, np.float32) for _ in range(2)]


def torch_run(
    update: Update, weight: np.ndarray, gradients: list[np.ndarray], dtype: torch.dtype
) -> np.ndarray:
    parameter = torch.nn.Parameter(torch.from_numpy(weight).to(dtype, copy=True))
    optimizer = TORCH[update]([parameter])
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient).to(dtype)
        optimizer.step()
    return parameter.detach().double().numpy()


def lion_run(weight: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    w, m = weight.astype(np.float64), np.zeros(weight.size)
    for gradient in gradients:
        g = gradient.astype(np.float64)
        direction = np.sign(0.9 * m + 0.1 * g)
        w = w - HYPER["learning_rate"] * (direction + HYPER["weight_decay"] * w)
        m = 0.99 * m + 0.01 * g
    return w


def own_run(update: Update, weight: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    weight, state = weight.copy(), zeros(weight.size)
    for step, gradient in enumerate(gradients, 1):
        update((weight,), gradient, state, step)
    return weight


def split_run(update: Update, weight: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    high, low = np.empty(weight.size, np.uint16), np.empty(weight.size, np.uint16)
    split(weight, high, low)
    state = zeros(weight.size)
    for step, gradient in enumerate(gradients, 1):
        update((high, low), gradient, state, step)
    master = np.empty_like(weight)
    join(high, low, master)
    return master


@pytest.mark.parametrize("update", TORCH)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_many_steps_agree_with_pytorch(update, seed):
    weight, gradients = random_run(10007, seed)
    exact = torch_run(update, weight, gradients, torch.float64)
    theirs = np.abs(torch_run(update, weight, gradients, torch.float32) - exact)
    ours = np.abs(own_run(update, weight, gradients) - exact)
    # As near to the exact result as PyTorch's own float32 is, in the mean and at the worst.
    assert ours.mean() < 1.1 * theirs.mean()
    assert ours.max() < 2 * theirs.max()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_many_steps_of_lion_agree_with_the_paper(seed):
    weight, gradients = random_run(10007, seed)
    expected = lion_run(weight, gradients)
    np.testing.assert_allclose(own_run(by_lion, weight, gradients), expected, rtol=3e-6, atol=3e-7)


def test_lion_does_not_change_weights_without_gradient():
    weight, state = np.ones(20, np.float32), zeros(20)
    lion(
        (weight,),
        np.zeros(20, np.float32),
        state[0],
        step=1,
        learning_rate=0.1,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.0,
    )
    np.testing.assert_array_equal(weight, 1)


@pytest.mark.parametrize("update", EVERY)
@pytest.mark.parametrize("seed", [3, 4])
def test_a_split_master_is_updated_to_the_same_bits(update, seed):
    weight, gradients = random_run(70001, seed)
    gradients = gradients[:5]
    np.testing.assert_array_equal(
        split_run(update, weight, gradients), own_run(update, weight, gradients)
    )


@pytest.mark.parametrize("update", EVERY)
def test_a_bfloat16_gradient_is_read_as_its_value(update):
    weight, gradients = random_run(1001, 5)
    tensors = [torch.from_numpy(gradient).bfloat16() for gradient in gradients]
    patterns = [tensor.view(torch.int16).numpy().view(np.uint16) for tensor in tensors]
    values = [tensor.float().numpy() for tensor in tensors]
    np.testing.assert_array_equal(
        own_run(update, weight, patterns), own_run(update, weight, values)
    )
    np.testing.assert_array_equal(
        split_run(update, weight, patterns), own_run(update, weight, values)
    )


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("update", EVERY)
def test_an_element_does_not_depend_on_its_neighbours(update, length):
    weight, gradients = random_run(length + 64, 6)
    whole = own_run(update, weight, gradients[:2])
    part = own_run(update, weight[:length], [g[:length].copy() for g in gradients[:2]])
    np.testing.assert_array_equal(part, whole[:length])


@pytest.mark.parametrize("update", EVERY)
def test_no_byte_beyond_the_end_is_written(update):
    weight, gradients = random_run(100, 7)
    before, state = weight.copy(), zeros(100)
    part = slice(20, 57)
    update((weight[part],), gradients[0][part], [array[part] for array in state], 1)
    np.testing.assert_array_equal(weight[:20], before[:20])
    np.testing.assert_array_equal(weight[57:], before[57:])
    for array in state:
        assert not array[:20].any()
        assert not array[57:].any()


@pytest.mark.parametrize("update", EVERY)
def test_the_number_of_threads_does_not_change_a_bit(update):
    weight, gradients = random_run(300_001, 8)
    results = []
    for threads in (1, numba.config.NUMBA_NUM_THREADS):
        numba.set_num_threads(threads)
        results.append(split_run(update, weight, gradients[:3]))
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("scale", [0.0, 0.37])
def test_the_clip_factor_is_that_of_a_scaled_gradient(scale):
    weight, gradients = random_run(1001, 9)
    scaled = [(g * np.float32(scale)).astype(np.float32) for g in gradients]
    expected = own_run(by_adamw, weight, scaled)
    state = zeros(weight.size)
    for step, gradient in enumerate(gradients, 1):
        adamw(
            (weight,),
            gradient,
            *state,
            step=step,
            beta1=0.9,
            beta2=0.95,
            epsilon=1e-8,
            gradient_scale=scale,
            **HYPER,
        )
    np.testing.assert_array_equal(weight, expected)


def test_step_zero_has_no_bias_correction():
    with pytest.raises(ValueError, match="adamw: steps count from 1, got 0"):
        by_adamw((np.ones(3, np.float32),), np.ones(3, np.float32), zeros(3), 0)


def test_moments_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"exp_avg: expected shape \[3\], got \[4\]"):
        by_adamw((np.ones(3, np.float32),), np.ones(3, np.float32), zeros(4), 1)


@pytest.mark.parametrize("gradient_type", ["float32", "uint16"])
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("update", [by_adamw, by_momentum, by_nesterov, by_lion])
def test_new_streamed_values_are_those_after_the_update(update, is_split, gradient_type):
    master, gradients = random_run(70003, 10)
    if gradient_type == "uint16":
        tensors = [torch.from_numpy(g).bfloat16().view(torch.int16) for g in gradients]
        gradients = [tensor.numpy().view(np.uint16) for tensor in tensors]
    weight = (master,)
    if is_split:
        weight = np.empty(master.size, np.uint16), np.empty(master.size, np.uint16)
        split(master, *weight)
    state, room = zeros(master.size), np.full(master.size + 64, 7, weight[0].dtype)
    streamed = room[:-64]
    for step, gradient in enumerate(gradients[:3], 1):
        before = [array.copy() for array in (*weight, *state)]
        update(weight, gradient, state, step, gradient_scale=0.37, streamed=streamed)
        for array, kept in zip((*weight, *state), before, strict=True):
            np.testing.assert_array_equal(array, kept)
        update(weight, gradient, state, step, gradient_scale=0.37)
        np.testing.assert_array_equal(streamed, weight[0])
        assert not np.array_equal(weight[0], before[0])
    np.testing.assert_array_equal(room[-64:], 7)


@pytest.mark.parametrize("update", [by_adamw, by_momentum, by_lion])
def test_new_streamed_values_need_room_of_their_type_and_moments_of_float32(update):
    weight, gradients = random_run(100, 11)
    room = np.zeros(100, np.uint16)
    with pytest.raises(ValueError, match="streamed values: expected float32, got uint16"):
        update((weight,), gradients[0], zeros(100), 1, streamed=room)
    with pytest.raises(ValueError, match=r"streamed values: expected shape \[100\], got \[99\]"):
        update((weight,), gradients[0], zeros(100), 1, streamed=np.zeros(99, np.float32))
    codes = [(np.zeros(100, np.uint8), np.zeros(1, np.float32)) for _ in range(2)]
    with pytest.raises(ValueError, match="need moments of float32, got 8 bits"):
        update((weight,), gradients[0], codes, 1, streamed=np.zeros(100, np.float32))

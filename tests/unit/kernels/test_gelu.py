"""GELU in its tanh form against its definition in float64."""

import math

import numba
import numpy as np
import pytest
import torch

from penstock.kernels.gelu import gelu, gelu_backward

LENGTHS = [1, 2, 15, 16, 17, 31, 33, 1000, 65536 + 17]


def reference(x: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # PyTorch's own form cancels for arguments below -5: 1 + tanh(u) = 2 / (1 + exp(-2 u)).
    exact = x.double().requires_grad_()
    inner = 2 * math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3)
    values = exact * torch.sigmoid(inner)
    values.backward(gradient.double())
    return values.detach(), exact.grad


def case(length: int, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(length, generator=generator)
    return x.to(dtype), torch.randn(length, generator=generator).to(dtype)


def flat(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def computed(x: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(x), torch.empty_like(x)
    gelu(flat(x), flat(out[0]))
    gelu_backward(flat(gradient), flat(x), flat(out[1]))
    return out


def test_reference_is_pytorchs_function():
    x, gradient = case(1000, 0, torch.float64)
    given = x.clone().requires_grad_()
    values = torch.nn.functional.gelu(given, approximate="tanh")
    values.backward(gradient)
    exact, exact_gradients = reference(x, gradient)
    torch.testing.assert_close(values, exact, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(given.grad, exact_gradients, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("length", LENGTHS)
def test_float32_values_and_gradients_are_those_of_float64(length):
    x, gradient = case(length, length, torch.float32)
    values, gradients = computed(x, gradient)
    exact, exact_gradients = reference(x, gradient)
    # Far on the negative side the argument of the exponential is rounded: 2^-24 of up to 30.
    torch.testing.assert_close(values.double(), exact, rtol=5e-6, atol=1e-12)
    torch.testing.assert_close(gradients.double(), exact_gradients, rtol=5e-6, atol=3e-6)


@pytest.mark.parametrize("length", LENGTHS)
def test_bfloat16_is_rounded_once(length):
    x, gradient = case(length, length, torch.bfloat16)
    for found, exact in zip(computed(x, gradient), reference(x, gradient), strict=True):
        least, most = exact * (1 - 1e-5) - 1e-6, exact * (1 + 1e-5) + 1e-6
        low, high = (torch.minimum(least, most), torch.maximum(least, most))
        assert (found.double() >= low.bfloat16().double()).all()
        assert (found.double() <= high.bfloat16().double()).all()


def test_every_bfloat16_argument_is_rounded_to_a_near_value():
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    x = patterns.view(torch.bfloat16)
    x = x[x.isfinite() & (x.abs() < 1e18)].contiguous()  # the squares of others overflow
    ones = torch.ones_like(x)
    values, gradients = computed(x, ones)
    exact, exact_gradients = reference(x, ones)
    torch.testing.assert_close(values.double(), exact, rtol=2**-8, atol=1e-35)
    torch.testing.assert_close(gradients.double(), exact_gradients, rtol=2**-8, atol=1e-6)


def test_infinite_and_undefined_arguments_give_what_pytorch_gives():
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 90.0, -90.0, 1e-30, -1e-30])
    x = torch.cat([x, torch.tensor([1e13, 5e13, -1e14, 1e18, -3e18])]).requires_grad_()
    expected = torch.nn.functional.gelu(x, approximate="tanh")
    expected.backward(torch.ones_like(x))
    values, gradients = computed(x.detach(), torch.ones_like(x))
    torch.testing.assert_close(values, expected.detach(), equal_nan=True)
    torch.testing.assert_close(gradients, x.grad, equal_nan=True)


def test_number_of_threads_and_position_change_no_bit():
    x, gradient = case(200_000, 0, torch.float32)
    before = computed(x, gradient)
    threads = numba.get_num_threads()
    numba.set_num_threads(1)
    try:
        alone = computed(x, gradient)
    finally:
        numba.set_num_threads(threads)
    shifted = computed(x[5:].clone(), gradient[5:].clone())
    for first, second, third in zip(before, alone, shifted, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first[5:], third)


def test_arrays_of_another_type_or_length_are_refused():
    x = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="out: expected shape"):
        gelu(x, np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="gradient: expected float32, got float64"):
        gelu_backward(np.zeros(4), x, x.copy())

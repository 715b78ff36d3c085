"""Fused cross-entropy against PyTorch's in float64."""

import math

import numba
import numpy as np
import pytest
import torch

from penstock.errors import DataError
from penstock.kernels.cross_entropy import cross_entropy, cross_entropy_and_gradient, most_likely
from penstock.kernels.exponential import exponential
from penstock.kernels.vectors import every_lane, load, store

IGNORE = -100


def reference(logits: torch.Tensor, labels: np.ndarray, scale: float) -> tuple:
    exact = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(
        exact, torch.from_numpy(labels), ignore_index=IGNORE, reduction="none"
    )
    (scale * losses.sum()).backward()
    return losses.detach().numpy(), exact.grad.numpy()


def case(rows: int, width: int, seed: int, spread: float) -> tuple[torch.Tensor, np.ndarray]:
    generator = np.random.default_rng(seed)
    logits = (spread * generator.standard_normal((rows, width))).astype(np.float32)
    labels = generator.integers(0, width, rows)
    labels[generator.random(rows) < 0.2] = IGNORE
    return torch.from_numpy(logits), labels


def patterns(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy().view(np.uint16)


WIDTHS = [*range(1, 41), 63, 64, 65, 1023, 1025, 5000, 50257]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("spread", [0.1, 5.0, 100.0])
def test_float32_losses_and_gradients_equal_pytorch(width, spread):
    logits, labels = case(9, width, width, spread)
    losses, gradient = reference(logits, labels, 0.25)
    own = logits.numpy().copy()
    np.testing.assert_allclose(
        cross_entropy(own, labels, ignore_index=IGNORE), losses, rtol=3e-7, atol=3e-7
    )
    np.testing.assert_array_equal(own, logits.numpy())
    result = cross_entropy_and_gradient(own, labels, ignore_index=IGNORE, scale=0.25)
    np.testing.assert_allclose(result, losses, rtol=3e-7, atol=3e-7)
    # Relative to each element, so that the smallest probabilities count too. float32 rounds the
    # distance to the row's maximum, which is up to 87: that alone is 87 x 2^-24.
    np.testing.assert_allclose(own, gradient, rtol=8e-6, atol=1e-37)


@pytest.mark.parametrize("width", [1, 2, 17, 33, 1000, 50257])
def test_bfloat16_gradients_are_rounded_once(width):
    logits, labels = case(9, width, width, 3.0)
    logits = logits.bfloat16()
    losses, gradient = reference(logits, labels, 0.25)
    own = logits.clone()
    result = cross_entropy_and_gradient(patterns(own), labels, ignore_index=IGNORE, scale=0.25)
    np.testing.assert_allclose(result, losses, rtol=3e-7, atol=3e-7)
    np.testing.assert_allclose(own.double().numpy(), gradient, rtol=2**-8, atol=1e-37)


def test_a_logit_may_be_minus_infinity():
    logits, labels = case(4, 100, 0, 2.0)
    labels[:] = 5
    logits[:, 10:50] = -math.inf
    losses, gradient = reference(logits, labels, 1.0)
    own = logits.numpy().copy()
    result = cross_entropy_and_gradient(own, labels, ignore_index=IGNORE, scale=1.0)
    np.testing.assert_allclose(result, losses, rtol=3e-7)
    np.testing.assert_allclose(own, gradient, rtol=2e-6, atol=1e-37)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 31, 50, 99])
def test_non_finite_logit_makes_the_loss_non_finite(bad, place):
    logits, labels = case(3, 100, 1, 2.0)
    labels[:] = 5
    logits[1, place] = bad
    losses = cross_entropy(logits.numpy(), labels, ignore_index=IGNORE)
    assert np.isnan(losses).tolist() == [False, True, False]


# 1.0 to 2.0 with the top bit of the exponent flipped, and what a GPU makes.
NANS = [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7F9A3B71, 0xFFB504F3, 0x7FFFFFFF, 0xFFFFFFFF]


@pytest.mark.parametrize("pattern", NANS, ids=hex)
def test_nan_of_any_payload_makes_loss_and_gradient_nan(pattern):
    logits, labels = case(3, 100, 1, 2.0)
    labels[:] = 5
    own = logits.numpy()
    own.view(np.uint32)[1, 50] = pattern
    losses = cross_entropy(own, labels, ignore_index=IGNORE)
    assert np.isnan(losses).tolist() == [False, True, False]
    cross_entropy_and_gradient(own, labels, ignore_index=IGNORE, scale=1.0)
    assert np.isnan(own).all(1).tolist() == [False, True, False]


def test_large_logits_do_not_overflow():
    logits = np.array([[1e38, -1e38, 0.0], [88.0, 89.0, 1e4]], np.float32)
    losses = cross_entropy(logits, np.array([0, 2]), ignore_index=IGNORE)
    np.testing.assert_array_equal(losses, 0)


@pytest.mark.parametrize("label", [-1, 7, 10**12])
def test_a_label_outside_the_vocabulary_is_refused_before_anything_is_written(label):
    logits = np.ones((3, 7), np.float32)
    with pytest.raises(DataError) as caught:
        cross_entropy_and_gradient(logits, np.array([0, label, 1]), ignore_index=IGNORE, scale=1)
    assert str(caught.value) == (
        f"label {label} in row 1: expected 0 to 6 or -100 to ignore the row; "
        "check that the data was built with the model's tokenizer"
    )
    np.testing.assert_array_equal(logits, 1)


def test_the_number_of_threads_does_not_change_a_bit():
    results = []
    for threads in (1, numba.config.NUMBA_NUM_THREADS):
        numba.set_num_threads(threads)
        logits, labels = case(37, 1001, 2, 3.0)
        losses = cross_entropy_and_gradient(logits.numpy(), labels, ignore_index=IGNORE, scale=0.1)
        results.append((losses, logits.numpy()))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


@numba.njit
def _exponentials(values, out):
    for i in range(0, values.size, 16):
        store(out, i, exponential(load(values, i, every_lane())), every_lane())


def test_the_exponential_is_within_two_units_in_the_last_place():
    values = np.linspace(-87.2, 0, 1 << 20, dtype=np.float32)
    out = np.empty_like(values)
    _exponentials(values, out)
    exact = np.exp(values.astype(np.float64))
    assert (np.abs(out - exact) / np.spacing(exact.astype(np.float32))).max() < 2


def test_exponential_is_correct_at_its_limits():
    values = np.array([0, -0.0, -87.4, -1e30, -np.inf, np.nan] + [-1] * 10, np.float32)
    out = np.empty_like(values)
    _exponentials(values, out)
    np.testing.assert_array_equal(out[:6], [1, 1, 0, 0, 0, np.nan])


def test_exponential_of_every_nan_is_nan():
    payloads = np.arange(0x7F800001, 0x80000000, 7, dtype=np.uint32)
    payloads = payloads[: payloads.size // 16 * 16]
    for sign in (0, 0x80000000):
        values = (payloads | np.uint32(sign)).view(np.float32)
        out = np.empty_like(values)
        _exponentials(values, out)
        assert np.isnan(out).all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prediction_is_the_first_of_equal_logits(width, dtype):
    """In bfloat16, and in the row of few values, most rows have several greatest logits."""
    logits = case(9, width, width, 3.0)[0].to(dtype)
    logits[4] = logits[4].clamp(max=0.5)
    logits[5] = -math.inf
    logits[6, width // 2 :] = -math.inf if width > 1 else 0.0
    own = patterns(logits) if dtype == torch.bfloat16 else logits.numpy()
    np.testing.assert_array_equal(most_likely(own), logits.float().argmax(1).numpy())


@pytest.mark.parametrize("width", [1, 31, 64, 5000])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("rows", [1, 5])
def test_padded_rows_give_the_same_bits_and_the_padding_is_kept(rows, width, dtype):
    logits, labels = case(rows, width, width, 5.0)
    if rows > 1:
        labels[1] = IGNORE
    together = logits.numpy() if dtype is np.float32 else patterns(logits.bfloat16())
    memory = np.full((rows, width + 7), 77, dtype)
    apart = memory[:, :width]
    apart[:] = together
    losses = cross_entropy(together, labels, ignore_index=IGNORE)
    np.testing.assert_array_equal(cross_entropy(apart, labels, ignore_index=IGNORE), losses)
    np.testing.assert_array_equal(most_likely(apart), most_likely(together))
    for one in (together, apart):
        own = cross_entropy_and_gradient(one, labels, ignore_index=IGNORE, scale=0.25)
        np.testing.assert_array_equal(own, losses)
    np.testing.assert_array_equal(apart, together)
    assert (memory[:, width:] == 77).all()


@pytest.mark.parametrize(
    "logits",
    [
        np.zeros((4, 6), np.float32).T,
        np.zeros((4, 6), np.float32)[:, ::2],
        np.lib.stride_tricks.as_strided(np.zeros(9, np.float32), (3, 4), (4, 4)),
        np.zeros((4, 6), np.float32)[::-1],
        np.ndarray((2, 4), np.float32, bytearray(64), 0, (18, 4)),
    ],
    ids=["transposed", "every second element", "overlapping", "backwards", "between elements"],
)
def test_rows_that_overlap_or_are_not_contiguous_are_refused(logits):
    with pytest.raises(ValueError, match="logits: expected contiguous, aligned memory"):
        most_likely(logits)

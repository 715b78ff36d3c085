"""8-bit moments: what a code is worth, and that rounding neither drifts nor depends on place."""

import itertools

import numpy as np
import pytest

from penstock.kernels.adamw import adamw
from penstock.kernels.lion import lion
from penstock.kernels.moments import GROUP, SIGNED, UNSIGNED
from penstock.kernels.sgd import sgd_momentum

HYPER = {"learning_rate": 1e-3, "weight_decay": 0.1}


def eight_bit(length):
    return np.zeros(length, np.uint8), np.zeros(-(-length // GROUP), np.float32)


def decoded(moment, top):
    """The values of codes, from the format's description: sign, exponent, mantissa of 3 bits."""
    codes, scales = moment
    magnitude = (codes & top).astype(np.int64)
    exponent = (magnitude >> 3) - (top >> 3)
    value = np.where(magnitude == 0, 0.0, (1 + (magnitude & 7) / 8) * 2.0**exponent)
    value = np.where(codes & (255 - top), -value, value)
    return value * np.repeat(scales, GROUP)[: codes.size].astype(np.float64)


def random_gradient(generator, length):
    scale = 10.0 ** generator.uniform(-3, 0, length)
    return (generator.standard_normal(length) * scale).astype(np.float32)


@pytest.mark.parametrize("length", [1, 15, 16, 255, 256, 257, 5000, 65536 + 300])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_code_is_within_a_step_of_its_value(length, seed):
    generator = np.random.default_rng(seed)
    gradient = random_gradient(generator, length)
    weight, exact = (np.ones(length, np.float32) for _ in range(2))
    mean, square = eight_bit(length), eight_bit(length)
    floats = [np.zeros(length, np.float32) for _ in range(2)]
    settings = {"step": 1, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, **HYPER}
    adamw((weight,), gradient, mean, square, **settings)
    adamw((exact,), gradient, *floats, **settings)
    np.testing.assert_array_equal(weight, exact)  # the update itself is made in float32
    for moment, top, value in ((mean, SIGNED, floats[0]), (square, UNSIGNED, floats[1])):
        greatest = np.repeat(
            [np.abs(value[i : i + GROUP]).max() for i in range(0, length, GROUP)], GROUP
        )[:length]
        least = greatest / 1.875 * 2.0 ** -(top >> 3) * 1.125
        error = np.abs(decoded(moment, top) - value)
        assert (error <= np.maximum(np.abs(value) / 8 * 1.001, least)).all()
        assert (np.sign(decoded(moment, top)) * np.sign(value) >= 0).all()
    assert ((decoded(square, UNSIGNED) > 0) == (floats[1] > 0)).all()


def test_rounding_keeps_the_mean():
    length, gradient = 1 << 18, np.float32(1.0)
    codes = eight_bit(length)
    gradients = np.full(length, gradient)
    gradients[::GROUP] = 7.3  # the others are no round part of the greatest
    sgd_momentum(
        (np.zeros(length, np.float32),),
        gradients,
        codes,
        step=1,
        momentum=0.9,
        nesterov=False,
        **HYPER,
    )
    values = np.delete(decoded(codes, SIGNED), np.s_[::GROUP])
    assert len(set(values)) == 2
    assert values.mean() == pytest.approx(1.0, rel=3e-4)


def test_a_mean_that_moves_by_less_than_a_step_of_its_code_still_moves():
    length = 4096
    moment = eight_bit(length)
    weight = np.zeros(length, np.float32)
    settings = {"beta1": 0.9, "beta2": 0.999, **HYPER}
    for step in range(1, 4001):
        gradient = np.full(length, 1.0 if step <= 2000 else 0.0, np.float32)
        gradient[::GROUP] = 1.0
        lion((weight,), gradient, moment, step=step, **settings)
        if step == 2000:
            risen = np.delete(decoded(moment, SIGNED), np.s_[::GROUP]).mean()
    fallen = np.delete(decoded(moment, SIGNED), np.s_[::GROUP]).mean()
    assert risen == pytest.approx(1 - 0.999**2000, rel=0.01)
    assert fallen == pytest.approx(risen * 0.999**2000, rel=0.05)


@pytest.mark.parametrize("cuts", [[], [256], [4096, 65536], [512, 66048, 70144]])
def test_bits_are_independent_of_the_cut_of_a_weight(cuts):
    length = 70_500
    generator = np.random.default_rng(3)
    gradients = [random_gradient(generator, length) for _ in range(3)]
    settings = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "key": 11, **HYPER}

    def run(bounds):
        weight = np.ones(length, np.float32)
        mean, square = eight_bit(length), eight_bit(length)
        for step, gradient in enumerate(gradients, 1):
            for begin, end in itertools.pairwise(bounds):
                groups = slice(begin // GROUP, -(-end // GROUP))
                adamw(
                    (weight[begin:end],),
                    gradient[begin:end],
                    (mean[0][begin:end], mean[1][groups]),
                    (square[0][begin:end], square[1][groups]),
                    step=step,
                    position=begin,
                    **settings,
                )
        return [weight, *mean, *square]

    for ours, theirs in zip(run([0, *cuts, length]), run([0, length]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_zeros_stay_zero():
    mean, square = eight_bit(600), eight_bit(600)
    weight = np.ones(600, np.float32)
    adamw(
        (weight,),
        np.zeros(600, np.float32),
        mean,
        square,
        step=1,
        learning_rate=0.1,
        weight_decay=0.0,
        beta1=0.9,
        beta2=0.95,
        epsilon=1e-8,
    )
    assert not any(part.any() for part in (*mean, *square))
    np.testing.assert_array_equal(weight, 1)


@pytest.mark.parametrize("seed", [0, 1])
def test_tiny_gradients_without_epsilon_keep_weights_stable(seed):
    generator = np.random.default_rng(seed)
    sizes = np.repeat(10.0 ** -np.arange(15, 22, dtype=np.float64), GROUP)
    sizes = np.concatenate(
        [sizes, generator.permutation(sizes), sizes * 10.0 ** generator.integers(0, 35)]
    )
    gradient = (sizes * generator.choice([-1, 1], sizes.size)).astype(np.float32)
    weight = np.zeros(sizes.size, np.float32)
    mean, square = eight_bit(sizes.size), eight_bit(sizes.size)
    settings = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-30, "weight_decay": 0.0}
    for step in range(1, 11):
        before = weight.copy()
        now = gradient if step <= 5 else np.zeros_like(gradient)
        adamw((weight,), now, mean, square, step=step, learning_rate=0.1, **settings)
        assert np.abs(weight - before).max() < 2 * 0.1, f"seed {seed}, step {step}"
        assert (decoded(square, UNSIGNED) > 0).all()
    assert (np.sign(weight) == -np.sign(gradient)).all()


def test_infinite_moment_does_not_change_its_neighbours():
    gradient = np.full(GROUP, 1e15, np.float32)
    gradient[7] = 1e20  # its square is infinite in float32
    mean, square = eight_bit(GROUP), eight_bit(GROUP)
    settings = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, **HYPER}
    adamw((np.zeros(GROUP, np.float32),), gradient, mean, square, step=1, **settings)
    found = decoded(square, UNSIGNED)
    assert found[7] == 1.875 * 2.0**126
    assert np.isfinite(found).all()
    assert np.delete(found, 7) == pytest.approx(0.05 * 1e30, rel=0.13)

"""Kernels may be called from several Python threads at once, whatever pool Numba found."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from penstock.kernels import compilation
from penstock.kernels.gradients import copy_gradient


def test_calls_from_several_threads_do_not_disturb_each_other():
    gradients = [np.random.default_rng(seed).random(300_001, np.float32) for seed in range(4)]
    alone = [copy_gradient(gradient, np.empty_like(gradient)) for gradient in gradients]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            together = pool.map(lambda g: copy_gradient(g, np.empty_like(g)), gradients)
            for found, expected in zip(together, alone, strict=True):
                np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("raises", [False, True])
def test_calls_are_serialised_without_a_thread_safe_pool(raises):
    inside = []

    def body(value):
        inside.append(value)
        assert compilation._ONE_AT_A_TIME.locked()
        if raises:
            raise ValueError("as it does")
        return value + 1

    call = compilation._one_at_a_time(body)
    if raises:
        with pytest.raises(ValueError, match="as it does"):
            call(1)
    else:
        assert call(1) == 2
    assert not compilation._ONE_AT_A_TIME.locked()
    assert inside == [1]

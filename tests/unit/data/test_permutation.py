"""The order of the windows: each once, different by key, the same in any slicing."""

import numpy as np
import pytest

from penstock.data.permutation import _mix_one, key_of, mix, permute

SIZES = [1, 2, 3, 4, 5, 7, 10, 16, 17, 99, 100, 101, 1000, 4097, 65536, 100_003]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63])
def test_permutation_has_every_element_once(n, seed):
    order = permute(np.arange(n), n, key_of(seed))
    assert np.array_equal(np.sort(order), np.arange(n))


@pytest.mark.parametrize("n", [2**40 + 17, 2**62])
def test_huge_permutation_needs_no_memory_and_stays_in_range(n):
    places = np.array([0, 1, 2, n // 2, n - 2, n - 1])
    order = permute(places, n, key_of(5))
    assert len(set(order.tolist())) == len(places)
    assert order.min() >= 0
    assert order.max() < n


def test_position_is_independent_of_other_queries():
    n, key = 1237, key_of(9)
    whole = permute(np.arange(n), n, key)
    one_by_one = [int(permute(np.array([place]), n, key)[0]) for place in range(0, n, 13)]
    assert one_by_one == whole[::13].tolist()


@pytest.mark.long
def test_permutations_pass_randomness_checks():
    # Of a uniformly random permutation: the expected number of fixed points is 1, neighbours are
    # uncorrelated, and each thing stands at each place equally often.
    n, trials = 50, 4000
    orders = np.stack([permute(np.arange(n), n, key_of(1, t)) for t in range(trials)])
    fixed = (orders == np.arange(n)).sum(axis=1).mean()
    assert abs(fixed - 1) < 5 / trials**0.5
    counts = np.stack([np.bincount(orders[:, place], minlength=n) for place in range(n)])
    expected = trials / n
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (n - 1) ** 2
    assert abs(chi_square - freedom) < 6 * (2 * freedom) ** 0.5
    large = permute(np.arange(100_000), 100_000, key_of(3)).astype(float)
    assert abs(np.corrcoef(large[:-1], large[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(large, np.arange(large.size))[0, 1]) < 0.02


def test_keys_depend_on_every_part_and_on_their_order():
    keys = {key_of(a, b, c) for a in range(8) for b in range(8) for c in (0, 1, 2**70)}
    assert len(keys) == 8 * 8 * 3
    assert key_of(1, 2) != key_of(2, 1)


def test_mixing_of_scalars_and_arrays_matches_published_values():
    values = np.random.default_rng(0).integers(0, 2**64, 1000, dtype=np.uint64)
    assert [_mix_one(int(value)) for value in values] == mix(values).tolist()
    # The first outputs of splitmix64 seeded with 0, from the reference implementation.
    golden = 0x9E3779B97F4A7C15
    states = [(golden * number) % 2**64 for number in (1, 2, 3)]
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [_mix_one(state) for state in states] == expected

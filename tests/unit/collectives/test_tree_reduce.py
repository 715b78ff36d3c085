"""The tree sum: the same bits for any order of arrival and any division over engines."""

import math
import random

import pytest
import torch

from penstock.collectives.tree_reduce import PartialSum, TreeReduction, partition


def leaves(count, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(13, generator=generator).mul(10.0 ** (i % 5)).to(dtype), None)
        for i in range(count)
    ]


def node(number, tensors):
    return PartialSum(0, number, tuple(None if t is None else t.clone() for t in tensors))


def summed(values, order):
    total = TreeReduction(len(values))
    most = 0
    for number in order:
        total.add(node(number, values[number]))
        most = max(most, len(total.nodes()))
    return total.root(), most


def by_hand(values, low, high):
    """Sum micro-batches low to high as the tree defines it: halves of the next power of two."""
    if high - low == 1:
        return values[low][0].float()
    half = 1 << (high - low - 1).bit_length() - 1
    return by_hand(values, low, low + half) + by_hand(values, low + half, high)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", range(1, 18))
def test_arrival_order_does_not_change_bits(count, dtype):
    values = leaves(count, count, dtype)
    expected = by_hand(values, 0, count)
    for seed in range(6):
        order = list(range(count))
        random.Random(seed).shuffle(order)
        (total, nothing), _ = summed(values, order)
        assert total.dtype == torch.float32
        assert torch.equal(total, expected), order
        assert nothing is None
    exact = sum(value.double() for value, _ in values)
    assert torch.allclose(expected.double(), exact, rtol=1e-5, atol=1e-3)


def test_order_of_additions_changes_bits():
    """Or the test above would show nothing."""
    values = leaves(16, 3)
    one_by_one = values[0][0].clone()
    for value, _ in values[1:]:
        one_by_one += value
    assert not torch.equal(one_by_one, by_hand(values, 0, 16))


@pytest.mark.parametrize("count", range(1, 18))
def test_ordered_leaves_keep_logarithmic_sums(count):
    _, most = summed(leaves(count, 0), range(count))
    assert most <= 1 + math.log2(count)


@pytest.mark.parametrize("count", range(1, 18))
def test_number_of_engines_does_not_change_bits(count):
    values = leaves(count, 100 + count)
    expected = by_hand(values, 0, count)
    for engines in range(1, count + 1):
        parts = partition(count, engines)
        assert [number for part in parts for number in part] == list(range(count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        sent = []
        for part in parts:
            own = TreeReduction(count)
            for number in part:
                own.add(node(number, values[number]))
            sent += own.nodes()
        random.Random(engines).shuffle(sent)
        whole = TreeReduction(count)
        for partial in sent:
            whole.add(partial)
        assert torch.equal(whole.root()[0], expected), engines


@pytest.mark.parametrize("count", [8, 16])
def test_power_of_two_engines_send_one_sum_each(count):
    values = leaves(count, 0)
    for engines in (1, 2, 4, 8):
        for part in partition(count, engines):
            own = TreeReduction(count)
            for number in part:
                own.add(node(number, values[number]))
            assert len(own.nodes()) == 1


def test_incomplete_sum_names_present_nodes():
    total = TreeReduction(4)
    with pytest.raises(ValueError, match=r"^the sum over 4 micro-batches is incomplete: nothing$"):
        total.root()
    for number in (0, 1, 3):
        total.add(node(number, leaves(4, 0)[number]))
    with pytest.raises(
        ValueError,
        match=r"^the sum over 4 micro-batches is incomplete: \(level 0, index 3\), "
        r"\(level 1, index 0\)$",
    ):
        total.root()


def test_more_engines_than_micro_batches_are_refused():
    with pytest.raises(ValueError, match=r"^3 engines cannot share 2 micro-batches$"):
        partition(2, 3)

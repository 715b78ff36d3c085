"""Slots and the return ring never mix up two stages, in whatever order a device does its work."""

import numpy as np
import pytest
import torch
from random_lanes import RandomLanes

from penstock.collectives.tree_reduce import PartialSum
from penstock.engine.slots import DeviceSlots


def weights_of(random, stages):
    return [
        [
            torch.from_numpy(random.standard_normal(shape).astype(np.float32))
            for shape in ((3, int(random.integers(1, 5))), (), (int(random.integers(0, 9)),))
        ]
        for _ in range(stages)
    ]


def compute(lanes, slots, stage, scale):
    """Queue what reads a stage's weights late; return the sums that will be there then."""
    with slots.use(stage) as weights:
        sums = tuple(torch.full(weight.shape, -1.0) for weight in weights)

        def read():
            for total, weight in zip(sums, weights, strict=True):
                total.copy_(weight * scale)

        lanes.queue("compute", read)
    return [PartialSum(0, 0, sums), PartialSum(1, 1, (None, *sums[1:]))]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("seed", range(40))
def test_every_stage_uses_its_weights_and_sends_its_sums(seed, count):
    random, lanes = np.random.default_rng(seed), RandomLanes(seed)
    weights = weights_of(random, stages=7)
    slots = DeviceSlots(4096, count, lanes)
    for _ in range(2):  # steps
        order = [*range(7), *range(5, -1, -1)]
        waiting = None
        slots.load(order[0], weights[order[0]])
        for place, stage in enumerate(order):
            if place + 1 < len(order):
                slots.load(order[place + 1], weights[order[place + 1]])
            nodes = compute(lanes, slots, stage, scale=place + 1)
            lanes.go_on_a_little()
            if place < 6:
                continue
            sent = slots.send_back(stage, nodes)
            if waiting is not None:
                check(*waiting, weights)
            waiting = (stage, place + 1, sent)
        check(*waiting, weights)


@pytest.mark.parametrize("seed", range(40))
def test_weights_may_be_overwritten_after_the_next_load(seed):
    random, lanes = np.random.default_rng(seed), RandomLanes(seed)
    weights = weights_of(random, stages=6)
    slots = DeviceSlots(4096, 2, lanes)
    frames = [[weight.clone() for weight in stage] for stage in weights]
    slots.load(0, frames[0])
    for stage in range(6):
        if stage + 1 < 6:
            slots.load(stage + 1, frames[stage + 1])
            for frame in frames[stage]:
                frame.fill_(float("nan"))
        nodes = compute(lanes, slots, stage, scale=2)
        check(stage, 2, slots.send_back(stage, nodes), weights)


def check(stage, scale, sent, weights):
    first, second = sent.wait()
    assert (second.level, second.index) == (1, 1)
    assert second.tensors[0] is None
    for came, weight in zip(first.tensors, weights[stage], strict=True):
        assert torch.equal(came, weight * scale)
    for came, weight in zip(second.tensors[1:], weights[stage][1:], strict=True):
        assert torch.equal(came, weight * scale)


def test_backward_receives_only_the_weights_it_reads():
    lanes = RandomLanes(0)
    slots = DeviceSlots(4096, 2, lanes)
    (stage,) = weights_of(np.random.default_rng(0), stages=1)
    for chosen in ([stage[2]], [], [stage[1], stage[0]]):
        slots.load(0, chosen)
        (node, _) = compute(lanes, slots, 0, scale=2.0)
        lanes.mark("compute").synchronize()
        assert all(torch.equal(a, 2 * b) for a, b in zip(node.tensors, chosen, strict=True))


def test_loading_too_far_ahead_is_refused():
    slots = DeviceSlots(4096, 2, RandomLanes(0))
    weight = [torch.zeros(3)]
    slots.load(0, weight)
    slots.load(1, weight)
    with pytest.raises(RuntimeError, match="stage 2 would overwrite stage 0, which has not"):
        slots.load(2, weight)


def test_aborted_step_frees_its_slots():
    lanes = RandomLanes(3)
    slots = DeviceSlots(4096, 2, lanes)
    old, new = [torch.zeros(5)], [torch.arange(5.0)]
    slots.load(0, old)
    slots.load(1, old)
    slots.reset()
    slots.load(0, new)
    slots.load(1, new)
    nodes = compute(lanes, slots, 0, scale=3.0)
    assert torch.equal(slots.send_back(0, nodes).wait()[0].tensors[0], 3 * new[0])


def test_overwritten_gradients_are_refused():
    lanes = RandomLanes(5)
    slots = DeviceSlots(4096, 2, lanes)
    sent = [slots.send_back(0, [PartialSum(0, 0, (torch.full((4,), float(i)),))]) for i in range(3)]
    with pytest.raises(RuntimeError, match="overwritten by those of a later stage"):
        sent[0].wait()
    assert sent[1].wait()[0].tensors[0].tolist() == [1.0] * 4
    assert sent[2].wait()[0].tensors[0].tolist() == [2.0] * 4

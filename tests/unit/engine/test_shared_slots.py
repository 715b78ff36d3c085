"""Devices that share the way to the store: every byte is fetched once, and sums keep their order.

The program here is nothing but weights of odd sizes and types; what a device computes with them is
made up. The lanes of all devices take turns at random.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from random_lanes import Crowd, RandomLanes, World

from penstock.collectives.tree_reduce import PartialSum, TreeReduction, partition
from penstock.engine.shared_slots import SharedSlots
from penstock.engine.sharing import Sharing, sends
from penstock.program import TensorSpec, WeightSpec
from penstock.weight_formats import format_of

SHAPES = [
    [(7, 3), (), (1,)],
    [(129,), (0,), (5, 5)],
    [(1,)],
    [(300, 2), (13,)],
]
TYPES = [torch.float32, torch.bfloat16]


def program_of(dtype, trainable):
    stages, weights = [], {}
    for index, shapes in enumerate(SHAPES):
        specs = tuple(TensorSpec(shape, dtype) for shape in shapes)
        flags = tuple(trainable(index, place) for place in range(len(shapes)))
        kind = SimpleNamespace(weights=specs, trainable=flags, outputs_grad=(True,))
        names = tuple(f"{index}.{place}" for place in range(len(shapes)))
        for name, shape, flag in zip(names, shapes, flags, strict=True):
            weights[name] = WeightSpec(name, shape, format_of(dtype), flag)
        stages.append(SimpleNamespace(index=index, name=str(index), kind=kind, weights=names))
    return SimpleNamespace(stages=stages, weights=weights)


def every(index, place):
    return True


def some(index, place):
    """The third stage is frozen, and every second weight of the others."""
    return index != 2 and place % 2 == 0


class Group:
    """Devices in one world."""

    def __init__(self, seed, program, devices, micro_batches, slots=2):
        self.world = World(seed)
        self.sharing = Sharing(devices, micro_batches)
        crowd = Crowd(self.world, devices)
        size = self.sharing.return_bytes(program)
        returns = [torch.full((size,), 255, dtype=torch.uint8) for _ in range(slots)]
        self.lanes = [RandomLanes(world=self.world) for _ in range(devices)]
        self.slots = [
            SharedSlots(program, slots, lanes, self.sharing, peers, returns)
            for lanes, peers in zip(self.lanes, crowd.peers(), strict=True)
        ]


def leaf(program, stage, number, weights, without):
    """Return what a micro-batch's gradients of a stage are: odd numbers, weights among them."""
    kind = program.stages[stage].kind
    tensors = []
    for place, (weight, trains) in enumerate(zip(weights, kind.trainable, strict=True)):
        if trains:
            values = (weight.float() + 0.1 * number) * (3.0 + number) + stage
            tensors.append(None if (stage, place) in without else values.to(weight.dtype))
    return PartialSum(0, number, tuple(tensors))


def compute(group, rank, stage, weights, program, without):
    """Queue the sums of a device's micro-batches; they are there when the lane has come to it."""
    mine = partition(group.sharing.micro_batches, group.sharing.devices)[rank]
    total = TreeReduction(group.sharing.micro_batches)
    with group.slots[rank].use(stage) as found:
        ahead = [torch.empty_like(weight) for weight in weights]
        group.lanes[rank].queue(
            "compute", lambda: [a.copy_(b) for a, b in zip(ahead, found, strict=True)]
        )
        # Their shapes and types are known now, their values when the lane gets there.
        for number in mine:
            total.add(leaf(program, stage, number, [torch.zeros_like(w) for w in weights], without))
        nodes = total.nodes()

        def really():
            real = TreeReduction(group.sharing.micro_batches)
            for number in mine:
                real.add(leaf(program, stage, number, ahead, without))
            for node, made in zip(nodes, real.nodes(), strict=True):
                for target, tensor in zip(node.tensors, made.tensors, strict=True):
                    if target is not None:
                        target.copy_(tensor)

        group.lanes[rank].queue("compute", really)
    return nodes if sends(program.stages[stage]) else []


def alone(program, stage, weights, micro_batches, without):
    total = TreeReduction(micro_batches)
    for number in range(micro_batches):
        total.add(leaf(program, stage, number, weights, without))
    return total.root()


@pytest.mark.parametrize("dtype", TYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("trainable", [every, some])
@pytest.mark.parametrize(
    ("devices", "micro_batches"), [(1, 1), (1, 3), (2, 2), (2, 7), (3, 3), (3, 8), (5, 11)]
)
def test_sums_equal_one_device_to_the_bit(devices, micro_batches, trainable, dtype):
    program, without = program_of(dtype, trainable), {(1, 0)}
    for seed in range(3):
        random = np.random.default_rng(seed)
        weights = [
            [torch.from_numpy(np.asarray(random.standard_normal(s))).to(dtype) for s in shapes]
            for shapes in SHAPES
        ]
        group = Group(seed, program, devices, micro_batches)
        for _ in range(2):  # steps: all buffers are used again
            waiting = None
            for stage in [0, *range(3, -1, -1)]:
                for slots in group.slots:
                    slots.load(stage, weights[stage])
                sent = [
                    group.slots[rank].send_back(
                        stage, compute(group, rank, stage, weights[stage], program, without)
                    )
                    for rank in range(devices)
                ]
                group.world.go_on_a_little()
                if waiting is not None:
                    check(*waiting, program, weights, micro_batches, without)
                waiting = (stage, sent)
            check(*waiting, program, weights, micro_batches, without)


def check(stage, sent, program, weights, micro_batches, without):
    came = [pending.wait() for pending in sent]
    if not sends(program.stages[stage]):
        assert came == [[]] * len(sent)
        return
    expected = alone(program, stage, weights[stage], micro_batches, without)
    for ((node,),) in zip(came, strict=True):
        assert (node.index, 1 << node.level >= micro_batches) == (0, True)
        for tensor, wanted in zip(node.tensors, expected, strict=True):
            assert (tensor is None) == (wanted is None)
            if wanted is not None:
                assert tensor.dtype == torch.float32
                assert torch.equal(tensor, wanted)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 7])
def test_every_byte_of_a_stage_is_fetched_by_one_device(devices):
    program = program_of(torch.float32, every)
    group = Group(0, program, devices, micro_batches=7)
    copied = [[] for _ in range(devices)]
    for rank, lanes in enumerate(group.lanes):
        lanes.copy = lambda lane, target, source, rank=rank: copied[rank].append(source)
    for stage, shapes in enumerate(SHAPES):
        weights = [torch.arange(float(np.prod(shape))).view(shape) for shape in shapes]
        for slots in group.slots:
            slots.load(stage, weights)
        bytes_ = sorted(
            place
            for sources in copied
            for source in sources
            for place in range(source.data_ptr(), source.data_ptr() + source.nbytes)
        )
        wanted = sorted(
            place for w in weights for place in range(w.data_ptr(), w.data_ptr() + w.nbytes)
        )
        assert bytes_ == wanted
        for slots, sources in zip(group.slots, copied, strict=True):
            slots.reset()
            sources.clear()


@pytest.mark.parametrize("dtype", TYPES, ids=["fp32", "bf16"])
def test_failed_device_completes_collectives_and_later_steps_succeed(dtype):
    program = program_of(dtype, every)
    weights = [[torch.full(shape, 2.0, dtype=dtype) for shape in shapes] for shapes in SHAPES]
    group = Group(0, program, devices=3, micro_batches=6)
    for failing in (1, None):
        for slots in group.slots:
            slots.reset()
        for stage in range(4):
            for slots in group.slots:
                slots.load(stage, weights[stage])
            sent = []
            for rank, slots in enumerate(group.slots):
                if rank == failing:
                    slots.skip_stage(stage, returns_gradients=True)
                else:
                    nodes = compute(group, rank, stage, weights[stage], program, ())
                    sent.append(slots.send_back(stage, nodes))
            for pending in sent:
                pending.wait()  # nobody hangs
        if failing is None:
            check(3, sent, program, weights, 6, ())


def test_sums_of_other_micro_batches_are_refused():
    program = program_of(torch.float32, every)
    group = Group(0, program, devices=2, micro_batches=4)
    wrong = [PartialSum(1, 1, tuple(torch.zeros(shape) for shape in SHAPES[0]))]
    with pytest.raises(RuntimeError, match=r"expected the sums .*, got those of other micro-batch"):
        group.slots[0].send_back(0, wrong)


@pytest.mark.parametrize(
    ("devices", "most"),
    [
        (2, {8: 1, 12: 2, 16: 1, 24: 2, 32: 1, 64: 1, 96: 2}),
        (3, {8: 2, 12: 1, 16: 3, 24: 1, 32: 4, 64: 5, 96: 1}),
        (4, {8: 1, 12: 2, 16: 1, 24: 2, 32: 1, 64: 1, 96: 2}),
        (6, {8: 1, 12: 1, 16: 2, 24: 1, 32: 3, 64: 4, 96: 1}),
        (8, {8: 1, 12: 2, 16: 1, 24: 2, 32: 1, 64: 1, 96: 2}),
    ],
)
def test_number_of_sent_sums_matches_the_documentation(devices, most):
    for micro_batches, count in most.items():
        assert max(map(len, Sharing(devices, micro_batches).held)) == count


@pytest.mark.parametrize("devices", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [5, 8, 13])
def test_held_bytes_equal_counted_bytes(devices, micro_batches):
    program = program_of(torch.bfloat16, every)
    group = Group(0, program, devices, micro_batches)
    counted = group.sharing.device_bytes(program, slots=2)
    for slots in group.slots:
        assert sum(memory.nbytes for memory in slots.resident) == counted

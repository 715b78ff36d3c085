"""A recorded step is repeated with other weights and inputs, and gives the bits of a computed one.

Runs: `tests/integration/test_recorded_training.py`. With CUDA graphs:
`tests/integration/test_devices.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sweeps import compiled, read_backward, weights_of
from tape_recorder import Tape, TapeRecorder
from torch import nn

from penstock.engine import Batch, EnginePlan, TorchEngine
from penstock.engine.lanes import HostLanes
from penstock.engine.recorded_steps import RecordingEngine, can_be_recorded
from penstock.engine.sharing import largest_slot
from penstock.engine.slots import DeviceSlots
from penstock.errors import CompileError
from penstock.step.local_engines import SingleDevice

WIDTH, ROWS, VOCABULARY = 6, 3, 11


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.inner(self.norm(x))))


class Model(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids, wanted):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return (self.head(x).squeeze(-1) - wanted).square().mean()


class World:
    """A program, an engine that records, and one that computes each step."""

    def __init__(self, recorder=None, lanes=None, slots=2, **plan):
        torch.manual_seed(0)
        self.lanes, self.count = lanes or HostLanes(), slots
        self.module, self.recorder = Model(), recorder or TapeRecorder()
        self.program = compiled(self.module, self.rows(0))
        self.plan = EnginePlan(**plan)
        self.engine = self.recording_engine()
        self.other = TorchEngine(self.program, self.plan, slots=self.slots())

    def recording_engine(self, records=True):
        return RecordingEngine(
            self.program,
            self.plan,
            device="cpu",
            budget_bytes=None,
            slots=self.slots(),
            recorder=self.recorder if records else None,
        )

    def slots(self):
        return DeviceSlots(largest_slot(self.program), self.count, self.lanes)

    def rows(self, seed):
        random = torch.Generator().manual_seed(seed)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, 4), generator=random),
            "wanted": torch.randn(ROWS, 4, generator=random),
        }

    def weights(self, seed):
        random = torch.Generator().manual_seed(seed)
        weights = weights_of(self.module, self.program)
        return {n: w + torch.randn(w.shape, generator=random) for n, w in weights.items()}

    def batch(self, seed, count, first=0, total=None):
        rows = [self.rows(10 * seed + number) for number in range(count)]
        return Batch(rows, first, total or count, 0, seed, 1.0 / (1 + seed))

    def step(self, engine, seed, count=3, stop_before=None, **share):
        """Do one step with weights and inputs of this seed; return losses and gradients."""
        calls = self.calls(engine, seed, self.batch(seed, count, **share))
        if stop_before is not None:
            for _ in range(1 + stop_before):
                next(calls)
            return None
        *_, found = calls
        return engine.losses(), found

    def calls(self, engine, seed, batch):
        """Yield before each call of a step, and after the last; what has been returned so far."""
        weights, program = self.weights(seed), self.program
        engine.begin(batch)
        last, found, waiting = program.stages[-1], {}, None
        order = [(s, s.weights) for s in program.stages]
        for stage in reversed(program.stages[:-1]):
            read = read_backward(stage, self.plan)
            order.append((stage, [stage.weights[i] for i in read]))
        for place, (stage, names) in enumerate(order):
            yield found
            engine.load(stage.index, [weights[name] for name in names])
            if place < last.index:
                engine.forward(stage.index)
                continue
            sent = engine.turn(stage.index) if stage is last else engine.backward(stage.index)
            if waiting is not None:
                found[waiting[0]] = copied(waiting[1])
            waiting = (stage.index, sent)
        found[waiting[0]] = copied(waiting[1])
        yield found

    def assert_same(self, seed, **share):
        losses, gradients = self.step(self.engine, seed, **share)
        expected_losses, expected = self.step(self.other, seed, **share)
        assert losses == expected_losses
        assert gradients.keys() == expected.keys()
        for stage, nodes in gradients.items():
            for (place, ours), (other, theirs) in zip(nodes, expected[stage], strict=True):
                assert place == other
                assert all(map(torch.equal, ours, theirs))

    def evaluate(self, engine, seed):
        weights = self.weights(seed)
        engine.begin(self.batch(seed, 1))
        for stage in self.program.stages:
            engine.load(stage.index, [weights[name] for name in stage.weights])
            engine.infer(stage.index)
        return engine.losses()


def copied(pending):
    return [((n.level, n.index), [t.clone() for t in n.tensors]) for n in pending.wait()]


CALLS = 2 * 5 - 1  # of a step: the embedding, three blocks and the head


@pytest.mark.parametrize("recompute", [(), (1, 3)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_repeated_steps_have_the_bits_of_computed_ones(count, recompute):
    world = World(recompute=frozenset(recompute))
    for seed in range(5):
        world.assert_same(seed, count=count)
    assert (world.recorder.recorded, world.recorder.dropped) == (CALLS, 0)
    assert len(world.recorder.started) == 1


def test_peak_of_a_repeated_step_is_that_of_a_computed_one():
    world = World()
    for seed in range(4):
        world.assert_same(seed)
        assert world.engine.memory.peak_bytes == world.other.memory.peak_bytes
    held = sum(tensor.nbytes for tensor in world.slots().resident)
    assert world.recorder.started == [world.other.memory.peak_bytes - held]


def test_another_share_of_the_micro_batches_is_recorded_anew():
    """After one step that is computed as it is, since shares may keep changing."""
    world = World()
    for seed in range(3):
        world.assert_same(seed, count=2)
    assert world.recorder.recorded == CALLS
    for seed in range(3, 7):
        world.assert_same(seed, count=2, first=2, total=4)
    assert (world.recorder.recorded, world.recorder.dropped) == (2 * CALLS, 1)
    for seed in range(7, 12):
        world.assert_same(seed, count=1 + seed % 2)  # another one each time
    assert (world.recorder.recorded, world.recorder.dropped) == (2 * CALLS, 2)


@pytest.mark.parametrize("stop_before", [1, 4, 6])
@pytest.mark.parametrize("stopped", [0, 1, 2, 3])
def test_a_step_that_was_aborted_is_done_again(stopped, stop_before):
    world = World()
    for seed in range(5):
        if seed == stopped:
            world.step(world.engine, seed, stop_before=stop_before)
        world.assert_same(seed)
    assert world.recorder.dropped == (stopped == 1)  # while it was recorded
    assert world.recorder.recorded == CALLS + (stop_before if stopped == 1 else 0)


@pytest.mark.parametrize("records", [True, False])
def test_an_evaluation_gets_the_memory_and_the_next_step_is_recorded_anew(records):
    """Also of a program that cannot be recorded itself."""
    world = World()
    evaluating = world.recording_engine(records)
    for seed in range(3):
        world.assert_same(seed)
    for _ in range(3):
        losses = world.evaluate(evaluating, 7)
        assert losses == world.evaluate(TorchEngine(world.program, world.plan), 7)
    assert (world.recorder.recorded, world.recorder.dropped) == (CALLS, 1)
    for seed in range(3, 6):
        world.assert_same(seed)
    assert (world.recorder.recorded, world.recorder.dropped) == (2 * CALLS, 1)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_engine_that_trains_can_evaluate_after_an_aborted_step(steps):
    """As a trainer does that looks for the stage of a loss that is not finite."""
    world = World()
    for seed in range(steps):
        world.assert_same(seed)
    world.step(world.engine, 7, stop_before=5)
    assert world.evaluate(world.engine, 8) == world.evaluate(world.other, 8)
    for seed in range(4):
        world.assert_same(seed)


def test_nothing_is_recorded_without_room_and_room_is_asked_for_once():
    world = World(TapeRecorder(has_room=False))
    for seed in range(4):
        world.assert_same(seed)
    assert (world.recorder.recorded, len(world.recorder.started)) == (0, 1)


def test_at_most_one_of_the_engines_that_take_turns_on_a_device_records():
    world = World()
    other = World()
    for seed in range(4):
        rows = (world.batch(seed, 2, 0, 4), other.batch(seed, 2, 2, 4))
        steps = [
            each.calls(each.engine, seed, batch)
            for each, batch in zip((world, other), rows, strict=True)
        ]
        for _ in zip(*steps, strict=True):
            pass
    assert (world.recorder.recorded, other.recorder.recorded) == (0, CALLS)


def test_an_engine_that_no_longer_trains_releases_its_memory_and_is_no_obstacle():
    before, now = World(), World()
    for seed in range(3):
        before.assert_same(seed)
    for seed in range(4):
        now.assert_same(seed)
    assert (before.recorder.dropped, now.recorder.recorded) == (1, CALLS)
    for seed in range(3, 6):
        before.assert_same(seed)
    assert (now.recorder.dropped, before.recorder.recorded) == (1, 2 * CALLS)


def test_a_call_that_cannot_be_recorded_names_its_stage_and_the_option():
    class Failing(TapeRecorder):
        def record(self, act):
            raise RuntimeError("an operator waits")

    world = World(Failing())
    world.assert_same(0)
    with pytest.raises(CompileError, match=r"^the forward of stage \S+ cannot be recorded as a"):
        world.step(world.engine, 1)
    world.assert_same(2)  # without recording
    world.assert_same(3)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("failing", [0, 3, CALLS - 1])
def test_no_step_repeats_a_recording_in_which_a_call_failed(failing, error):
    class Failing(TapeRecorder):
        def record(self, act):
            made = super().record(act)
            if self.recorded == 1 + failing:
                raise error
            return made

    world = World(Failing())
    world.assert_same(0)
    with pytest.raises(CompileError if error is RuntimeError else error):
        world.step(world.engine, 1)
    for seed in range(2, 6):
        world.assert_same(seed)
    assert world.recorder.dropped == 1
    assert world.engine.is_repeating == (error is not RuntimeError)


class LateReturns(HostLanes):
    """Gradients are copied to the host when somebody waits for them, and not before."""

    def __init__(self):
        self.waiting = []

    def copy(self, lane, target, source):
        if lane == "return":
            self.waiting.append((target, source))
        else:
            super().copy(lane, target, source)

    def mark(self, lane):
        return Reached(self.waiting[:] if lane == "return" else [], self.waiting)

    def wait(self, lane, mark):
        if lane == "compute":
            mark.synchronize()


class Reached:
    def __init__(self, before, waiting):
        self.before, self.waiting = before, waiting

    def synchronize(self):
        for each in self.before:
            if any(each is other for other in self.waiting):
                each[0].copy_(each[1])
                self.waiting[:] = [other for other in self.waiting if other is not each]


class OverwritingRecorder(TapeRecorder):
    """Lets each call overwrite the gradients of all calls but the one before it."""

    def __init__(self):
        super().__init__()
        self.sums, self.place = [[]], 0

    def record(self, act):
        self.overwrite(len(self.sums) - 1)
        result, repeat = super().record(act)
        number = len(self.sums)
        self.sums.append([])

        def overwrite_and_repeat():
            self.overwrite(number - 1)
            repeat()

        return result, overwrite_and_repeat

    def overwrite(self, number):
        for sums in self.sums[:number]:
            for tensor in sums:
                tensor.fill_(float("nan"))

    def unowned(self, tensor):
        self.sums[-1].append(tensor)
        return tensor


def test_gradients_are_copied_before_a_call_overwrites_them():
    """Also where the host does not wait for them within the step."""
    world = World(OverwritingRecorder(), lanes=LateReturns(), slots=5)
    for seed in range(4):
        found = []
        for engine in (world.engine, world.other):
            calls = sent_of(world, engine, seed)
            found.append([[t.clone() for n in each.wait() for t in n.tensors] for each in calls])
        assert len(found[0]) == 5
        for ours, theirs in zip(*found, strict=True):
            assert all(map(torch.equal, ours, theirs))
    assert world.engine.is_repeating


def sent_of(world, engine, seed):
    """Do one step; return the gradients that were sent, for none of which the host has waited."""
    weights, program, sent = world.weights(seed), world.program, []
    engine.begin(world.batch(seed, 2))
    last = len(program.stages) - 1
    for stage in [*range(last), last, *reversed(range(last))]:
        place, is_backward = program.stages[stage], len(sent) > 0
        names = place.weights
        if is_backward:
            names = [place.weights[each] for each in read_backward(place, world.plan)]
        engine.load(stage, [weights[name] for name in names])
        if is_backward:
            sent.append(engine.backward(stage))
        elif stage == last:
            sent.append(engine.turn(stage))
        else:
            engine.forward(stage)
    return sent


def test_losses_are_read_without_another_operation_on_the_device():
    """It would wait for what has been queued after the turn."""
    world = World()
    for seed in range(4):
        expected, _ = world.step(world.other, seed)
        for engine in (world.engine, world.other):
            calls = world.calls(engine, seed, world.batch(seed, 3))
            for _ in range(7):  # up to a backward
                next(calls)
            with Tape() as tape:
                assert engine.losses() == expected
            assert [entry[0] for entry in tape.entries] == []
            *_, _ = calls
    assert world.engine.is_repeating


def test_releasing_an_engine_releases_the_recording():
    world = World()
    for seed in range(3):
        world.assert_same(seed)
    SingleDevice([world.engine, world.other]).close()
    assert world.recorder.dropped == 1
    world.assert_same(3)


def test_programs_of_known_operators_are_recorded():
    rows = World().rows(0)
    assert can_be_recorded(compiled(Model(), rows), "cpu")
    assert not can_be_recorded(compiled(Model(dropout=0.1), rows), "cpu")


@torch.library.custom_op("recorded_steps_test::clone", mutates_args=())
def clone_of_a_user(x: torch.Tensor) -> torch.Tensor:
    """Its name is one that is recorded, but nobody knows what it reads."""
    return x.clone()


def test_operators_that_wait_for_the_host_are_not_recorded():
    program = compiled(Model(), World().rows(0))
    kind = program.stages[1].kind

    def is_recorded(target, **options):
        graph = torch.fx.Graph()
        graph.output(graph.call_function(target, (graph.placeholder("x"),), options))
        stage = replace(program.stages[1], kind=replace(kind, graphs={"forward": graph}))
        return can_be_recorded(replace(program, stages=(program.stages[0], stage)), "cpu")

    assert is_recorded(torch.ops.aten.relu.default)
    assert not is_recorded(clone_of_a_user._opoverload)
    assert not is_recorded(torch.ops.aten.nonzero.default)
    assert not is_recorded(torch.ops.aten.linalg_inv.default)
    assert not is_recorded(len)
    assert is_recorded(torch.ops.aten._to_copy.default, device=torch.device("cpu"))
    assert not is_recorded(torch.ops.aten._to_copy.default, device=torch.device("cuda:0"))

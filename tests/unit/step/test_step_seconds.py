"""The seconds of a step by a simulated clock: each part is what its calls took, to the bit."""

import pytest
from plain_training import Recipe, trainer_of
from tiny_models import language_model

from penstock.errors import NonFiniteError
from penstock.spans import Spans
from penstock.step import Batches, StepRunner

RECIPE = Recipe(steps=3, warmup_steps=0, size=4, micro=2)
COSTS = {"fetch": 2.0, "receive": 4.0, "commit": 8.0, "forward": 16.0, "turn": 32.0, "backward": 64}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def timed(tmp_path, monkeypatch):
    """A runner whose calls to store and engine take what `COSTS` says, and nothing else does."""
    case = language_model("gpt2")
    trainer, _ = trainer_of(case, RECIPE, tmp_path)
    clock, calls = Clock(), []
    for own in trainer.store.spans:  # of its updates
        own.clock = lambda: 0.0

    def slow(target, name):
        method = getattr(target, name)

        def call(*arguments):
            clock.now += COSTS[name]
            calls.append(name)
            return method(*arguments)

        monkeypatch.setattr(target, name, call)

    for name in ("fetch", "receive", "commit"):
        slow(trainer.store, name)
    (engine,) = trainer.engines
    for name in ("forward", "turn", "backward"):
        slow(engine, name)
    spans = Spans(clock, keep=1000)
    layout = trainer._layout
    batches = Batches(trainer.model, trainer._data.training, RECIPE.size, layout.micro_batch)
    runner = StepRunner(
        layout, trainer.store, trainer.fabric, [engine], batches, seed=0, tokens=1, spans=spans
    )
    yield runner, calls, clock
    trainer.close()


def cost(calls, names):
    return sum(COSTS[name] for name in calls if name in names)


def test_the_parts_of_a_step_are_the_sums_of_its_spans(timed):
    runner, calls, clock = timed
    for step in (1, 2):
        calls.clear()
        done = runner.run()
        at_store = cost(calls, ("fetch", "receive", "commit"))
        computing = cost(calls, ("forward", "turn", "backward"))
        assert done.seconds == at_store + computing
        assert done.weight_seconds == at_store
        assert done.compute_seconds == computing
        assert done.update_seconds == 0.0
        measured = runner.measured
        assert measured.seconds == {"store": at_store, "engine 0": computing, "gradients": 0.0}
        updates = [span for span in measured.spans if span.lane == "update"]
        assert {span.step for span in updates} == ({step - 1} if step > 1 else set())
        spans = [span for span in measured.spans if span.lane != "update"]
        assert {span.step for span in spans} == {step}
        did = [(span.lane, span.what) for span in spans if span.lane != "gradients"]
        assert [COSTS[what] for _, what in did] == [COSTS[name] for name in calls]
        assert {span.what for span in measured.spans if span.lane == "engine 0"} == {
            "forward",
            "turn",
            "backward",
        }
        moved = {
            what: sum(span.bytes for span in measured.spans if span.what == what)
            for what in ("fetch", "receive")
        }
        assert moved == {"fetch": done.streamed_bytes, "receive": done.gradient_bytes}
        ops = [span.op for span in measured.spans if span.lane == "engine 0"]
        assert ops == list(range(len(ops)))
        assert spans[-1].end == clock.now


def test_time_of_an_interrupted_step_is_not_counted_in_the_next(timed, monkeypatch):
    runner, calls, _ = timed
    with monkeypatch.context() as patched:
        patched.setattr(
            runner._engines[0], "losses", lambda: (_ for _ in ()).throw(NonFiniteError("x"))
        )
        with pytest.raises(NonFiniteError):
            runner.run()
    calls.clear()
    assert runner.run().weight_seconds == cost(calls, ("fetch", "receive", "commit"))

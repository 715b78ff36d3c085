"""The trainer besides its arithmetic: when it stops, what it keeps, and what it refuses to do."""

import dataclasses
import threading
import time

import numpy as np
import pytest
import torch
from grids import quick_first
from plain_training import Recipe, trainer_of
from tiny_models import CASES, CONTRASTIVE, IGNORED, Case, language_model, with_rows
from torch import nn

from penstock.errors import ConfigError, NonFiniteError, NoTrainingError, StorageError
from penstock.models import InputSpec, ModelSource
from penstock.store import find_checkpoint, read_state
from penstock.telemetry.events import Evaluated, Evaluating, Finished, Notice, Saved, Stopped
from penstock.training.trainer import Trainer


def listening(case, recipe, folder, **changes):
    """Return a trainer and the list of all its events."""
    trainer, _ = trainer_of(case, recipe, folder, **changes)
    events, steps = [], trainer._listener

    def listen(event):
        steps(event)
        events.append(event)

    trainer._listener = trainer._notify = listen
    return trainer, events


def of_kind(events, kind):
    return [event for event in events if isinstance(event, kind)]


def with_losses(trainer, losses):
    """Let evaluations find these losses, whatever the model."""
    given = iter(losses)
    trainer._evaluator.evaluate = lambda batches, should_stop, on_batch: {
        "loss": next(given),
        "perplexity": 1.0,
        "tokens": 1,
    }


# Evaluation, the best checkpoint, early stop


@pytest.mark.parametrize(
    "name",
    quick_first(["gpt2", "bert", "perceptron", "classifier"], ["gpt2", "perceptron", "classifier"]),
)
def test_evaluation_equals_plain_pytorch(name, tmp_path):
    """On weights that were trained, over the same rows, of which the last fills no micro-batch."""
    case = CASES[name]()
    rows = {field: value[:23] for field, value in case.arrays(9).items()}
    recipe = Recipe(steps=5, warmup_steps=0)
    trainer, _ = trainer_of(case, recipe, tmp_path, held_out=with_rows(case, rows).data(0))
    trainer.train()
    found = trainer.evaluate(batches=100)
    model = case.plain(recipe.seed).eval()
    model.load_state_dict(
        {name: trainer.store.master(name) for name in trainer.program.weights}, strict=False
    )
    tensors = {field: torch.from_numpy(value) for field, value in rows.items()}
    with torch.no_grad():
        loss = float(case.loss(model, tensors))
    if case.summed:
        count = int((tensors["labels"] != IGNORED).sum())
        assert found["tokens"] == count
        loss /= count
        assert found["perplexity"] == pytest.approx(np.exp(loss), rel=1e-4)
        assert 0 <= found["accuracy"] <= 1
    else:
        assert found["rows"] == 23
        assert found.keys() == {"loss", "rows"}
    assert found["loss"] == pytest.approx(loss, rel=2e-6)


@pytest.mark.long
def test_evaluation_changes_no_bit_of_training(tmp_path):
    case, recipe = language_model("gpt2", resid_pdrop=0.1), Recipe(steps=6)
    plain, _ = trainer_of(case, recipe, tmp_path / "plain")
    plain.train()
    watched, _ = trainer_of(case, recipe, tmp_path / "watched", evaluation={"every": 1})
    watched.train()
    assert watched.store.content_hash() == plain.store.content_hash()


def test_early_stop_keeps_the_best_checkpoint(tmp_path):
    case, recipe = language_model("gpt2"), Recipe(steps=20)
    changes = {
        "evaluation": {"every": 2, "early_stop_patience": 3},
        "checkpoint": {"every": 3, "keep_last": 2},
    }
    trainer, events = listening(case, recipe, tmp_path, **changes)
    with_losses(trainer, [5.0, 4.0, 4.5, 4.0, 4.1, 1.0])
    trainer.train()
    assert [event.best for event in of_kind(events, Evaluated)] == [True, True, False, False, False]
    assert trainer.step == 10
    (stopped,) = of_kind(events, Stopped)
    assert stopped.step == 10
    assert stopped.reason == "no better held-out loss in 3 evaluations"
    assert not of_kind(events, Finished)
    folders = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert folders == ["step-00000004", "step-00000009", "step-00000010"]
    assert read_state(find_checkpoint(tmp_path / "checkpoints", "best")).step == 4
    assert read_state(find_checkpoint(tmp_path / "checkpoints", "latest")).step == 10
    assert of_kind(events, Saved)[-1].path.name == "step-00000010"


def test_early_stop_patience_survives_a_restart(tmp_path):
    case, recipe = language_model("gpt2"), Recipe(steps=20)
    changes = {"evaluation": {"every": 1, "early_stop_patience": 3}}
    first, _ = trainer_of(case, recipe, tmp_path, until=3, **changes)
    with_losses(first, [3.0, 3.5, 3.2])
    first.train()
    second, _ = trainer_of(case, recipe, tmp_path, **changes)
    with_losses(second, [3.1, 2.0])
    second.train()
    assert second.step == 4


def test_evaluation_that_ends_a_run_at_its_start_is_saved(tmp_path):
    """It was cut short by a stop; no step follows that would save its result."""
    case, recipe = language_model("gpt2"), Recipe(steps=20)
    changes = {"evaluation": {"every": 1, "early_stop_patience": 1}}
    cut, _ = trainer_of(case, recipe, tmp_path, **changes)
    losses = iter([3.0])

    def evaluate(*given):
        for loss in losses:
            return {"loss": loss}
        cut.request_stop("the test says so")
        raise InterruptedError

    cut._evaluator.evaluate = evaluate
    cut.train()
    assert cut.step == 2
    for losses_left, evaluations in (([3.5], 1), ([], 0)):
        again, events = listening(case, recipe, tmp_path, **changes)
        with_losses(again, losses_left)
        again.train()
        assert len(of_kind(events, Evaluated)) == evaluations
        assert again.step == 2


def test_early_stop_without_held_out_data_is_refused(tmp_path):
    case, recipe = language_model("gpt2"), Recipe(steps=20)
    stopping = recipe.config(tmp_path, evaluation={"every": 1, "early_stop_patience": 3})
    given = {"model": case.source(recipe.seed), "source": case.data(recipe.seed), "quiet": True}
    text = (
        "evaluation.early_stop_patience: has no effect without held-out data; remove it, build the "
        "data set with data.validation above 0, or give Trainer(held_out=...)"
    )
    with pytest.raises(ConfigError) as caught:
        Trainer(stopping, **given)
    assert str(caught.value) == text
    assert not list(tmp_path.iterdir())
    first, _ = trainer_of(case, recipe, tmp_path, until=1)
    first.train()
    resumed = Trainer(stopping, **given)  # may still generate text
    with pytest.raises(ConfigError) as caught:
        resumed.train()
    assert str(caught.value) == text


def test_best_loss_on_other_rows_is_forgotten_with_a_notice(tmp_path):
    case, recipe = language_model("gpt2"), Recipe(steps=20)
    first, _ = trainer_of(case, recipe, tmp_path, until=2, evaluation={"every": 1, "batches": 2})
    with_losses(first, [3.0, 2.0])
    first.train()
    changes = {"evaluation": {"every": 1, "batches": 1}}
    second, events = listening(case, recipe, tmp_path, until=3, **changes)
    with_losses(second, [2.5])
    second.train()
    told = [event.text for event in of_kind(events, Notice)]
    assert [text for text in told if text.startswith("evaluation.batches: the best held-out loss")]
    assert [event.best for event in of_kind(events, Evaluated)] == [True]
    assert read_state(find_checkpoint(tmp_path / "checkpoints", "best")).step == 3


def test_stop_request_finishes_the_step_saves_and_prints_how_to_resume(tmp_path):
    case, recipe = language_model("gpt2"), Recipe(steps=20)
    trainer, events = listening(case, recipe, tmp_path, until=7)
    summary = trainer.train()
    assert summary["steps"] == trainer.step == 7
    (stopped,) = of_kind(events, Stopped)
    assert stopped.reason == "the test says so"
    assert stopped.resume_command.startswith("penstock train ")
    assert read_state(find_checkpoint(tmp_path / "checkpoints", "latest")).step == 7


class StoppingRows:
    """Held-out rows, between two of whose micro-batches the trainer is asked to stop."""

    def __init__(self, rows):
        self.rows, self.trainer, self.given = rows, None, 0

    def evaluation_batches(self, size, limit):
        for batch in self.rows.evaluation_batches(size, limit):
            if self.trainer is not None and self.given == 2:  # the first is that of the check
                self.trainer.request_stop("the test says so")
            self.given += 1
            yield batch


@pytest.mark.parametrize("is_last", [False, True])
def test_stop_request_cuts_an_evaluation_short_but_not_the_last(tmp_path, is_last):
    case, recipe = language_model("gpt2"), Recipe(steps=2 if is_last else 4, warmup_steps=0)
    every = {"every": 2, "batches": 2}
    whole, expected = listening(case, recipe, tmp_path / "whole", evaluation=every)
    whole.train()
    rows = StoppingRows(case.data(recipe.seed + 1))
    trainer, events = listening(case, recipe, tmp_path / "cut", evaluation=every, held_out=rows)
    rows.trainer = trainer
    trainer.train()
    assert trainer.step == 2
    assert len(of_kind(events, Stopped)) == (not is_last)
    cut = "the evaluation after step 2 did not finish; the next start repeats it, unless"
    assert any(cut in event.text for event in of_kind(events, Notice)) == (not is_last)
    assert [(e.step, e.batch, e.batches) for e in of_kind(expected, Evaluating)][:2] == [
        (2, 1, 2),
        (2, 2, 2),
    ]
    assert len(of_kind(events, Evaluated)) == is_last
    assert (rows.given > 3) == is_last  # one in the check, one that counts, one after the request
    again, later = listening(case, recipe, tmp_path / "cut", evaluation=every)
    again.train()
    found = [
        (event.step, event.loss, event.best) for event in of_kind([*events, *later], Evaluated)
    ]
    assert found == [(event.step, event.loss, event.best) for event in of_kind(expected, Evaluated)]


def test_evaluation_that_a_stop_during_the_step_prevents_is_made_by_the_next_start(tmp_path):
    """No notice says that it was interrupted."""
    case, recipe = language_model("gpt2"), Recipe(steps=4, warmup_steps=0)
    every = {"every": 2, "batches": 2}
    trainer, events = listening(case, recipe, tmp_path, evaluation=every)
    run = trainer._runner.run

    def run_and_stop():
        if trainer.step == 1:
            trainer.request_stop("the test says so")
        return run()

    trainer._runner.run = run_and_stop
    trainer.train()
    assert trainer.step == 2
    assert not [event for event in events if isinstance(event, (Evaluating, Evaluated))]
    assert not [event.text for event in of_kind(events, Notice) if "evaluation" in event.text]
    again, later = listening(case, recipe, tmp_path, evaluation=every)
    again.train()
    assert [event.step for event in of_kind(later, Evaluated)] == [2, 4]


# No silent no-op


class HalfDetached(nn.Module):
    """A branch that the loss reads and no gradient reaches."""

    def __init__(self):
        super().__init__()
        self.used, self.cut = nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, left, right):
        return (self.used(left) - self.cut(right).detach()).square().mean()


class HalfZero(nn.Module):
    """A branch whose gradient is exactly zero."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, left, right):
        return (self.used(left) + 0.0 * self.idle(right)).square().mean()


def contrastive_with(module_class):
    inputs = {"left": InputSpec((12,)), "right": InputSpec((12,))}

    def source(seed):
        torch.manual_seed(seed)
        return ModelSource.from_module(module_class(), inputs=inputs)

    return dataclasses.replace(CONTRASTIVE, build=module_class, source=source)


def test_weights_without_gradient_are_named_and_nothing_is_committed(tmp_path):
    trainer, _ = trainer_of(contrastive_with(HalfDetached), Recipe(warmup_steps=0), tmp_path)
    before = trainer.store.content_hash()
    with pytest.raises(NoTrainingError, match=r"cut\.weight.*cut\.bias|cut\.bias.*cut\.weight"):
        trainer.train()
    assert trainer.step == 0
    assert trainer.store.content_hash() == before


@pytest.mark.parametrize("frozen", ["idle.*", "used.*"])
def test_frozen_weights_give_no_notice(frozen, tmp_path):
    case = contrastive_with(HalfZero)
    trainer, events = listening(case, Recipe(steps=6, freeze=(frozen,)), tmp_path)
    trainer.train()
    notices = [event.text for event in of_kind(events, Notice)]
    start = case.plain(0).state_dict()
    if frozen == "used.*":  # and what is left does not train
        assert len(notices) == 1
        assert "2 weight(s) do not train" in notices[0]
        assert "idle.weight, idle.bias" in notices[0]
        return
    assert torch.equal(trainer.store.master("idle.weight"), start["idle.weight"])
    assert not torch.equal(trainer.store.master("used.weight"), start["used.weight"])
    assert not notices


# Losses and gradients that are not numbers


class Explodes(nn.Module):
    """Block 2 of 4 divides by zero when it sees a value, at first within its activations only."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(number == 2) for number in range(4))

    def forward(self, left, right):
        x = left
        for block in self.blocks:
            x = block(x, right)
        return x.square().mean()


class Block(nn.Module):
    def __init__(self, bad):
        super().__init__()
        self.linear, self.bad = nn.Linear(12, 12), bad

    def forward(self, x, right):
        y = x + torch.tanh(self.linear(x))
        if self.bad:
            y = y / (right[:, :1] != 77.0)  # infinite where the row holds the value
        return y


def poisoned(step, recipe, value=77.0) -> Case:
    """Rows of which one, seen first in that step, holds the value."""
    case = contrastive_with(Explodes)
    rows = case.arrays(0)
    clean = dataclasses.replace(case, arrays=lambda seed: rows).data(recipe.seed)
    target = clean.batch(step, range(recipe.size), recipe.size)["right"][5]
    earlier = [clean.batch(s, range(recipe.size), recipe.size)["right"] for s in range(step)]
    place = int(np.flatnonzero((rows["right"] == target).all(axis=1))[0])
    assert not any((batch == target).all(axis=1).any() for batch in earlier)
    changed = {name: value.copy() for name, value in rows.items()}
    changed["right"][place, 0] = value
    return with_rows(case, changed)


@pytest.mark.parametrize("engines", [1, 2])
def test_non_finite_loss_names_the_stage_and_commits_nothing(engines, tmp_path):
    recipe = Recipe(steps=8)
    case = poisoned(4, recipe)
    trainer, _ = listening(case, recipe, tmp_path / "a", engines=engines)
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    assert str(caught.value) == (
        "step 5: the loss is nan; blocks.2 is the first stage whose output is not finite. The step "
        "was not committed: the weights are those of step 4. Check the batch, or start a run with "
        "a lower optimizer.learning_rate in another run.dir."
    )
    assert trainer.step == 4
    clean, _ = trainer_of(case, recipe, tmp_path / "b", until=4)
    clean.train()
    assert trainer.store.content_hash() == clean.store.content_hash()
    # What was committed is saved, and the step is tried again by whoever goes on.
    assert read_state(find_checkpoint(tmp_path / "a" / "checkpoints", "latest")).step == 4
    again, _ = trainer_of(case, recipe, tmp_path / "a", engines=engines)
    assert again.step == 4
    with pytest.raises(NonFiniteError, match=r"^step 5: "):
        again.train()


class RootOfZero(nn.Module):
    """The loss is a number, its gradient is not: the root of exactly zero."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 4, bias=False), nn.Linear(4, 1, bias=False)

    def forward(self, left, right):
        return self.second(self.first(left * 0.0)).abs().sum(dim=1).sqrt().mean()


def test_non_finite_gradient_is_not_committed(tmp_path):
    trainer, _ = trainer_of(contrastive_with(RootOfZero), Recipe(warmup_steps=0), tmp_path)
    before = trainer.store.content_hash()
    with pytest.raises(NonFiniteError, match=r"first\.weight|second\.weight"):
        trainer.train()
    assert trainer.step == 0
    assert trainer.store.content_hash() == before


# Checkpoints that are on their way when the run ends


def slow_disk(monkeypatch):
    """Let writing a checkpoint take until it is given up; return the writers that are at work."""

    def write(snapshot, *_, **__):
        while not snapshot.is_closed:
            time.sleep(0.01)
        raise StorageError("given up")

    monkeypatch.setattr("penstock.store.checkpoint.background.write_checkpoint", write)
    return lambda: [t for t in threading.enumerate() if t.name == "penstock saver"]


def test_interrupted_wait_for_a_checkpoint_leaves_no_writer_thread(tmp_path, monkeypatch):
    writers = slow_disk(monkeypatch)
    seen = []

    def interrupted(self):
        seen.extend(writers())
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.store.BackgroundSave.wait", interrupted)
    trainer, _ = listening(CONTRASTIVE, Recipe(steps=6), tmp_path, checkpoint={"every": 1})
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert seen
    assert not writers()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_abandoned_run_leaves_no_writer_thread(error, tmp_path, monkeypatch):
    writers = slow_disk(monkeypatch)
    trainer, _ = trainer_of(CONTRASTIVE, Recipe(steps=6), tmp_path, checkpoint={"every": 1})

    def leave(event):
        if writers():
            raise error

    trainer._listener = leave
    with pytest.raises(type(error)):
        trainer.train()
    assert not writers()


def test_error_during_shutdown_does_not_hide_the_first_error(tmp_path, monkeypatch):
    writers = slow_disk(monkeypatch)
    trainer, _ = trainer_of(CONTRASTIVE, Recipe(steps=6), tmp_path, checkpoint={"every": 1})

    def interrupted(self):
        raise KeyboardInterrupt

    def leave(event):
        if writers():
            monkeypatch.setattr("penstock.store.BackgroundSave.wait", interrupted)
            raise ValueError("the listener's own")

    trainer._listener = leave
    with pytest.raises(ValueError, match="the listener's own") as raised:
        trainer.train()
    assert "not complete: KeyboardInterrupt" in raised.value.__notes__[0]
    assert not writers()


def test_closing_a_trainer_ends_its_writer_thread(tmp_path, monkeypatch):
    writers = slow_disk(monkeypatch)
    trainer, _ = trainer_of(CONTRASTIVE, Recipe(steps=6), tmp_path)
    trainer.run_step()
    trainer._checkpoint_scheduler.begin(trainer.step)
    assert writers()
    trainer.close()
    assert not writers()


def test_interrupted_final_save_can_be_repeated(tmp_path, monkeypatch):
    trainer, events = listening(CONTRASTIVE, Recipe(steps=6), tmp_path)

    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        slow_disk(during)
        during.setattr("penstock.store.BackgroundSave.wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    assert find_checkpoint(tmp_path / "checkpoints", "latest") is None
    trainer.save()
    assert read_state(find_checkpoint(tmp_path / "checkpoints", "latest")).step == 6
    trainer.save()  # the step is durable: nothing is written again
    assert [event.step for event in of_kind(events, Saved)] == [6]

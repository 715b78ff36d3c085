"""The rows that a source gives: refused if they are not those that the model was compiled for.

A source may end, return the same memory in every call, or return rows that are not contiguous.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plain_training import Recipe, trainer_of
from tiny_models import CONTRASTIVE, language_model, with_rows
from torch import nn
from torch.nn import functional

from penstock.data import ArraySource
from penstock.errors import CorruptionError, DataError, PenstockError
from penstock.models import InputSpec, ModelSource
from penstock.store import find_checkpoint, read_state
from penstock.training.trainer import Trainer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda rows: {**rows, "left": rows["left"].astype(np.float64)},
            "the batch's 'left' must be float32 [4, 12] per micro-batch, as in the model's example "
            "inputs; the source gave float64 [4, 12]",
        ),
        (
            lambda rows: {**rows, "right": rows["right"][:, :5]},
            "the batch's 'right' must be float32 [4, 12] per micro-batch, as in the model's "
            "example inputs; the source gave float32 [4, 5]",
        ),
        (
            lambda rows: {"left": rows["left"]},
            "the batch lacks 'right': the model reads left, right; the source gave left",
        ),
    ],
)
def test_rows_of_another_type_or_shape_are_refused(change, message, tmp_path):
    case = with_rows(CONTRASTIVE, change(CONTRASTIVE.arrays(0)))
    trainer, _ = trainer_of(case, Recipe(size=8, micro=4), tmp_path)
    with pytest.raises(DataError) as caught:
        trainer.train()
    assert str(caught.value) == message
    assert trainer.step == 0


def test_rows_of_a_language_model_without_labels_are_refused(tmp_path):
    rows = language_model("gpt2").arrays(0)
    case = with_rows(language_model("gpt2"), {"input_ids": rows["input_ids"]})
    trainer, _ = trainer_of(case, Recipe(size=8, micro=4), tmp_path)
    with pytest.raises(DataError) as caught:
        trainer.train()
    assert str(caught.value) == (
        "the batch lacks 'labels', the token that each position should predict (-100: none); the "
        "source gave input_ids"
    )
    assert trainer.step == 0


@pytest.mark.parametrize(
    ("name", "token"), [("input_ids", 64), ("input_ids", -1), ("labels", 64), ("labels", -1)]
)
def test_token_that_is_not_in_the_vocabulary_is_refused(name, token, tmp_path):
    model = language_model("gpt2")
    rows = {field: array.copy() for field, array in model.arrays(0).items()}
    size = model.source(0).vocab_size
    token = size if token > 0 else token
    rows[name][:, 1] = token
    trainer, _ = trainer_of(with_rows(model, rows), Recipe(size=8, micro=4), tmp_path)
    with pytest.raises(DataError) as caught:
        trainer.train()
    assert str(caught.value) == (
        f"{name!r} of the source has token {token} in step 1: the model's vocabulary "
        f"has the tokens 0 to {size - 1}"
    )
    assert trainer.step == 0


class Tables(nn.Module):
    """An embedding of 12 rows and a layer of 7 outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 8), nn.Linear(8, 7)

    def forward(self, word):
        return self.head(self.table(word))


@pytest.mark.parametrize(
    ("field", "value", "stage", "reason"),
    [
        ("word", 12, 0, "index out of range in self"),
        ("kind", 7, 1, "Target 7 is out of bounds"),
    ],
)
def test_index_beyond_a_table_of_a_module_is_refused(field, value, stage, reason, tmp_path):
    rows = {"word": np.arange(16) % 12, "kind": np.arange(16) % 7}
    rows[field][-1] = value
    trainer = Trainer(
        {"batch": {"size": 16, "micro": 8}, "run": {"dir": str(tmp_path), "steps": 2}},
        model=ModelSource.from_module(
            Tables(),
            loss=lambda output, kind: functional.nll_loss(output.log_softmax(-1), kind),
            inputs={"word": InputSpec((), torch.int64)},
            targets={"kind": InputSpec((), torch.int64)},
        ),
        source=ArraySource(rows),
        quiet=True,
    )
    with pytest.raises(DataError) as caught:
        trainer.train()
    trainer.close()
    assert str(caught.value) == (
        f"stage {stage} reads an index that is out of range ({reason}). The batch has 'word' from "
        f"0 to {12 if field == 'word' else 11}, 'kind' from 0 to {7 if field == 'kind' else 6}. "
        "Give the model more rows in its embedding of tokens or of positions, or more outputs of "
        "its last layer; or use a tokenizer of fewer ids, or shorter sequences"
    )
    assert not (tmp_path / "checkpoints").exists()  # the next model starts in the same folder


def test_source_with_too_few_rows_is_refused(tmp_path):
    trainer, _ = trainer_of(CONTRASTIVE, Recipe(size=8, micro=4), tmp_path)
    source = trainer._data.training
    whole = source.batch
    source.batch = lambda *call: {name: rows[:-1] for name, rows in whole(*call).items()}
    with pytest.raises(DataError) as caught:
        trainer.train()
    assert str(caught.value) == (
        "expected 8 rows of 'left' from the source, got 7; `batch` must return a row per index"
    )


def test_source_without_arrays_is_refused(tmp_path):
    trainer, _ = trainer_of(CONTRASTIVE, Recipe(size=8, micro=4), tmp_path)
    trainer._data.training.batch = lambda *call: {}
    with pytest.raises(DataError) as caught:
        trainer.train()
    assert str(caught.value) == (
        "the batch lacks 'left': the model reads left, right; the source gave nothing"
    )


class OneBuffer:
    """A source that returns the same memory in every call; nobody else may write to it."""

    def __init__(self, source):
        self._source, self._buffers = source, {}

    def batch(self, step, indices, global_batch):
        found = {}
        for name, array in self._source.batch(step, indices, global_batch).items():
            buffer = self._buffers.setdefault(
                name, np.zeros((global_batch, *array.shape[1:]), array.dtype)
            )
            buffer[: len(array)] = array
            found[name] = buffer[: len(array)]
            found[name].flags.writeable = False
        return found


@pytest.mark.parametrize("engines", [1, 2])
def test_source_may_return_the_same_memory_in_every_call(engines, tmp_path):
    losses = []
    for wrap in (OneBuffer, lambda source: source):
        folder = tmp_path / str(len(losses))
        trainer, _ = trainer_of(CONTRASTIVE, Recipe(size=8, micro=4), folder, engines=engines)
        data = trainer._data.training
        data.batch = wrap(SimpleNamespace(batch=data.batch)).batch
        losses.append(trainer.train()["loss"])
    assert losses[0] == losses[1]


def test_strided_rows_train_as_contiguous_copies(tmp_path):
    rows = CONTRASTIVE.arrays(0)
    wide = {name: np.repeat(array, 2, axis=1)[:, ::2] for name, array in rows.items()}
    losses = []
    for number, given in enumerate((rows, wide)):
        trainer, _ = trainer_of(
            with_rows(CONTRASTIVE, given), Recipe(steps=6), tmp_path / str(number)
        )
        losses.append(trainer.train()["loss"])
    assert losses[0] == losses[1]


class Ends:
    """A source that fails after some steps, in training and in evaluations."""

    def __init__(self, source, steps: int, error: Exception) -> None:
        self._source, self._steps, self._error = source, steps, error
        self._evaluations = 0

    def batch(self, step, indices, global_batch):
        if step >= self._steps:
            raise self._error
        return self._source.batch(step, indices, global_batch)

    def evaluation_batches(self, batch_size, limit=None):
        for row in self._source.evaluation_batches(batch_size, limit):
            self._evaluations += 1
            if self._evaluations > self._steps:
                raise self._error
            yield row


ERRORS = [
    DataError("the file ends"),
    CorruptionError("the file is damaged"),
    KeyError("text"),
    OSError("the disk is gone"),
    InterruptedError("a system call"),
    StopIteration(),
]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_failure_of_the_source_loses_no_committed_step(error, tmp_path):
    case, recipe = language_model("gpt2"), Recipe(steps=8)
    source = Ends(case.data(recipe.seed), 5, error)
    settings = recipe.config(tmp_path / "run", checkpoint={"every": None})
    trainer = Trainer(settings, model=case.source(recipe.seed), source=source, quiet=True)
    with pytest.raises(PenstockError) as caught:
        trainer.train()
    assert error in (caught.value, caught.value.__cause__)
    if caught.value is not error:
        assert str(caught.value) == (
            f"the source failed to give rows of step 6: {type(error).__name__}: {error}"
        ).removesuffix(": ")
    assert read_state(find_checkpoint(tmp_path / "run" / "checkpoints", "latest")).step == 5


@pytest.mark.parametrize("error", ERRORS[:3], ids=repr)
def test_failure_of_the_held_out_source_loses_no_committed_step(error, tmp_path):
    case, recipe = CONTRASTIVE, Recipe(steps=8, size=8, micro=4)
    rows = case.data(recipe.seed)
    # One row is read before the first step, one after each second step.
    evaluation = {"every": 2, "batches": 1}
    settings = recipe.config(tmp_path / "run", checkpoint={"every": None}, evaluation=evaluation)
    held_out = Ends(rows, 4, error)
    trainer = Trainer(
        settings, model=case.source(recipe.seed), source=rows, held_out=held_out, quiet=True
    )
    with pytest.raises(PenstockError) as caught:
        trainer.train()
    assert error in (caught.value, caught.value.__cause__)
    saved = read_state(find_checkpoint(tmp_path / "run" / "checkpoints", "latest")).step
    assert 0 < saved == trainer.step < 8

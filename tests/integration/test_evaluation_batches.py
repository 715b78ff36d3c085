"""The number of batches that an evaluation announces, of Penstock's sources and of others."""

import pytest
from plain_training import Recipe, trainer_of
from tiny_models import language_model, with_rows


class OwnRows:
    """Held-out rows of the user's own, whose `samples_per_epoch` is not their number."""

    def __init__(self, rows, samples_per_epoch, most):
        self.rows, self.samples_per_epoch, self.most = rows, samples_per_epoch, most

    def evaluation_batches(self, size, limit):
        return self.rows.evaluation_batches(size, self.most or limit)


def announced(folder, held_out, batches):
    """Return the number of each batch of 8 rows with the number of batches."""
    recipe, found = Recipe(steps=1, warmup_steps=0), []
    trainer, _ = trainer_of(language_model("gpt2"), recipe, folder, held_out=held_out)
    trainer._evaluator.evaluate(batches, on_batch=lambda *numbers: found.append(numbers))
    trainer.close()
    return found


@pytest.mark.parametrize("samples", [None, float("inf"), 2])
@pytest.mark.parametrize(("most", "expected"), [(None, [2, 2]), (24, [2, 2, 3])])
def test_source_of_the_users_own_has_at_most_the_configured_batches(
    tmp_path, samples, most, expected
):
    """Unless it yields more rows than it was asked for."""
    rows = OwnRows(language_model("gpt2").data(1), samples, most)
    assert announced(tmp_path, rows, 2) == list(enumerate(expected, 1))


def test_few_rows_in_memory_are_counted(tmp_path):
    case = language_model("gpt2")
    rows = {name: values[:11] for name, values in case.arrays(9).items()}
    assert announced(tmp_path, with_rows(case, rows).data(0), 5) == [(1, 2), (2, 2)]

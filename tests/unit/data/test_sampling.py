"""Sampling is a pure function of (seed, step, index): complete, sliceable, without state."""

import random

import numpy as np
import pytest
from grids import thinned

from penstock.data import (
    ArraySource,
    LanguageModelSource,
    MaskedLanguageModelSource,
    TokenDataset,
    build_dataset,
)
from penstock.errors import DataError

T = 16
MASK = 257


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampling")
    rng = random.Random(11)
    for number in range(30):
        text = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(20, 300)))
        (folder / f"{number:02d}.txt").write_text(text)
    build_dataset(
        sorted(folder.glob("*.txt")), "bytes", folder / "set", validation=0.2,
        shard_bytes=512, chunk_bytes=128,
    )  # fmt: skip
    return TokenDataset.open(folder / "set")


def source_of(kind, dataset, seed=0):
    if kind == "language":
        return LanguageModelSource(dataset, "train", T, seed)
    if kind == "masked":
        return MaskedLanguageModelSource(dataset, "train", T, MASK, seed)
    rng = np.random.default_rng(2)
    arrays = {"x": rng.normal(size=(101, 3)).astype(np.float32), "y": rng.integers(0, 9, 101)}
    return ArraySource(arrays, seed)


def equal(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


KINDS = ["language", "masked", "array"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 3, 2**40])
def test_row_depends_only_on_seed_step_and_index(dataset, kind, seed):
    source = source_of(kind, dataset, seed)
    rng = random.Random(seed)
    for _ in range(20):
        step, size = rng.randrange(10**6), rng.randint(1, 24)
        whole = source.batch(step, range(size), size)
        assert equal(whole, source.batch(step, range(size), size))
        assert equal(whole, source_of(kind, dataset, seed).batch(step, list(range(size)), size))
        chosen = rng.choices(range(size), k=rng.randint(1, size))  # any slice, order, repetition
        rows = source.batch(step, chosen, size)
        assert equal(rows, {name: array[chosen] for name, array in whole.items()})
    assert not equal(source.batch(0, range(8), 8), source.batch(1, range(8), 8))
    assert not equal(
        source.batch(0, range(8), 8), source_of(kind, dataset, seed + 1).batch(0, range(8), 8)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_batches_may_be_changed_by_the_caller(dataset, kind):
    source = source_of(kind, dataset)
    first = source.batch(0, range(4), 4)
    kept = {name: array.copy() for name, array in first.items()}
    for array in first.values():
        array[...] = 0
    assert equal(source.batch(0, range(4), 4), kept)


@pytest.mark.parametrize("kind", KINDS)
def test_sample_order_is_independent_of_the_global_batch(dataset, kind):
    source = source_of(kind, dataset)
    runs = []
    for size in (1, 4, 6, 12):
        parts = [source.batch(step, range(size), size) for step in range(24 // size)]
        runs.append({k: np.concatenate([part[k] for part in parts]) for k in parts[0]})
    assert all(equal(runs[0], run) for run in runs[1:])


def windows_seen(dataset, source, epoch, size):
    """Which positions of the split one epoch reads, by searching for its windows in the split."""
    tokens = dataset.read("train", 0, dataset.tokens("train")).tobytes()
    found = []
    for number in range(epoch * source.windows_per_epoch, (epoch + 1) * source.windows_per_epoch):
        batch = source.batch(number // size, [number % size], size)
        row = np.append(batch["input_ids"][0], batch["labels"][0, -1]).astype("<u2")
        assert np.array_equal(batch["input_ids"][0, 1:], batch["labels"][0, :-1])
        position = tokens.find(row.tobytes())
        assert position >= 0
        found.append(position // 2)
    return found


@pytest.mark.parametrize(
    ("seed", "length"), thinned([0, 1, 99], [7, 16, 33], others=pytest.mark.long)
)
def test_each_window_is_drawn_once_per_epoch(dataset, seed, length):
    source = LanguageModelSource(dataset, "train", length, seed)
    total = dataset.tokens("train")
    assert source.windows_per_epoch == (total - 1) // length
    orders, offsets = [], set()
    for epoch in (0, 1, 2, 50):
        found = windows_seen(dataset, source, epoch, size=5)
        offset = min(found)
        assert sorted(found) == [
            offset + length * number for number in range(source.windows_per_epoch)
        ]
        assert max(found) + length + 1 <= total
        assert found != sorted(found)
        orders.append([position - offset for position in found])
        offsets.add(offset)
    assert len({tuple(order) for order in orders}) == 4
    if (total - 1) % length > 3:
        assert len(offsets) > 1


def test_fields_have_the_expected_types(dataset):
    batch = LanguageModelSource(dataset, "train", T).batch(3, [0, 2], 4)
    assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
        "input_ids": ((2, T), np.int64),
        "labels": ((2, T), np.int64),
    }
    assert all(array.flags.c_contiguous for array in batch.values())
    assert LanguageModelSource(dataset, "train", T).batch(3, [], 4)["input_ids"].shape == (0, T)


def test_evaluation_reads_the_split_in_order(dataset):
    source = LanguageModelSource(dataset, "validation", T, seed=5)
    tokens = dataset.read("validation", 0, dataset.tokens("validation")).astype(np.int64)
    batches = list(source.evaluation_batches(4))
    inputs = np.concatenate([batch["input_ids"] for batch in batches])
    labels = np.concatenate([batch["labels"] for batch in batches])
    count = (len(tokens) - 1) // T
    assert np.array_equal(inputs.ravel(), tokens[: count * T])
    assert np.array_equal(labels.ravel(), tokens[1 : count * T + 1])
    assert {len(batch["labels"]) for batch in batches[:-1]} == {4}
    again = list(LanguageModelSource(dataset, "validation", T, seed=6).evaluation_batches(4))
    assert all(equal(one, other) for one, other in zip(batches, again, strict=True))
    limited = list(source.evaluation_batches(4, limit=6))
    assert [len(batch["labels"]) for batch in limited] == [4, 2]
    assert equal(limited[0], batches[0])


def test_masking_follows_bert(dataset):
    source = MaskedLanguageModelSource(dataset, "train", 100, MASK, seed=1)
    assert source.vocab_size == 258
    rows = source.windows_per_epoch * 40
    batch = source.batch(0, range(rows), rows)
    inputs, labels = batch["input_ids"], batch["labels"]
    assert (batch["attention_mask"] == 1).all()
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int64)}
    chosen = labels != -100
    original = np.where(chosen, labels, inputs)
    assert (original < 257).all()
    assert (original[chosen] != dataset.end_of_document).all()
    eligible = (original != dataset.end_of_document).sum(axis=1)
    assert np.array_equal(chosen.sum(axis=1), np.rint(0.15 * eligible))
    masked = (inputs[chosen] == MASK).mean()
    same = (inputs[chosen] == labels[chosen]).mean()
    error = 4 / chosen.sum() ** 0.5  # four standard errors, at most half of this
    assert abs(masked - 0.8) < error
    assert abs(same - (0.1 + 0.1 / 257)) < error
    others = inputs[chosen & (inputs != MASK) & (inputs != labels)]
    assert others.max() < 257
    assert len(np.unique(others)) > 150
    by_place = chosen.sum(axis=0)  # [100], equally often but for chance
    chi_square = ((by_place - by_place.mean()) ** 2 / by_place.mean()).sum()
    assert chi_square < 99 + 5 * (2 * 99) ** 0.5
    assert equal(batch, source.batch(0, range(rows), rows))


def test_masking_changes_by_epoch_and_not_in_evaluation(dataset):
    source = MaskedLanguageModelSource(dataset, "validation", 50, MASK, seed=1)
    count = source.windows_per_epoch
    masks = []
    for epoch in range(2):
        batch = source.batch(epoch, range(count), count)
        assert (batch["labels"] != -100).any(axis=1).all()
        masks.append(sorted(map(bytes, batch["labels"] != -100)))
    assert masks[0] != masks[1]
    one, other = (list(source.evaluation_batches(3)) for _ in range(2))
    assert all(equal(a, b) for a, b in zip(one, other, strict=True))
    flat = np.concatenate([np.where(b["labels"] != -100, b["labels"], -1) for b in one]).ravel()
    tokens = dataset.read("validation", 0, flat.size).astype(np.int64)
    assert np.array_equal(flat[flat >= 0], tokens[flat >= 0])


def test_shortest_window_has_a_masked_token(dataset):
    source = MaskedLanguageModelSource(dataset, "train", 2, MASK)
    batch = source.batch(0, range(50), 50)
    original = np.where(batch["labels"] != -100, batch["labels"], batch["input_ids"])
    has_text = (original != dataset.end_of_document).any(axis=1)
    assert ((batch["labels"] != -100).sum(axis=1) == has_text).all()


@pytest.mark.parametrize("rows", [1, 2, 50, 101])
@pytest.mark.parametrize("seed", [0, 8])
def test_array_rows_stay_together_and_are_drawn_once_per_epoch(rows, seed):
    source = ArraySource({"x": np.arange(rows) * 10, "y": np.arange(rows)[:, None]}, seed)
    for epoch in range(3):
        batch = source.batch(epoch, range(rows), rows)
        assert np.array_equal(batch["x"], batch["y"][:, 0] * 10)
        assert sorted(batch["y"][:, 0].tolist()) == list(range(rows))
    evaluated = np.concatenate([batch["x"] for batch in source.evaluation_batches(7)])
    assert np.array_equal(evaluated, np.arange(rows) * 10)


def test_sources_describe_themselves(dataset):
    total = dataset.tokens("train")
    windows = (total - 1) // T
    assert LanguageModelSource(dataset, "train", T).describe() == (
        f"train split of {dataset.path}: {total:,} tokens of a vocabulary of 257, {windows:,} "
        "windows of 16"
    )
    assert MaskedLanguageModelSource(dataset, "train", T, MASK).describe().endswith(", 15% masked")
    assert source_of("array", dataset).describe() == ("101 rows in memory: x float32[3], y int64[]")


def refused(call, *args, **options):
    with pytest.raises(DataError) as error:
        call(*args, **options)
    return str(error.value)


def test_invalid_sampling_is_refused(dataset):
    total = dataset.tokens("validation")
    assert refused(LanguageModelSource, dataset, "validation", total) == (
        f"split 'validation' of data set {dataset.path} has {total} tokens, one sequence of "
        f"{total} needs {total + 1}; shorten the sequences or add text"
    )
    LanguageModelSource(dataset, "validation", total - 1)
    MaskedLanguageModelSource(dataset, "validation", total, MASK)
    assert refused(LanguageModelSource, dataset, "train", 0) == (
        "a sequence length must be 1 or more, got 0"
    )
    assert refused(LanguageModelSource, dataset, "test", 8) == (
        f"data set {dataset.path} has no split 'test'; it has train, validation"
    )
    source = LanguageModelSource(dataset, "train", T)
    assert refused(source.batch, 2, [3, 4], 4) == (
        "expected a step from 0 and indices in [0, 4), the global batch; got step 2 and indices "
        "[3, 4]"
    )
    assert refused(ArraySource, {"x": np.zeros((3, 2)), "y": np.zeros(4)}) == (
        "arrays must have equally many rows, at least one, in their first dimension; got x (3, 2), "
        "y (4,)"
    )
    assert refused(ArraySource, {}).endswith("got no arrays")
    assert refused(ArraySource, {"x": np.zeros((0, 2))}).endswith("got x (0, 2)")
    assert refused(ArraySource, {"x": np.float32(1)}).endswith("got x ()")

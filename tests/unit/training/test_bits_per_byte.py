"""`bits_per_byte` of an evaluation: of the text of the held-out split alone."""

import json
import math
from types import SimpleNamespace

import pytest

from penstock.data import LanguageModelSource, TokenDataset, build_dataset
from penstock.data.manifest import checksum_of
from penstock.data.packing import hash_share
from penstock.training.evaluation import Evaluator

HELD_OUT = 0.3


@pytest.fixture
def folder(tmp_path):
    """A data set of byte tokens: 100 tokens for 99 bytes of a training document, 2 tokens for the
    single byte of a held-out document."""
    held_out = [number > 0 and hash_share(0, number) < HELD_OUT for number in range(60)]
    texts = ["x" if held else "a" * 99 for held in held_out]
    assert 5 < sum(held_out) < 30
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    build_dataset(
        [tmp_path / "a.jsonl"], "bytes", tmp_path / "set", validation=HELD_OUT, shard_bytes=64
    )
    return tmp_path / "set"


def evaluated(folder, monkeypatch, loss, split="validation"):
    """The metrics of a model whose loss is `loss` nats for every token."""

    def add(self, counts, rows):
        tokens = rows["labels"].numel()
        counts.weight += tokens
        counts.loss += tokens * loss

    monkeypatch.setattr(Evaluator, "_add", add)
    config = SimpleNamespace(batch=SimpleNamespace(size=2))
    model, layout = SimpleNamespace(loss_reduction="sum"), SimpleNamespace(micro_batch=2)
    source = LanguageModelSource(TokenDataset.open(folder), split, 4)
    return Evaluator(config, model, layout, None, source, "cpu").evaluate(batches=100)


def test_bits_per_byte_counts_the_bytes_of_the_held_out_split(folder, monkeypatch):
    loss = 1.5 * math.log(2)  # 1.5 bits per token
    found = evaluated(folder, monkeypatch, loss)
    assert found["bits_per_byte"] == pytest.approx(1.5 * 2 / 1)
    found = evaluated(folder, monkeypatch, loss, "train")
    assert found["bits_per_byte"] == pytest.approx(1.5 * 100 / 99)


def test_bits_per_byte_is_left_out_if_the_bytes_of_the_split_are_unknown(folder, monkeypatch):
    file = folder / "dataset.json"
    content = json.loads(file.read_text())
    for key in ("checksum", "content"):
        del content[key]
    for split in content["splits"].values():
        del split["text_bytes"]
    content["version"] = 1
    file.write_text(json.dumps(content | {"checksum": checksum_of(content)}))
    found = evaluated(folder, monkeypatch, 2.0)
    assert found["loss"] == pytest.approx(2.0)
    assert "bits_per_byte" not in found

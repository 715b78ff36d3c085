"""The run's own data set: what is left of building it."""

import pytest

from penstock.config import Config
from penstock.data import TokenDataset, build_dataset
from penstock.errors import DataError
from penstock.models import ModelSource
from penstock.training import data_loading

TINY = ModelSource.from_preset("tiny", {})


def settings_of(folder, text):
    return Config.from_mapping(
        {
            "model": {"preset": "tiny", "n_positions": 16},
            "data": {
                "input": [str(text)],
                "tokenizer": "bytes",
                "sequence_length": 16,
                "validation": 0.2,
            },
            "run": {"dir": str(folder / "run")},
        }
    )


def test_free_pages_of_the_build_are_returned_to_the_system(tmp_path, monkeypatch):
    """They would be counted as memory of libraries, in the first process of a run only; those of a
    tokenizer too, before the run is judged."""
    (tmp_path / "text.txt").write_text("water streams\n" * 200)
    config, events = settings_of(tmp_path, tmp_path / "text.txt"), []
    build = data_loading.build_dataset

    def noting(*arguments, **options):
        events.append("built")
        return build(*arguments, **options)

    monkeypatch.setattr(data_loading, "build_dataset", noting)
    monkeypatch.setattr(data_loading, "return_free_pages", lambda: events.append("returned"))
    for _ in range(2):
        data_loading.open_data(config, TINY, lambda text: None)
    assert events == ["returned", "built", "returned"]


def test_data_set_of_some_files_is_not_compared_with_all_of_them(tmp_path):
    """The demo's, say, which leaves out the caches of Python."""
    texts, folder = tmp_path / "texts", tmp_path / "run" / "data"
    texts.mkdir()
    (texts / "a.txt").write_text("water streams\n" * 200)
    (texts / "b.bin").write_bytes(b"\xff")
    folder.parent.mkdir()
    build_dataset([texts], "bytes", folder, validation=0.2, glob="*.txt")
    before = (folder / "dataset.json").read_bytes()
    notices = []
    data_loading.open_data(settings_of(tmp_path, texts), TINY, notices.append)
    assert (folder / "dataset.json").read_bytes() == before
    assert not any("changed" in text for text in notices)


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        ("tiny", "set the model's vocab_size to 257, or a little more"),
        (
            {"hf": "folder"},
            "its ids are hardly those that the model was trained with; the model's own tokenizer "
            "is data.tokenizer=auto",
        ),
    ],
)
def test_note_on_unused_ids_suits_the_source_of_the_model(tmp_path, model, advice):
    (tmp_path / "text.txt").write_text("water streams\n" * 200)
    build_dataset([tmp_path / "text.txt"], "bytes", tmp_path / "set", validation=0.2)
    dataset, notices = TokenDataset.open(tmp_path / "set"), []
    config = Config.from_mapping({"model": model, "data": {"path": str(tmp_path / "set")}})
    data_loading._note_unused_ids(config, 512, dataset, notices.append)
    assert notices == [
        "the model has a vocabulary of 512, the data set's tokenizer, bytes, has 257 ids: 255 rows "
        f"of the embedding are never used; {advice}"
    ]
    data_loading._note_unused_ids(config, 260, dataset, notices.append)
    assert len(notices) == 1


def test_small_data_set_that_the_run_cannot_use_is_removed_by_the_start_that_built_it(tmp_path):
    """A configuration with more text would otherwise meet the data set of the first one."""
    text, folder = tmp_path / "text.txt", tmp_path / "run" / "data"
    text.write_text("too short")
    config = settings_of(tmp_path, text)
    with pytest.raises(DataError) as refusal:
        data_loading.open_data(config, TINY, lambda text: None)
    assert str(refusal.value).endswith(
        f"shorten the sequences or add text. {folder}, which this start has built, was removed; "
        "the next builds it again"
    )
    assert not list(folder.parent.iterdir())
    text.write_text("water streams\n" * 200)
    assert data_loading.open_data(config, TINY, lambda text: None).dataset is not None


def test_data_set_of_an_earlier_start_is_kept_and_named_in_the_refusal(tmp_path):
    text, folder = tmp_path / "text.txt", tmp_path / "run" / "data"
    text.write_text("water streams\n" * 200)
    config = settings_of(tmp_path, text)
    data_loading.open_data(config, TINY, lambda text: None)
    smaller = ModelSource.from_preset("tiny", {"vocab_size": 100})
    with pytest.raises(DataError) as refusal:
        data_loading.open_data(config, smaller, lambda text: None)
    assert str(refusal.value).endswith(
        f". {folder} is kept: if you change the text or the tokenizer, delete it, so that the next "
        "start builds it again"
    )
    assert (folder / "dataset.json").exists()


def test_large_data_set_that_this_start_has_built_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(data_loading, "_SMALL_TOKENS", 8)
    (tmp_path / "text.txt").write_text("too short")
    with pytest.raises(DataError, match="is kept: if you change the text"):
        data_loading.open_data(
            settings_of(tmp_path, tmp_path / "text.txt"), TINY, lambda text: None
        )
    assert (tmp_path / "run" / "data" / "dataset.json").exists()

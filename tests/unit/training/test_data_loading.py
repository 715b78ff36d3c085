"""The data set of a run: its build, and the refusal of one that the run cannot use."""

import pytest

from penstock.config import Config
from penstock.data import TokenDataset, build_dataset
from penstock.errors import DataError
from penstock.models import ModelSource
from penstock.training import data_loading
from penstock.training.resume_state import ResumeState

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


def changed(config, **changes):
    values = config.model_dump(mode="json")
    for name, change in changes.items():
        values[name] |= change
    return Config.from_mapping(values)


def test_refused_build_leaves_nothing(tmp_path):
    """A configuration with more text would otherwise meet the data set of the first one."""
    text, folder = tmp_path / "text.txt", tmp_path / "run" / "data"
    text.write_text("too short")
    config = settings_of(tmp_path, text)
    with pytest.raises(DataError) as refusal:
        data_loading.open_data(config, TINY, lambda text: None)
    assert str(refusal.value) == (
        f"split 'train' of data set {folder} has 8 tokens, one sequence of 16 needs 17; shorten "
        f"the sequences or add text. {folder} was not kept: the next start builds it"
    )
    assert list(tmp_path.iterdir()) == [text]
    text.write_text("water streams\n" * 200)
    assert data_loading.open_data(config, TINY, lambda text: None).dataset is not None


def test_start_during_the_check_of_another_does_not_open_an_unchecked_data_set(
    tmp_path, monkeypatch
):
    """The first one's check refuses the data set, which the second one could use."""
    text, refusals = tmp_path / "text.txt", []
    text.write_text("water streams")
    first = changed(settings_of(tmp_path, text), data={"validation": 0.0})
    second = changed(first, data={"sequence_length": 8})
    check = data_loading._check_content

    def with_second_start(*arguments):
        monkeypatch.setattr(data_loading, "_check_content", check)
        with pytest.raises(DataError) as refusal:
            data_loading.open_data(second, TINY, lambda text: None)
        refusals.append(str(refusal.value))
        check(*arguments)

    monkeypatch.setattr(data_loading, "_check_content", with_second_start)
    with pytest.raises(DataError, match="one sequence of 16 needs 17"):
        data_loading.open_data(first, TINY, lambda text: None)
    folder = tmp_path / "run" / "data"
    assert refusals == [
        f"another process is building {folder} now; wait until it ends, or choose another folder"
    ]
    opened = data_loading.open_data(second, TINY, lambda text: None)
    with pytest.raises(DataError, match="one sequence of 16 needs 17"):
        data_loading.open_data(first, TINY, lambda text: None)
    assert opened.training.batch(0, [0], 1)["input_ids"].shape == (1, 8)  # it is still there


OWN = "To change the text or the tokenizer, delete {}: the next start builds it again"
SHARED = "Other runs may use {}: for other text or another tokenizer, choose another data.path"
RESUMED = "The run resumes with {}: for other text or another tokenizer, choose another run.dir"


@pytest.mark.parametrize(
    ("is_shared", "is_resumed", "advice"),
    [(False, False, OWN), (True, False, SHARED), (False, True, RESUMED), (True, True, RESUMED)],
)
def test_advice_on_an_unusable_data_set_suits_its_users(tmp_path, is_shared, is_resumed, advice):
    text = tmp_path / "text.txt"
    text.write_text("water streams\n" * 200)
    config = settings_of(tmp_path, text)
    if is_shared:
        config = changed(config, data={"path": str(tmp_path / "set")})
    data_loading.open_data(config, TINY, lambda text: None)
    recorded = ResumeState({}, None, None, None, None, None, 0) if is_resumed else None
    smaller = ModelSource.from_preset("tiny", {"vocab_size": 100})
    with pytest.raises(DataError) as refusal:
        data_loading.open_data(config, smaller, lambda text: None, recorded)
    assert str(refusal.value) == (
        f"data set {config.data_dir} has token ids up to 256 (vocabulary 257), model has "
        "vocab_size 100; set the model's vocab_size to 257 or more, or build the data set again "
        f"with the model's tokenizer. {advice.format(config.data_dir)}"
    )
    assert (config.data_dir / "dataset.json").exists()

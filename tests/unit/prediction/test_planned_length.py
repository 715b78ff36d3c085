"""The tokens per sequence of a plan: those of training, or the plan says that they are unknown."""

import json

import pytest
from records import byte_tokens, random_records, write_records
from rich.console import Console

from penstock.config import Config
from penstock.data import build_dataset
from penstock.errors import ConfigError, DataError
from penstock.machines import MachineDescription, load_gpu_cluster
from penstock.models import ModelSource
from penstock.prediction import Planner, as_json, page
from penstock.prediction.planned_length import planned_length
from penstock.training.data_loading import open_data

RATES = [{"work": "product", "rates": [1e11]}, {"work": "pointwise", "rates": [1e10]}]
STORE = {"memory": "24GiB", "rates": [{"work": "update", "rates": [1e10]}]}
DESK = MachineDescription.model_validate(
    {"name": "desk", "kind": "host", "engine": {"is_host": True, "rates": RATES}, "store": STORE}
)
CONTEXT = 256  # of the preset
RECORDS = random_records(seed=1, count=40)
LONGEST = max(sum(map(len, byte_tokens(record))) - 1 for record in RECORDS)
BLOOM = {"model_type": "bloom", "n_layer": 2, "hidden_size": 32, "n_head": 4, "vocab_size": 300}


@pytest.fixture(autouse=True)
def _kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    write_records(tmp_path / "records.jsonl", RECORDS)
    return tmp_path


def settings(folder, model="tiny", **data):
    """Return a run that builds its own data set from records."""
    given = {"input": [str(folder / "records.jsonl")], "content": "records", "validation": 0.2}
    return Config.from_mapping(
        {
            "model": model,
            "data": {**given, **data},
            "batch": {"size": 8},
            "run": {"dir": str(folder / "run")},
        }
    )


def build(config):
    """Build the data set as training does, and return the length of its sequences."""
    return open_data(config, ModelSource.from_preset("tiny"), lambda text: None).sequence_length


def shown(prediction):
    console = Console(width=400)
    with console.capture() as capture:
        console.print(page(prediction, ()))
    return capture.get()


def note_of(folder):
    place = folder / "run" / "data"
    return (
        f"data.sequence_length: the longest record is not known before the data set {place} is "
        "built; planned for 256 tokens, the longest sequence of tiny; set this key, or "
        f"build the data set first (`penstock data build ... --out {place}`)"
    )


def test_built_records_are_planned_at_the_length_of_training(folder):
    config, notices = settings(folder), []
    before = Planner(notices.append).plan(config, DESK)
    assert build(config) == LONGEST < CONTEXT
    notices.clear()
    after = Planner(notices.append).plan(config, DESK)
    assert after.plan.sequence_length == LONGEST
    assert after.tokens == 8 * LONGEST
    assert after.peak_memory_bytes < before.peak_memory_bytes
    assert after.step_seconds < before.step_seconds
    assert as_json(after, [])["sequence_length_note"] is None
    assert "the longest record" not in shown(after)
    assert notices == []


def test_records_that_are_not_built_are_named_on_the_page_and_in_json(folder):
    notices = []
    found = Planner(notices.append).plan(settings(folder), DESK)
    assert found.plan.sequence_length == CONTEXT
    assert notices == [note_of(folder)]
    assert json.loads(json.dumps(as_json(found, [])))["sequence_length_note"] == note_of(folder)
    assert (
        "This is for sequences of 256 tokens, the most that the model takes: the longest record is "
        "not known before the data set is built."
    ) in shown(found)


def test_gpus_are_planned_at_the_length_of_the_records_too(folder):
    config, notices = settings(folder), []
    cluster = load_gpu_cluster("a100-cluster")
    before = Planner(notices.append).plan_on_gpus(config, cluster)
    assert before.figures.sequence_length == CONTEXT
    assert before.as_json()["sequence_length_note"] == note_of(folder)
    assert any("the longest record is not known" in line for line in before.lines())
    assert notices == [note_of(folder)]
    build(config)
    after = Planner().plan_on_gpus(config, cluster)
    assert after.figures.sequence_length == LONGEST
    assert after.as_json()["sequence_length_note"] is None
    assert not any("the longest record" in line for line in after.lines())


def test_several_plans_notice_an_unknown_length_once(folder):
    notices = []
    planner = Planner(notices.append)
    for size in (8, 16):
        changed = Config.from_mapping(settings(folder).to_mapping(), [f"batch.size={size}"])
        planner.plan(changed, DESK)
    assert notices == [note_of(folder)]


@pytest.mark.parametrize("is_built", [False, True])
def test_configured_length_needs_no_records(folder, is_built):
    if is_built:
        build(settings(folder))
    model = ModelSource.from_preset("tiny")
    found = planned_length(settings(folder, sequence_length=100), model)
    assert (found.tokens, found.note) == (100, None)


def test_text_is_planned_at_the_context(folder):
    config, model = settings(folder, content="text"), ModelSource.from_preset("tiny")
    assert planned_length(config, model).tokens == CONTEXT
    assert planned_length(config, model).note is None
    (folder / "a.txt").write_text("water " * 400)
    build_dataset([folder / "a.txt"], "bytes", folder / "run" / "data")
    assert planned_length(config, model).tokens == CONTEXT
    assert planned_length(config, model).note is None


def test_records_in_a_data_set_of_the_users_are_read(folder):
    build_dataset([folder / "records.jsonl"], "bytes", folder / "set", content="records")
    config = Config.from_mapping({"model": "tiny", "data": {"path": str(folder / "set")}})
    assert planned_length(config, ModelSource.from_preset("tiny")).tokens == LONGEST


def test_folder_without_a_data_set_is_refused_as_by_training(folder):
    config = settings(folder)
    config.data_dir.mkdir(parents=True)
    messages = []
    for attempt in (build, lambda given: Planner().plan(given, DESK)):
        with pytest.raises(DataError) as caught:
            attempt(config)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_model_without_a_longest_sequence_needs_the_length_or_its_records(folder):
    source = ModelSource.from_hf_config(BLOOM)
    place = folder / "run" / "data"
    with pytest.raises(ConfigError) as caught:
        planned_length(settings(folder), source)
    assert str(caught.value) == (
        f"data.sequence_length: the longest record is not known before the data set {place} is "
        "built, and bloom defines no maximum length of a sequence; set this key, or build the data "
        f"set first (`penstock data build ... --out {place}`)"
    )
    build(settings(folder))
    assert planned_length(settings(folder), source).tokens == LONGEST


def test_text_for_a_model_without_a_longest_sequence_is_refused_as_by_training(folder):
    config = settings(folder, content="text")
    with pytest.raises(ConfigError) as caught:
        planned_length(config, ModelSource.from_hf_config(BLOOM))
    assert str(caught.value) == (
        "data.sequence_length: bloom defines no maximum length of a sequence; set this key"
    )

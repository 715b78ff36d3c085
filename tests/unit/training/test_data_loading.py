"""The run's own data set: what is left of building it."""

from penstock.config import Config
from penstock.models import ModelSource
from penstock.training import data_loading


def test_free_pages_of_the_build_are_returned_to_the_system(tmp_path, monkeypatch):
    """They would be counted as memory of libraries, in the first process of a run only."""
    (tmp_path / "text.txt").write_text("water streams\n" * 200)
    settings = {
        "model": {"preset": "tiny", "n_positions": 16},
        "data": {
            "input": [str(tmp_path / "text.txt")],
            "tokenizer": "bytes",
            "sequence_length": 16,
        },
        "run": {"dir": str(tmp_path / "run")},
    }
    config, source = Config.from_mapping(settings), ModelSource.from_preset("tiny", {})
    events = []
    build = data_loading.build_dataset

    def noting(*arguments, **options):
        events.append("built")
        return build(*arguments, **options)

    monkeypatch.setattr(data_loading, "build_dataset", noting)
    monkeypatch.setattr(data_loading, "return_free_pages", lambda: events.append("returned"))
    for _ in range(2):
        data_loading.open_data(config, source, lambda text: None)
    assert events == ["built", "returned"]

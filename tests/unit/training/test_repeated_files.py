"""A run says if an older release read files several times for its data set."""

import json

from penstock.config import Config
from penstock.data import TokenDataset, build_dataset
from penstock.data.manifest import checksum_of
from penstock.training.data_loading import _note_repeated_files


def notices(inputs, **data):
    config = Config.from_mapping({"data": {"input": inputs, **data}, "run": {"dir": "run"}})
    told = []
    _note_repeated_files(config, TokenDataset.open(config.data_dir), told.append)
    return told


def test_data_set_of_an_older_release_with_repeated_files_gives_a_notice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts" / "sub").mkdir(parents=True)
    for name in ("a", "sub/b", "sub/c"):
        (tmp_path / "texts" / f"{name}.txt").write_text(f"text of {name}")
    build_dataset(["texts/**/*"], "bytes", "run/data", validation=0)
    assert notices(["texts/**/*"]) == []
    file = tmp_path / "run/data/dataset.json"
    content = json.loads(file.read_text())
    for key in ("checksum", "content"):
        del content[key]
    del content["splits"]["train"]["text_bytes"]
    content["version"] = 1
    file.write_text(json.dumps(content | {"checksum": checksum_of(content)}))
    assert notices(["texts/**/*"]) == [
        "run/data was built by an older release, which read 2 files of data.input more than once: "
        "held-out documents may also be trained on, and the held-out loss is then too low. To "
        "start a new run without them, delete run/data or choose another run.dir; a run that began "
        "with this data set needs it to resume"
    ]
    assert notices(["texts"]) == []
    assert notices(["gone/*"]) == []
    assert notices(["texts/**/*"], path="run/data") == []

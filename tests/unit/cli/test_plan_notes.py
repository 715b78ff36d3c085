"""What `penstock plan` notes of a run that `penstock train` would refuse."""

import pytest

from penstock.cli.plan import _note_missing_data
from penstock.config import Config


@pytest.mark.parametrize(
    ("data", "note"),
    [
        (
            {"input": ["texts/*.txt"]},
            "note: `penstock train` would refuse this run: data.input[0]: 'texts/*.txt' matches no "
            "file; paths are relative to the current folder, {folder}\n",
        ),
        (
            {"path": "set"},
            "note: `penstock train` would refuse this run: data.path: set does not exist; make it "
            "with `penstock data build --input FILES --tokenizer bytes --out set`, or list files "
            "in data.input\n",
        ),
        ({"input": ["here.txt"]}, ""),
        ({}, ""),
    ],
)
def test_plan_notes_data_that_does_not_exist(tmp_path, monkeypatch, capsys, data, note):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.txt").write_text("words")
    _note_missing_data(Config.from_mapping({"model": "tiny", "data": data}))
    assert capsys.readouterr().err == note.format(folder=tmp_path)

"""Publication: a data set appears whole under its name, whatever other builds do meanwhile."""

import contextlib
import json

import pytest
from refused_builds import leftovers

from penstock.data import TokenDataset, build_dataset, publish
from penstock.data.publish import published_folder
from penstock.errors import DataError


def lines_in(folder):
    """A file of text, `a.jsonl`."""
    texts = [f"stream the weights, layer {number}" for number in range(20)]
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_second_build_of_the_same_folder_is_refused(tmp_path):
    source = lines_in(tmp_path)
    with published_folder(tmp_path / "out") as folder:
        (folder / "mine").write_text("x")
        with pytest.raises(DataError) as error:
            build_dataset([source], "bytes", tmp_path / "out")
        assert str(error.value) == (
            f"another process is building {tmp_path / 'out'} now; wait until it ends, or choose "
            "another folder"
        )
    assert leftovers(tmp_path / "out") == ["mine"]


def test_build_that_begins_when_another_ends_keeps_its_files(tmp_path, monkeypatch):
    out = tmp_path / "out"
    begun = contextlib.ExitStack()

    def begin_another(folder):
        if folder == tmp_path:  # after the move
            other = begun.enter_context(published_folder(out, lambda _: True))
            (other / "theirs").write_text("x")

    with monkeypatch.context() as patch:
        patch.setattr(publish.durable, "sync_folder", begin_another)
        with published_folder(out, lambda _: True) as folder:
            (folder / "mine").write_text("x")
        assert leftovers(out) == ["mine"]
    begun.close()
    assert leftovers(out) == ["theirs"]
    assert leftovers(tmp_path) == ["out"]


def test_files_of_a_killed_build_are_removed(tmp_path):
    source = lines_in(tmp_path)
    stale = tmp_path / ".out.building"
    (stale / "folder").mkdir(parents=True)
    (stale / "train-00000.bin").write_bytes(b"half")
    build_dataset([source], "bytes", tmp_path / "out")
    assert leftovers(tmp_path) == ["a.jsonl", "out"]
    assert "folder" not in leftovers(tmp_path / "out")
    TokenDataset.open(tmp_path / "out", verify=True)


def test_a_link_to_a_data_set_stays_a_link(tmp_path):
    source = lines_in(tmp_path)
    build_dataset([source], "bytes", tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    build_dataset([source], "bytes", tmp_path / "link", seed=4, overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert TokenDataset.open(tmp_path / "real", verify=True).manifest.seed == 4
    assert leftovers(tmp_path) == ["a.jsonl", "link", "real"]


def test_target_of_a_dangling_link_is_created(tmp_path):
    source = lines_in(tmp_path)
    (tmp_path / "link").symlink_to("real")
    build_dataset([source], "bytes", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    TokenDataset.open(tmp_path / "real", verify=True)


def test_overwrite_works_without_atomic_exchange(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "_exchange", lambda first, second: False)
    source = lines_in(tmp_path)
    for seed in (1, 2):
        build_dataset([source], "bytes", tmp_path / "out", seed=seed, overwrite=True)
        assert TokenDataset.open(tmp_path / "out", verify=True).manifest.seed == seed
    assert leftovers(tmp_path) == ["a.jsonl", "out"]

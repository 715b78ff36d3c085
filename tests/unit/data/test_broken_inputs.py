"""Building from several broken files: all are named, within a bounded search."""

import pytest
from refused_builds import refused

from penstock.data import build as build_module, build_dataset
from penstock.data.sources import BLOCK_BYTES, read_pieces
from penstock.errors import DataError


@pytest.mark.parametrize("tokenizer", ["bytes", "train-bpe:300"])
def test_all_broken_files_are_named_together(tmp_path, tokenizer, monkeypatch):
    for name in ("a", "c", "e"):
        (tmp_path / f"{name}.txt").write_text("good text " * 50)
    (tmp_path / "b.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "d.jsonl").write_text('{"text": "x"}\n{"text": 1}\n')
    out = tmp_path.parent / f"{tmp_path.name}-out"
    not_utf8 = "byte 3 (0xe9) is not UTF-8 text (invalid continuation byte); convert the file to "
    not_utf8 += "UTF-8 or remove it"
    lines = [
        f"{tmp_path / 'b.txt'}: {not_utf8}",
        f"{tmp_path / 'd.jsonl'}:2: field 'text' must be text, got a number",
    ]
    assert refused(tmp_path, [tmp_path], tokenizer, out).split("\n  ") == [
        "2 input files cannot be used:",
        *lines,
    ]
    for number in range(5):
        (tmp_path / f"f{number}.txt").write_bytes(b"caf\xe9 au lait")
    assert refused(tmp_path, [tmp_path], tokenizer, out).split("\n  ") == [
        "7 input files cannot be used:",
        *lines,
        *(f"{tmp_path / f'f{number}.txt'}: as {tmp_path / 'b.txt'}" for number in range(3)),
        "and 2 more",
    ]
    monkeypatch.setattr(build_module, "CHECKED_BYTES", 500)  # c.txt
    assert refused(tmp_path, [tmp_path], tokenizer, out) == lines[0]
    monkeypatch.setattr(build_module, "CHECKED_BYTES", 600)  # and d.jsonl
    assert refused(tmp_path, [tmp_path], tokenizer, out).split("\n  ") == [
        "2 input files cannot be used:",
        *lines,
        "not checked: 6 further files",
    ]
    assert not out.exists()


def test_search_for_other_broken_files_is_bounded(tmp_path, monkeypatch):
    for number in range(200):
        (tmp_path / f"{number:03}.txt").write_bytes(b"\xe9")
    opened = []

    def read(path, field):
        opened.append(path.name)
        yield from read_pieces(path, field)

    monkeypatch.setattr(build_module, "read_pieces", read)
    out = tmp_path.parent / f"{tmp_path.name}-out"
    lines = refused(tmp_path, [tmp_path], "bytes", out).split("\n  ")
    assert len(opened) == 101
    assert lines[0] == "101 input files cannot be used:"
    assert lines[6:] == ["and 96 more", "not checked: 99 further files"]
    opened.clear()
    monkeypatch.setattr(build_module, "CHECKED_BYTES", 10 * BLOCK_BYTES)
    lines = refused(tmp_path, [tmp_path], "bytes", out).split("\n  ")
    assert len(opened) == 11
    assert lines[6:] == ["and 6 more", "not checked: 189 further files"]


def test_file_in_which_the_search_ends_is_not_checked(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"\xe9")
    (tmp_path / "b.txt").write_bytes(b"\xe9")
    (tmp_path / "c.txt").write_text("good text " * 50)
    monkeypatch.setattr(build_module, "CHECKED_BYTES", BLOCK_BYTES + 100)
    out = tmp_path.parent / f"{tmp_path.name}-out"
    lines = refused(tmp_path, [tmp_path], "bytes", out).split("\n  ")
    assert lines[0] == "2 input files cannot be used:"
    assert lines[3:] == ["not checked: 1 further file"]


def test_interrupted_search_reports_what_it_has_found(tmp_path, monkeypatch):
    cause = ValueError("the cause")

    def read(path, field):
        if path.name == "c.txt":
            raise KeyboardInterrupt
        raise DataError(f"{path}: broken") from cause
        yield

    monkeypatch.setattr(build_module, "read_pieces", read)
    out = tmp_path.parent / f"{tmp_path.name}-out"
    for name in ("a.txt", "c.txt", "d.txt"):
        (tmp_path / name).write_text("x")
    with pytest.raises(DataError) as caught:
        build_dataset([tmp_path], "bytes", out)
    assert str(caught.value) == f"{tmp_path / 'a.txt'}: broken"
    (tmp_path / "b.txt").write_text("x")
    with pytest.raises(DataError) as caught:
        build_dataset([tmp_path], "bytes", out)
    assert str(caught.value).split("\n  ") == [
        "2 input files cannot be used:",
        f"{tmp_path / 'a.txt'}: broken",
        f"{tmp_path / 'b.txt'}: as {tmp_path / 'a.txt'}",
        "not checked: 2 further files",
    ]
    assert caught.value.__cause__ is cause

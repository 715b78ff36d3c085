"""Reading text: what documents a file holds, and what is said of a file that is broken."""

import json
import random
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.data import sources
from penstock.data.sources import PIECE_CHARACTERS, find_files, read_pieces
from penstock.errors import DataError


def documents(path, field="text"):
    """The documents of a file, put together again from their pieces."""
    found, text = [], ""
    for piece in read_pieces(path, field):
        assert 0 < len(piece.text) <= PIECE_CHARACTERS
        text += piece.text
        if piece.ends_document:
            found.append(text)
            text = ""
    assert text == ""
    return found


def refusal(path, field="text"):
    with pytest.raises(DataError) as error:
        list(read_pieces(path, field))
    return str(error.value)


def random_text(seed, length):
    rng = random.Random(seed)
    letters = "abc déf\n\n  \t東🚀\r"
    return "".join(rng.choices(letters, k=length))


@pytest.mark.parametrize("seed", range(3))
def test_text_file_is_one_exact_document(tmp_path, seed):
    file = tmp_path / "a.txt"
    for length in (1, 1000, PIECE_CHARACTERS, PIECE_CHARACTERS + 1, 3 * PIECE_CHARACTERS + 7):
        text = random_text(seed, length)
        file.write_bytes(text.encode())
        assert documents(file) == [text], (seed, length)


def test_text_without_cut_position_is_read_exactly(tmp_path):
    text = "é" * (2 * PIECE_CHARACTERS + 5)
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert documents(tmp_path / "a.txt") == [text]


def test_piece_cuts_do_not_change_gpt2_word_splitting(tmp_path):
    from tokenizers import pre_tokenizers

    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True).pre_tokenize_str
    rng = random.Random(1)
    line = ["x = 1", "    return y", "", "", "# it's  two", "z\t"]
    text = "\n".join(rng.choice(line) for _ in range(80_000))
    (tmp_path / "a.py").write_text(text)
    pieces = [piece.text for piece in read_pieces(tmp_path / "a.py")]
    assert len(pieces) > 1
    together = [word for piece in pieces for word, _ in split(piece)]
    assert together == [word for word, _ in split(text)]


def test_byte_order_mark_is_removed(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\ufeff".encode())
    (tmp_path / "a.jsonl").write_bytes("\ufeff".encode() + b'{"text": "one"}\n')
    assert documents(tmp_path / "a.txt") == ["one\ufeff"]
    assert documents(tmp_path / "a.jsonl") == ["one"]


def test_json_lines_and_parquet_give_the_same_documents(tmp_path):
    texts = [random_text(n, n * 37 + 1) for n in range(300)]
    with (tmp_path / "a.jsonl").open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"id": 1, "text": text}, ensure_ascii=len(text) % 2 == 0) + "\n")
        file.write("\n  \n")
    for kind in (pa.string(), pa.large_string()):
        pq.write_table(
            pa.table({"text": pa.array(texts, kind)}), tmp_path / "a.parquet", row_group_size=70
        )
        assert documents(tmp_path / "a.parquet") == texts
    assert documents(tmp_path / "a.jsonl") == texts


def test_text_field_is_configurable(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": 1, "body": "b"}\n')
    assert documents(tmp_path / "a.jsonl", "body") == ["b"]


def test_empty_documents_are_skipped(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "x"}\n')
    assert documents(tmp_path / "a.txt") == []
    assert documents(tmp_path / "a.jsonl") == ["x"]


@pytest.mark.parametrize("lead", [0, 5, 2**18 - 1, 2**18, 2**19 + 3])
def test_invalid_utf8_is_reported_with_its_byte(tmp_path, lead):
    file = tmp_path / "a.txt"
    file.write_bytes(b"a" * lead + b"\xff" + b"bc")
    assert refusal(file) == (
        f"{file}: byte {lead} (0xff) is not UTF-8 text (invalid start byte); convert the file to "
        "UTF-8 or remove it"
    )


@pytest.mark.parametrize("lead", [3, 2**18 - 1])
def test_text_that_ends_inside_a_character_is_refused(tmp_path, lead):
    file = tmp_path / "a.txt"
    file.write_bytes(b"a" * lead + "é".encode()[:1])
    assert refusal(file) == (
        f"{file}: byte {lead} (0xc3) is not UTF-8 text (unexpected end of data); convert the file "
        "to UTF-8 or remove it"
    )


FIELDS = "the fields are 'txt', 'id'; choose another with --field or data.text_field"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "broken JSON at column 13: Expecting ',' delimiter"),
        (b"nonsense", "broken JSON at column 1: Expecting value"),
        (b'["text"]', "expected a JSON object with a field 'text', got a list"),
        (b'"text"', "expected a JSON object with a field 'text', got text"),
        (b'{"txt": "a", "id": 1}', f"no field 'text' (did you mean 'txt'?); {FIELDS}"),
        (
            b"{}",
            "no field 'text'; the fields are none; choose another with --field or data.text_field",
        ),
        (b'{"text": 5}', "field 'text' must be text, got a number"),
        (b'{"text": null}', "field 'text' must be text, got null"),
        (b'{"text": true}', "field 'text' must be text, got a boolean"),
        (b'{"text": {}}', "field 'text' must be text, got an object"),
        (
            b'{"text": "ab\\ud800"}',
            "field 'text' has half of a surrogate pair at character 2, which is not text",
        ),
        (
            b'{"text": "\xe9"}',
            "byte 27 (0xe9) is not UTF-8 text (invalid continuation byte); convert the file to "
            "UTF-8 or remove it",
        ),
    ],
)
def test_broken_json_lines_are_refused(tmp_path, line, message):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    assert refusal(file) == f"{file}:2: {message}"


@pytest.mark.parametrize("line", ["[" * 100_000, "1" * 5000 + "x", "1" * 5000])
def test_hostile_json_lines_are_refused(tmp_path, line):
    file = tmp_path / "a.jsonl"
    file.write_text(line)
    assert refusal(file).startswith(f"{file}:1: ")


def test_broken_parquet_is_refused(tmp_path):
    file = tmp_path / "a.parquet"
    file.write_bytes(b"PAR1 this is not Parquet at all PAR1")
    assert refusal(file).startswith(f"{file} is not a readable Parquet file: ")
    pq.write_table(pa.table({"text": [random_text(1, 400)] * 2000}), file)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert refusal(file).startswith(f"{file} is not a readable Parquet file: ")
    pq.write_table(
        pa.table({"text": [random_text(n, 400) for n in range(2000)]}),
        file,
        compression="snappy",
        use_dictionary=False,
    )
    damaged = bytearray(file.read_bytes())
    damaged[4:4000] = bytes(3996)
    file.write_bytes(damaged)
    assert refusal(file).startswith(f"{file}: broken Parquet data after row 0: ")


def test_missing_or_non_text_parquet_column_is_refused(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"txt": ["a"], "id": [1]}), file)
    assert refusal(file) == (
        f"{file}: no column 'text' (did you mean 'txt'?); the columns are 'txt', 'id'; choose "
        "another with --field or data.text_field"
    )
    assert refusal(file, "id") == f"{file}: column 'id' must be text, it is int64"
    pq.write_table(pa.table({"text": ["a", None]}), file)
    assert refusal(file) == f"{file}, row 1: field 'text' must be text, got null"
    (raw,) = pa.array([b"abc\xff"]).buffers()[2:]
    offsets = pa.array([b"abc\xff"]).buffers()[1]
    broken = pa.StringArray.from_buffers(1, offsets, raw)
    pq.write_table(pa.table({"text": broken}), file)
    assert refusal(file) == (f"{file}, row 0: byte 3 of the text is not UTF-8 (invalid start byte)")


def test_parquet_without_pyarrow_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert refusal(tmp_path / "a.parquet") == (
        f"{tmp_path / 'a.parquet'}: reading Parquet needs pyarrow, which is not installed; give "
        "`python -m pip install '.[parquet]'` in the clone of Penstock"
    )


def test_vanished_file_is_refused(tmp_path):
    for name in ("a.txt", "a.jsonl"):
        assert refusal(tmp_path / name) == (
            f"cannot read {tmp_path / name}: No such file or directory"
        )


@pytest.fixture
def tree(tmp_path):
    for name in ("b/2.py", "b/1.py", "a/z.txt", "a/deep/y.py", ".git/x.py", "c.py", "b/.h.py"):
        file = tmp_path / "tree" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return tmp_path / "tree"


def names(tree, **options):
    return [path.relative_to(tree).as_posix() for path in find_files([tree], **options)]


def test_folders_are_walked_in_sorted_order_without_hidden_files(tree):
    assert names(tree) == ["c.py", "a/z.txt", "a/deep/y.py", "b/1.py", "b/2.py"]


def test_files_are_chosen_by_pattern(tree):
    assert names(tree, glob="*.py") == ["c.py", "a/deep/y.py", "b/1.py", "b/2.py"]
    assert names(tree, exclude=["deep", "1.py"]) == ["c.py", "a/z.txt", "b/2.py"]
    assert names(tree, exclude=["a/*.txt"]) == ["c.py", "a/deep/y.py", "b/1.py", "b/2.py"]
    patterns = [f"{tree}/b/*.py", f"{tree}/**/y.py"]
    assert [path.name for path in find_files(patterns)] == ["1.py", "2.py", "y.py"]


@pytest.mark.parametrize(
    "inputs",
    [
        ["texts/**/*"],
        ["texts/**"],
        ["texts", "texts/a.txt"],
        ["texts/a.txt", "texts"],
        ["texts/a.txt", "texts/sub", "texts/sub/*", "./texts/../texts/sub/1.txt"],
        ["texts", "{folder}/texts"],
    ],
)
def test_file_that_several_inputs_name_is_read_once(tmp_path, monkeypatch, inputs):
    monkeypatch.chdir(tmp_path)
    files = ["texts/a.txt", *(f"texts/sub/{n}.txt" for n in range(10))]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = find_files(one.format(folder=tmp_path) for one in inputs)
    assert [str(path) for path in found] == files


def test_links_to_a_file_are_read_once_at_the_first_place(tmp_path):
    for name in ("1.txt", "2.txt"):
        (tmp_path / "real" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "real" / name).write_text(name)
    (tmp_path / "folder").symlink_to("real")
    (tmp_path / "file.txt").symlink_to("real/2.txt")
    real, folder, file = (tmp_path / name for name in ("real", "folder", "file.txt"))
    assert find_files([real, folder, file]) == [real / "1.txt", real / "2.txt"]
    assert find_files([file, folder, real]) == [file, folder / "1.txt"]
    (real / "link.txt").symlink_to("1.txt")
    assert find_files([real]) == [real / "1.txt", real / "2.txt"]


def test_equal_files_of_different_names_are_all_read(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("equal")
    assert find_files([tmp_path]) == [tmp_path / "a.txt", tmp_path / "b.txt"]


def test_name_with_brackets_is_not_a_pattern(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    assert find_files([tmp_path / "a[1].txt"]) == [tmp_path / "a[1].txt"]


def test_missing_inputs_are_refused(tree, tmp_path):
    def refused(*inputs, **options):
        with pytest.raises(DataError) as error:
            find_files(inputs, **options)
        return str(error.value)

    assert refused(tree / "b" / "3.py") == (
        f"input {tree / 'b' / '3.py'} does not exist (did you mean '2.py'?)"
    )
    assert refused(tmp_path / "no" / "such") == f"input {tmp_path / 'no' / 'such'} does not exist"
    assert refused("/dev/null") == "input /dev/null is neither a file nor a folder"
    assert refused(tree, glob="*.md") == f"found no files that match '*.md' in {tree}"
    assert refused() == "found no files in an empty list of inputs"
    assert refused(tree / "*.md") == f"input {tree / '*.md'} does not exist"
    gone = [tree / "b" / "3.py", *(tmp_path / str(number) for number in range(6))]
    assert refused(gone[0], tree, *gone[1:3]) == (
        f"3 inputs do not exist: {gone[0]} (did you mean '2.py'?), {gone[1]}, {gone[2]}"
    )
    assert refused(*gone[1:]) == (
        f"6 inputs do not exist: {', '.join(map(str, gone[1:6]))} and 1 more"
    )


def test_memory_is_bounded_by_the_piece_not_by_the_document(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"some words, and more\n" * 600_000)
    import tracemalloc

    tracemalloc.start()
    for _ in read_pieces(file):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * sources.PIECE_CHARACTERS < file.stat().st_size / 5

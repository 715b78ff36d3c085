"""Reading a data set: what is asked for comes back, and no damaged byte is ever handed out."""

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import xxhash
from grids import quick_first
from process_files import resident_bytes_of_files

from penstock.data import TokenDataset, build_dataset, check_vocabulary
from penstock.data.manifest import checksum_of
from penstock.errors import CorruptionError, DataError

CHUNK = 256


def advice(folder):
    return (
        f"restore the file from a copy, or build the data set again: delete {folder}, then run "
        "`penstock data build`, or `penstock train` if data.input names the text"
    )


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(4)
    lines = [
        json.dumps({"text": "".join(rng.choices("abcdefgh \n", k=rng.randint(1, 200)))})
        for _ in range(60)
    ]
    (folder / "a.jsonl").write_text("\n".join(lines))
    build_dataset(
        [folder / "a.jsonl"], "train-bpe:270", folder / "set", validation=0.2,
        shard_bytes=1024, chunk_bytes=CHUNK,
    )  # fmt: skip
    return folder / "set"


@pytest.fixture
def folder(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "set"))


def flip(path, byte, bit=0):
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def test_any_range_equals_the_files(folder):
    dataset = TokenDataset.open(folder)
    for split in dataset.splits:
        shards = sorted(folder.glob(f"{split}-*.bin"))
        expected = np.concatenate([np.fromfile(shard, dtype="<u2") for shard in shards])
        total = dataset.tokens(split)
        assert total == len(expected)
        rng = random.Random(1)
        for _ in range(200):
            start = rng.randint(0, total)
            stop = rng.randint(start, total)
            part = dataset.read(split, start, stop)
            assert part.dtype == np.uint16
            assert np.array_equal(part, expected[start:stop]), (start, stop)
    assert len(sorted(folder.glob("train-*.bin"))) > 2


def test_range_outside_of_the_split_is_refused(folder):
    dataset = TokenDataset.open(folder)
    total = dataset.tokens("train")
    with pytest.raises(DataError) as error:
        dataset.read("train", 5, total + 1)
    assert str(error.value) == (
        f"expected tokens from 0 to {total} of split 'train' of {folder}, got 5 to {total + 1}"
    )
    with pytest.raises(DataError) as error:
        dataset.tokens("validatoin")
    assert str(error.value) == (
        f"data set {folder} has no split 'validatoin' (did you mean 'validation'?); it has train, "
        "validation"
    )


def test_folder_without_data_set_is_refused(folder, tmp_path):
    with pytest.raises(DataError) as error:
        TokenDataset.open(tmp_path / "sett")
    assert str(error.value) == (
        f"data set {tmp_path / 'sett'} does not exist (did you mean 'set'?); make one with: "
        f"penstock data build --input FILES... --tokenizer bytes --out {tmp_path / 'sett'}"
    )
    with pytest.raises(DataError) as error:
        TokenDataset.open(tmp_path)
    assert str(error.value) == (
        f"{tmp_path} is not a data set: it has no dataset.json; make one with: penstock data "
        f"build --input {tmp_path} --tokenizer bytes --out DIR"
    )


@pytest.mark.parametrize("seed", quick_first(range(20), range(5)))
def test_a_flipped_bit_is_found_before_its_tokens_are_used(folder, seed):
    rng = random.Random(seed)
    dataset = TokenDataset.open(folder)
    shard = rng.choice(dataset.manifest.splits["train"].shards)
    byte = rng.randrange(shard.data.size_bytes)
    flip(folder / shard.data.file, byte, rng.randrange(8))
    start = byte // CHUNK * CHUNK
    stop = min(start + CHUNK, shard.data.size_bytes)
    content = (folder / shard.data.file).read_bytes()[start:stop]
    message = (
        f"{folder / shard.data.file} is corrupt between byte {start} and {stop}: checksum "
        f"{xxhash.xxh3_128_hexdigest(content)}, expected {shard.data.chunks[start // CHUNK]}; "
        f"{advice(folder)}"
    )
    shards = dataset.manifest.splits["train"].shards
    base = sum(one.tokens for one in shards[: shards.index(shard)])
    dataset = TokenDataset.open(folder)  # sizes are right, so it opens
    for token in range(dataset.tokens("train")):
        inside = start <= (token - base) * 2 < stop
        if not inside:
            dataset.read("train", token, token + 1)
            continue
        with pytest.raises(CorruptionError) as error:
            dataset.read("train", token, token + 1)
        assert str(error.value) == message
    with pytest.raises(CorruptionError) as error:
        TokenDataset.open(folder, verify=True)
    assert str(error.value) == message


def test_every_file_is_covered_by_a_checksum(folder):
    for file in sorted(folder.iterdir()):
        size = file.stat().st_size
        for byte in {0, size // 2, size - 2} - {-1, -2}:
            if size:
                whole = file.read_bytes()
                flip(file, byte)
                with pytest.raises(CorruptionError, match=file.name):
                    TokenDataset.open(folder, verify=True)
                file.write_bytes(whole)
    assert TokenDataset.open(folder, verify=True).verify() == sum(
        file.stat().st_size
        for file in folder.iterdir()
        if file.name not in ("dataset.json", "built_from.json")
    )


def test_a_damaged_index_or_tokenizer_is_not_used(folder):
    flip(folder / "train-00001.idx", 3)
    flip(folder / "tokenizer.json", 300)
    dataset = TokenDataset.open(folder)
    with pytest.raises(CorruptionError, match=r"train-00001\.idx is corrupt between byte 0 and "):
        dataset.document_ends("train")
    with pytest.raises(CorruptionError, match=r"tokenizer\.json is corrupt between byte 256 and"):
        dataset.tokenizer()


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00001.idx", "tokenizer.json"])
def test_files_of_the_wrong_size_are_refused_at_once(folder, name):
    file = folder / name
    size = file.stat().st_size
    os.truncate(file, size - 1)
    with pytest.raises(CorruptionError) as error:
        TokenDataset.open(folder)
    assert str(error.value) == (
        f"{file} is cut short: {size - 1} bytes, expected {size}; {advice(folder)}"
    )
    os.truncate(file, size + 3)
    with pytest.raises(CorruptionError) as error:
        TokenDataset.open(folder)
    assert (
        str(error.value)
        == f"{file} is too long: {size + 3} bytes, expected {size}; {advice(folder)}"
    )
    file.unlink()
    with pytest.raises(CorruptionError) as error:
        TokenDataset.open(folder)
    assert str(error.value) == f"{file} is missing; {advice(folder)}"


def rewrite(folder, change, seal=True):
    """Change dataset.json as an attacker could who knows how it is sealed."""
    file = folder / "dataset.json"
    content = json.loads(file.read_text())
    content.pop("checksum")
    change(content)
    content["checksum"] = checksum_of(content) if seal else "0" * 32
    file.write_text(json.dumps(content))


def first(content):
    return content["splits"]["train"]["shards"][0]


HOSTILE = {
    "path out of the folder": lambda c: first(c)["data"].update(file="../set/train-00000.bin"),
    "absolute path": lambda c: first(c)["data"].update(file="/etc/passwd"),
    "hidden file": lambda c: first(c)["data"].update(file=".bin"),
    "same file twice": lambda c: first(c)["data"].update(file="train-00001.bin"),
    "negative tokens": lambda c: first(c).update(tokens=-1),
    "more tokens than bytes": lambda c: first(c).update(tokens=10**9),
    "tokens do not add up": lambda c: c["splits"]["train"].update(tokens=5),
    "text for a number": lambda c: c.update(vocab_size="270"),
    "huge vocabulary": lambda c: c.update(vocab_size=2**40),
    "uint16 too small": lambda c: c.update(vocab_size=70_000),
    "end beyond vocabulary": lambda c: c["tokenizer"].update(end_of_document=270),
    "unknown dtype": lambda c: c.update(dtype="float64"),
    "unknown key": lambda c: c.update(surprise=1),
    "missing key": lambda c: c.pop("splits"),
    "no train split": lambda c: c["splits"].pop("train"),
    "no chunks": lambda c: c.update(chunk_bytes=0),
    "chunks too few": lambda c: first(c)["data"]["chunks"].pop(),
    "tokenizer without file": lambda c: c["tokenizer"].update(data=None),
    "split without text bytes": lambda c: c["splits"]["train"].pop("text_bytes"),
    "text bytes do not add up": lambda c: c["splits"]["train"].update(text_bytes=5),
    "negative text bytes": lambda c: c["splits"]["train"].update(text_bytes=-1),
    "text bytes of splits in version 1": lambda c: c.update(version=1),
    "text in version 2": lambda c: (
        [split.pop("text_bytes") for split in c["splits"].values()],
        c.update(version=2),
    ),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_inconsistent_manifest_is_refused(folder, change):
    rewrite(folder, change)
    with pytest.raises(CorruptionError) as error:
        TokenDataset.open(folder)
    start = f"{folder / 'dataset.json'} breaks the format ("
    assert str(error.value).startswith(start)
    assert str(error.value).endswith(f"); {advice(folder)}")


def test_broken_manifest_is_refused(folder):
    file = folder / "dataset.json"
    rewrite(folder, lambda content: content.update(seed=5), seal=False)
    with pytest.raises(CorruptionError, match=r"does not match its checksum: [0-9a-f]{32}, expect"):
        TokenDataset.open(folder)
    rewrite(folder, lambda content: content.update(version=4))
    with pytest.raises(DataError) as error:
        TokenDataset.open(folder)
    assert str(error.value) == (
        f"{file} has format version 4, this release of Penstock reads versions 1 to 3; build the "
        "data set again with this release"
    )
    for content in (b"[]", b"{}", b'{"format": "other"}'):
        file.write_bytes(content)
        with pytest.raises(CorruptionError) as corruption:
            TokenDataset.open(folder)
        assert str(corruption.value) == (
            f"{file} does not describe a Penstock data set; {advice(folder)}"
        )
    for content in (b"", b"\xff", b"{", b"[" * 100_000):
        file.write_bytes(content)
        with pytest.raises(CorruptionError, match=r"dataset\.json is not JSON \("):
            TokenDataset.open(folder)


@pytest.mark.long
def test_shards_are_mapped_not_read(tmp_path):
    # 64 MiB of tokens; a few windows must not bring more than their own chunks into memory.
    (tmp_path / "a.txt").write_bytes(b"0123456789abcde\n" * 2**21)
    build_dataset([tmp_path / "a.txt"], "bytes", tmp_path / "set", validation=0)
    dataset = TokenDataset.open(tmp_path / "set")

    if not Path("/proc/self/smaps").exists():
        pytest.skip("needs /proc")
    for start in (0, 10**7, 3 * 10**7):
        dataset.read("train", start, start + 1000)
    assert 0 < resident_bytes_of_files(tmp_path / "set") < 16 << 20
    checked = sum(int(file._checked.sum()) for file in dataset._split("train")._files)
    assert checked == 3


def test_too_small_model_vocabulary_is_refused(folder):
    dataset = TokenDataset.open(folder)
    check_vocabulary(dataset, 270)
    check_vocabulary(dataset, 50304)
    with pytest.raises(DataError) as error:
        check_vocabulary(dataset, 257)
    assert str(error.value) == (
        f"data set {folder} has token ids up to 269 (vocabulary 270), model has vocab_size 257; "
        "set the model's vocab_size to 270 or more, or build the data set again with the model's "
        "tokenizer"
    )

"""Hostile files in the folder of a store on flash: each is refused, and nothing else is touched.

Where a checksum would stop a file at the door it is made right again, as somebody would who means
harm.
"""

import copy
import dataclasses
import os
import shutil
import socket

import pytest
from bounded_memory import bounded_memory
from store_programs import flash_store, forward_sweep, make_program, random_weights, train

from penstock.errors import ConfigError, CorruptionError, StorageError
from penstock.store.flash import FlashReader, journal as journal_module, recorded_extra, repair
from penstock.store.flash.journal import (
    MAX_RECORD_BYTES,
    SECTOR_BYTES,
    Record,
    read_records,
    whole_records,
)

# To hang is to fail; fixtures may compile kernels first.
pytestmark = pytest.mark.timeout(30, func_only=True)

PROGRAM = make_program(({"embed": (50, 16), "frozen": (9,)}, {"block": (70, 70)}), ("frozen",))


@pytest.fixture(autouse=True)
def _little_memory():
    with bounded_memory():
        yield


def opened(folder):
    return flash_store(PROGRAM, folder)


def filled(folder, seed=1, steps=2):
    store = opened(folder)
    store.load(random_weights(PROGRAM, seed).items())
    for _ in range(steps):
        train(store, 1, seed)
        store.make_durable()
    found = store.content_hash()
    store.close()
    return found


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original") / "flash"
    return folder, filled(folder)


@pytest.fixture
def folder(original, tmp_path):
    """A copy of a store of three durable steps: 0, 1 and 2."""
    return shutil.copytree(original[0], tmp_path / "flash")


def rewritten(path, change):
    """Write the journal anew, checksums and all, with other records."""
    records = change(read_records(path)[0])
    content = b"".join(journal_module._spelled(n, record) for n, record in enumerate(records))
    path.write_bytes(content)


def with_content(record, **changes):
    return dataclasses.replace(record, content=dict(record.content) | changes)


def refuse_all(folder, kind, match):
    """The store that trains and the one that looks say the same."""
    for look in (opened, verified):
        with pytest.raises(kind, match=match):
            look(folder)


def verified(folder):
    with FlashReader(folder) as reader:
        for step in reader.steps:
            reader.verify(step)


# What a record says


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"step": 2**63},
        {"step": True},
        {"step": "2"},
        {"step": 2.0},
        {"extra": None},
        {"extra": [1]},
    ],
)
def test_record_without_valid_step_is_refused(folder, changes):
    rewritten(folder / "journal", lambda r: [*r[:-1], with_content(r[-1], **changes)])
    refuse_all(folder, CorruptionError, r"journal: a record does not describe a step")
    with pytest.raises(CorruptionError, match="does not describe a step"):
        recorded_extra(folder)


@pytest.mark.parametrize(
    "places",
    [
        None,
        [],
        [0],
        [0, 0, 3],
        [-1, 0, 0],
        [2**60, 0, 0],
        [0, 0, True],
        [0.0, 0, 0],
        "000",
        {"0": 0},
    ],
)
def test_invalid_extent_places_are_refused(folder, places):
    rewritten(folder / "journal", lambda r: [*r[:-1], with_content(r[-1], places=places)])
    refuse_all(folder, CorruptionError, "the journal's record of step 2 does not match the store")


@pytest.mark.parametrize("change", [lambda b: b[:-16], lambda b: b + b"x" * 16, lambda b: b""])
def test_wrong_number_of_checksums_is_refused(folder, change):
    rewritten(
        folder / "journal",
        lambda r: [*r[:-1], dataclasses.replace(r[-1], blob=change(r[-1].blob))],
    )
    refuse_all(folder, CorruptionError, "the journal's record of step 2 does not match the store")


def test_deeply_nested_record_is_refused(folder):
    deep = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    path = folder / "journal"
    append_payload(path, len(deep).to_bytes(8, "little") + deep)
    refuse_all(folder, CorruptionError, "record 4 is not JSON")


@pytest.mark.parametrize(
    "payload",
    [b"", b"\0", b"\xff" * 8, (2**63).to_bytes(8, "little") + b"{}x", b"\2" + b"\0" * 7 + b"[]"],
    ids=["nothing", "one byte", "a size of 2^64 - 1", "a size of 2^63", "a list"],
)
def test_payload_that_is_not_mapping_is_refused(folder, payload):
    append_payload(folder / "journal", payload)
    refuse_all(folder, CorruptionError, r"record 4 is not (JSON|a mapping)")


def append_payload(path, payload):
    """Append a record of any payload, with every checksum right."""
    number = len(read_records(path)[0])
    digest = journal_module.xxhash.xxh3_128_digest
    header = journal_module._HEADER.pack(b"PSTKREC\1", number, len(payload), digest(payload))
    size = journal_module._padded(len(payload))
    body = journal_module._sector(header) + payload.ljust(size, b"\0")
    seal = journal_module._sector(journal_module._SEALED.pack(b"PSTKSEAL", number, digest(body)))
    with path.open("ab") as file:
        file.write(body + seal)


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, MAX_RECORD_BYTES + 1])
def test_record_of_impossible_length_is_refused(folder, length):
    path = folder / "journal"
    header = journal_module._HEADER.pack(b"PSTKREC\1", 4, length, bytes(16))
    with path.open("ab") as file:
        file.write(journal_module._sector(header))
    refuse_all(
        folder, CorruptionError, rf"got record 4 of {length:,} bytes; .* assembled from parts"
    )


def test_record_length_beyond_the_file_is_an_unfinished_record(folder):
    path = folder / "journal"
    header = journal_module._HEADER.pack(b"PSTKREC\1", 4, MAX_RECORD_BYTES, bytes(16))
    with path.open("ab") as file:
        file.write(journal_module._sector(header))
    assert len(read_records(path)[0]) == 4


def test_duplicate_record(folder):
    """The same bytes once more: the second has the first's number."""
    path = folder / "journal"
    last = journal_module._spelled(3, read_records(path)[0][-1])
    path.write_bytes(path.read_bytes() + last)
    refuse_all(folder, CorruptionError, "expected record 4, got record 3 of")


def test_two_records_of_one_step_the_later_one_counts(folder):
    """As where a step is restored over itself. Its extents are damaged; the earlier one's not."""
    rewritten(
        folder / "journal",
        lambda r: [*r[:-1], with_content(r[-2], step=2), r[-1]],
    )
    verified(folder)
    with FlashReader(folder) as reader:
        assert reader.steps == [2, 2]
        begin = reader._layout.units[-1].stream_offset(reader.version(2)._place[-1])
    with (folder / "extents").open("r+b") as file:
        file.seek(begin)
        file.write(b"damaged")
    with pytest.raises(CorruptionError, match="damaged in bytes"):
        verified(folder)
    assert repair(folder).step == 2
    assert [r.content.get("step") for r in read_records(folder / "journal")[0]] == [None, 1, 2]


@pytest.mark.parametrize("what", ["header", "seal"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_zero_sector_before_a_sealed_record_is_not_the_end(folder, number, what):
    journal = folder / "journal"
    records, end = read_records(journal)
    lengths = [len(journal_module._spelled(n, record)) for n, record in enumerate(records)]
    at = sum(lengths[:number]) + (lengths[number] - SECTOR_BYTES if what == "seal" else 0)
    with journal.open("r+b") as file:
        file.seek(at)
        file.write(bytes(SECTOR_BYTES))
    if at + SECTOR_BYTES == end:  # the last seal: as if the process had died while appending
        assert read_records(journal) == (records[:-1], sum(lengths[:-1]))
        return
    refuse_all(
        folder,
        CorruptionError,
        f"the {what} of record {number}, at byte {at:,}: expected a checksum, got zeros",
    )
    assert journal.stat().st_size == end
    assert whole_records(journal) == [*records[:number], *records[number + 1 :]]
    assert repair(folder).step == (1 if number == 3 else 2)  # the newest that is left
    verified(folder)


def test_repair_lists_no_step_whose_place_is_used_again(folder):
    """Step 3 is on its way, over step 0's place; then step 2 is damaged."""
    with FlashReader(folder) as reader:
        unit = reader._layout.units[-1]
        begins = [unit.stream_offset(reader.version(step)._place[-1]) for step in (1, 2)]
    used_again = ({0, 1, 2} - {(at - unit.offset) // unit.place_bytes for at in begins}).pop()
    with (folder / "extents").open("r+b") as file:
        for begin in (begins[1], unit.stream_offset(used_again)):
            file.seek(begin)
            file.write(b"damaged")
    assert repair(folder).step == 1
    with FlashReader(folder) as reader:
        assert reader.steps == [1]
    verified(folder)


# What the first record says

UNIT = {"stage": 0, "weights": {"w": [5]}, "trainable": False, "tied": False, "roles": []}


@pytest.mark.parametrize(
    "changes",
    [
        {"keep_steps": 0},
        {"keep_steps": -3},
        {"keep_steps": 2**60},
        {"keep_steps": "2"},
        {"block_elements": 0},
        {"block_elements": -2048},
        {"block_elements": 2**60},
        {"block_elements": None},
        {"units": 5},
        {"units": [5]},
        {"units": [{"weights": {"w": [2**62] * 100_000}}]},
        {"units": [{"weights": {"w": [-5]}}]},
        {"units": [{"weights": {"w": [2.0]}}]},
        {"units": [{"weights": {"w": 5}}]},
        {"units": [{"weights": {"\ud800": [5]}}]},
        {"units": [{**UNIT, "format": "int4"}]},
        {"units": [{**UNIT, "format": ["bfloat16"]}]},
        {"units": [{**UNIT, "format": None}]},
    ],
    ids=lambda changes: ascii(changes)[:40],
)
def test_invalid_store_description_is_refused(folder, changes):
    rewritten(folder / "journal", lambda r: [with_content(r[0], **changes), *r[1:]])
    with pytest.raises(CorruptionError, match="first record does not describe a store"):
        verified(folder)
    with pytest.raises(ConfigError, match=r"of another model|was created (to keep|with)"):
        opened(folder)


@pytest.mark.parametrize("shape", [[2**60], [2**31, 2**31], [2**62, 2**62, 4]])
def test_weights_larger_than_extents_are_refused(folder, shape):
    def larger(records):
        units = [dict(unit) for unit in records[0].content["units"]]
        units[-1]["weights"] = {"block": shape}
        return [with_content(records[0], units=units), *records[1:]]

    rewritten(folder / "journal", larger)
    with pytest.raises(CorruptionError, match=r"extents: expected [\d,]+ bytes, got [\d,]+"):
        verified(folder)


@pytest.mark.parametrize(
    "changes",
    [{"group": 0}, {"group": -1}, {"group": 2**60}, {"dtype": "O"}, {"dtype": [1]}, {"other": 1}],
    ids=str,
)
def test_unknown_optimizer_state_is_refused(folder, changes):
    def changed(records):
        units = copy.deepcopy(records[0].content["units"])
        units[-1]["roles"][0].update(changes)
        return [with_content(records[0], units=units), *records[1:]]

    rewritten(folder / "journal", changed)
    with pytest.raises(CorruptionError, match="first record does not describe a store"):
        verified(folder)


def test_sparse_file_of_a_trillion_blocks(folder):
    test_weights_larger_than_extents_are_refused(folder, [2**40])
    os.truncate(folder / "extents", 2**43 - 1)
    with pytest.raises(CorruptionError, match=r"expected [\d,]+ bytes, got [\d,]+"):
        verified(folder)


@pytest.mark.parametrize("version", [1, 5, 2**63, "2", None, 2.5])
def test_unknown_format_version_is_refused(folder, version):
    rewritten(folder / "journal", lambda r: [with_content(r[0], version=version), *r[1:]])
    refuse_all(folder, ConfigError, "its format has version .*, this Penstock reads 2 to 4")


def test_foreign_journal_is_refused(folder):
    rewritten(folder / "journal", lambda r: [Record({"format": "ledger"}), *r[1:]])
    refuse_all(folder, ConfigError, "not a Penstock store; choose another store.flash.path")


# Files of two runs, and no files


@pytest.mark.parametrize("foreign", ["journal", "extents"])
def test_the_journal_of_one_run_beside_the_extents_of_another(folder, tmp_path, foreign):
    filled(tmp_path / "other", seed=2)
    shutil.copy(tmp_path / "other" / foreign, folder / foreign)
    with pytest.raises(CorruptionError, match=r"extents: damaged .* expected checksum"):
        verified(folder)
    store = opened(folder)
    try:
        with pytest.raises(CorruptionError, match=r"extents: damaged .* expected checksum"):
            forward_sweep(store)
    finally:
        store.close()


@pytest.mark.parametrize("name", ["journal", "extents"])
def test_an_empty_file(folder, name):
    (folder / name).write_bytes(b"")
    found = {"journal": "holds no complete record", "extents": "expected .* bytes, got 0;"}[name]
    refuse_all(folder, CorruptionError, f"{name}: {found}")


def test_missing_extents_are_refused(folder):
    (folder / "extents").unlink()
    refuse_all(folder, CorruptionError, "extents: is missing, but the journal beside it refers")


def put_folder(path):
    path.mkdir()


def put_fifo(path):
    os.mkfifo(path)


def put_socket(path):
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's whole path has at most 107 bytes
        try:
            bound.bind(path.name)
        finally:
            os.chdir(here)


def put_zeros(path):
    path.symlink_to("/dev/zero")


OTHERS = {"a folder": put_folder, "a FIFO": put_fifo, "a socket": put_socket, "zeros": put_zeros}


@pytest.mark.parametrize("name", ["journal", "extents", "LOCK"])
@pytest.mark.parametrize("what", OTHERS)
def test_something_else_where_a_file_was_expected(folder, name, what):
    (folder / name).unlink(missing_ok=True)
    OTHERS[what](folder / name)
    kind = StorageError if name == "LOCK" else CorruptionError
    with pytest.raises(kind, match=rf"{name}: "):
        opened(folder)
    with pytest.raises(kind, match=rf"{name}: "):
        verified(folder)


@pytest.mark.parametrize("name", ["journal", "extents", "LOCK"])
def test_symlink_to_elsewhere_is_not_followed(folder, tmp_path, name):
    target = tmp_path / "precious"
    shutil.copy(folder / name, target)
    before = target.read_bytes()
    (folder / name).unlink()
    (folder / name).symlink_to(target)
    with pytest.raises((CorruptionError, StorageError), match=f"{name}: .*got a link"):
        opened(folder)
    assert target.read_bytes() == before
    assert (folder / name).is_symlink()


def test_store_folder_may_be_symlink(folder, original, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    store = opened(tmp_path / "link")
    assert store.content_hash() == original[1]
    store.close()


def test_file_in_place_of_store_folder_is_refused(tmp_path):
    (tmp_path / "flash").write_text("mine")
    with pytest.raises(StorageError, match="flash: expected a folder, got a file"):
        opened(tmp_path / "flash")
    assert (tmp_path / "flash").read_text() == "mine"


def test_repair_keeps_out_of_a_store_in_use(folder):
    """It cuts off what is not sealed, which may be a record that is being written."""
    store = opened(folder)
    size = (folder / "journal").stat().st_size
    with (folder / "journal").open("ab") as file:
        file.write(b"half a record")
    with pytest.raises(StorageError, match="is in use by process"):
        repair(folder)
    assert (folder / "journal").stat().st_size == size + 13
    store.close()

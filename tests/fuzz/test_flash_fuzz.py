"""Any journal of a store on flash opens to what was written, or is refused by an error of ours."""

import contextlib
import dataclasses
import json
import shutil

import pytest
from hypothesis import strategies as st
from mutations import mutated, mutated_json
from searching import EXAMPLES, search
from store_programs import flash_store, make_program, random_weights, train

from penstock.errors import ConfigError, CorruptionError, PenstockError, StorageError
from penstock.store.flash import FlashReader, journal as journal_module, recorded_extra, repair
from penstock.store.flash.journal import read_records, whole_records

PROGRAM = make_program(({"embed": (9, 6), "frozen": (9,)}, {"block": (7, 7)}), ("frozen",))
REFUSALS = (ConfigError, CorruptionError, StorageError)


def opened(folder):
    return flash_store(PROGRAM, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A store of three durable steps; the tests write into its journal and put it back."""
    folder = tmp_path_factory.mktemp("fuzz") / "flash"
    store = opened(folder)
    store.load(random_weights(PROGRAM, 1).items())
    for _ in range(2):
        store.remember({"note": "mine", "loss": 1.5})
        train(store, 1, 1)
        store.make_durable()
    store.close()
    return folder


@pytest.fixture
def journal(folder):
    path = folder / "journal"
    before = path.read_bytes()
    yield path
    path.write_bytes(before)


@EXAMPLES
def test_changed_journal_keeps_its_first_records_or_is_refused(journal, examples):
    valid, records = journal.read_bytes(), read_records(journal)[0]

    def holds(data):
        journal.write_bytes(data)
        with contextlib.suppress(*REFUSALS):
            found, end = read_records(journal)
            # A record without a seal never counted; nothing else may be missing.
            assert found == records[: len(found)]
            assert 0 < end <= len(data)
        with contextlib.suppress(*REFUSALS):
            left = iter(records)
            assert all(record in left for record in whole_records(journal))  # in their order

    search(mutated(valid), holds, examples)


@EXAMPLES
def test_any_bytes_are_no_journal(journal, examples):
    def holds(data):
        journal.write_bytes(data)
        with pytest.raises(CorruptionError):
            read_records(journal)

    search(st.binary(max_size=2000) | st.binary(max_size=600).map(sector), holds, examples)


def sector(data):
    """Bytes that look like a record's header, its checksum right."""
    return journal_module._sector((b"PSTKREC\1" + data)[:400]) + data


def spelled(records):
    return b"".join(journal_module._spelled(n, record) for n, record in enumerate(records))


@EXAMPLES
def test_records_with_right_checksums_and_other_content(folder, journal, examples):
    """Behind the checksums: whatever they say, it is verified or refused, and not believed."""
    records = read_records(journal)[0]

    def changed(number):
        record = records[number]
        other = mutated_json(dict(record.content))
        blob = st.just(record.blob) | mutated(record.blob) if record.blob else st.just(b"")
        made = st.builds(lambda content, b: dataclasses.replace(record, content=content, blob=b),
                         other, blob)  # fmt: skip
        return made.map(lambda record: [*records[:number], record, *records[number + 1 :]])

    def holds(found):
        journal.write_bytes(spelled(found))
        with contextlib.suppress(*REFUSALS):
            recorded_extra(folder)
        with contextlib.suppress(*REFUSALS), FlashReader(folder) as reader:
            for step in reader.steps:
                with contextlib.suppress(CorruptionError):
                    reader.verify(step)
                    assert len(reader.content_hash(step)) == 32

    search(st.integers(0, len(records) - 1).flatmap(changed), holds, examples)


@EXAMPLES
def test_a_store_opens_a_changed_journal_or_refuses_it(folder, journal, tmp_path, examples):
    """As above, by the one that trains and by the one that repairs; on copies, as both write."""
    records = read_records(journal)[0]
    last = records[-1]
    store = shutil.copytree(folder, tmp_path / "copy")

    def holds(content):
        record = dataclasses.replace(last, content=content)
        (store / "journal").write_bytes(spelled([*records[:-1], record]))
        with contextlib.suppress(*REFUSALS):
            found = opened(store)
            found.close()
            assert found.step == content["step"]
            assert json.dumps(found.extra) == json.dumps(content["extra"])
        with contextlib.suppress(*REFUSALS):
            assert repair(store).step in (1, content.get("step"))

    other = mutated_json(dict(last.content))
    search(other, holds, examples // 4)


def test_all_refusals_are_errors_of_ours():
    assert all(issubclass(kind, PenstockError) for kind in REFUSALS)

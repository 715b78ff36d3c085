"""A store as numbered portions: read from one and written into another, they make it the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sharded_stores import LARGE, assert_same_state
from store_programs import flash_store, make_program, random_weights, train, training_store

from penstock.errors import CorruptionError
from penstock.store import AdamW

PROGRAM = make_program(LARGE, frozen=("position",), stream_dtype=torch.bfloat16)
EIGHT_BIT = AdamW(0.9, 0.95, 1e-8, moments="8bit")


@pytest.fixture(params=["in memory", "on flash"])
def make(request, tmp_path):
    made = []

    def new(optimizer=None):
        if request.param == "in memory":
            return training_store(PROGRAM, "bf16", optimizer=optimizer)
        folder = tmp_path / f"store-{len(made)}"
        made.append(flash_store(PROGRAM, folder, optimizer=optimizer, dram_bytes=2_000_000))
        return made[-1]

    yield new
    for store in made:
        store.close()


def trained(store):
    store.load(random_weights(PROGRAM, 1).items())
    train(store, 2, seed=2)
    return store


def copied(source, target, portion_bytes: int):
    target.begin_restore()
    portions, there = source.portions(portion_bytes), target.portions(portion_bytes)
    assert portions.sizes == there.sizes
    assert max(portions.sizes) <= portion_bytes
    for number in range(len(portions.sizes)):
        there.write(number, np.array(portions.read(number)))
    assert there.checksum() == source.portions(999).checksum()
    target.finish_restore(source.step)
    return target


@pytest.mark.parametrize("optimizer", [None, EIGHT_BIT], ids=["float32", "8 bits"])
@pytest.mark.parametrize("portion_bytes", [5_000, 4 << 20])
@pytest.mark.usefixtures("speculated")
def test_portions_hold_exactly_the_content_of_a_store(make, optimizer, portion_bytes):
    source = trained(make(optimizer))
    target = copied(source, make(optimizer), portion_bytes)
    assert_same_state(target, source)
    for store in (source, target):
        train(store, 2, seed=4)
    assert_same_state(target, source)


def test_abandoned_copy_can_be_repeated(make):
    source, target = trained(make()), make()
    target.begin_restore()
    target.portions(5_000).write(0, np.array(source.portions(5_000).read(0)) ^ 1)
    assert target.portions(5_000).checksum() != source.portions(5_000).checksum()
    assert_same_state(copied(source, target, 5_000), source)


def test_a_portion_of_another_size_is_refused(make):
    source, target = trained(make()), make()
    target.begin_restore()
    with pytest.raises(ValueError, match=r"portion 0: expected [\d,]+ bytes, got 3"):
        target.portions(5_000).write(0, np.zeros(3, np.uint8))
    assert_same_state(copied(source, target, 5_000), source)


def test_portions_on_flash_are_written_in_order(tmp_path):
    store = flash_store(PROGRAM, tmp_path, dram_bytes=2_000_000)
    store.begin_restore()
    with pytest.raises(RuntimeError, match="expected portion 0, got portion 1"):
        store.portions(5_000).write(1, np.zeros(1, np.uint8))
    store.close()


def test_damage_on_flash_is_found_when_its_portion_is_read(tmp_path):
    store = trained(flash_store(PROGRAM, tmp_path, dram_bytes=2_000_000))
    store.make_durable()
    unit = store._layout.units[1]
    offset = unit.stream_offset(store._version._place[1])
    with (tmp_path / "extents").open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    portions = store.portions(4 << 20)
    first_of_second_unit = 2 * store._layout.units[0].block_count
    portions.read(first_of_second_unit - 1)
    with pytest.raises(CorruptionError, match="which hold the weights of"):
        portions.read(first_of_second_unit)
    store.close()

"""Any single bit that flips on disk is found and named, or lies where nobody looks.

Which bytes of the extents a step needs is taken from what the store itself reads when it is opened
and all of it is asked for, not from its layout.
"""

import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import test_flash_crashes
import torch
import xxhash
from grids import quick_first
from store_programs import (
    flash_store,
    forward_sweep,
    make_program,
    random_gradients,
    random_weights,
    send,
    train,
    training_store,
)

from penstock.errors import CorruptionError
from penstock.kernels.memory import allocate
from penstock.store import (
    AdamW,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from penstock.store.flash import FlashReader, medium
from penstock.store.flash.journal import SECTOR_BYTES, read_records

LAYERS = (
    {"embed": (50, 16), "frozen": (90, 30)},
    {"block.weight": (70, 70), "block.bias": (70,)},
    {"norm": (16,), "embed": (50, 16)},
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KINDS = [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "8bit")]  # of weights, and of moments
# The expected checksum, in which a bit may have flipped, too, and that of the bytes.
CHECKSUMS = r"expected checksum (.{32})(?: of its content)?, got ([0-9a-f]{32})"


def program_of(precision):
    return make_program(LAYERS, frozen=("frozen",), stream_dtype=DTYPES[precision])


def optimizer_of(moments):
    return AdamW(0.9, 0.95, 1e-8, moments=moments)


def opened(folder, precision, moments):
    return flash_store(
        program_of(precision), folder, optimizer=optimizer_of(moments), dram_bytes=400_000
    )


class Flash:
    """A closed store of three durable steps; in `needed`, the bytes that its last one goes by."""

    def __init__(self, folder, precision, moments):
        self.folder = folder
        store = opened(folder, precision, moments)
        store.load(random_weights(store.program, 3).items())
        for _ in range(3):
            train(store, 1, 3)
            store.make_durable()
        self.hash = store.content_hash()
        store.close()
        self.extents = bytearray((folder / "extents").read_bytes())
        self.needed = bytearray(len(self.extents))
        real = medium.read_at

        def noting(descriptor, into, offset):
            self.needed[offset : offset + into.nbytes] = b"\1" * into.nbytes
            return real(descriptor, into, offset)

        medium.read_at = noting
        try:
            again = opened(folder, precision, moments)
            forward_sweep(again)
            for name in again.program.weights:
                for role in again.roles(name):
                    again.read(name, role, 0, math.prod(again.roles(name)[role].shape))
            again.close()
        finally:
            medium.read_at = real


@pytest.fixture(scope="module", params=quick_first(KINDS, KINDS[2:]), ids="-".join)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def flash(kind, tmp_path_factory):
    return Flash(tmp_path_factory.mktemp("flips") / "flash", *kind)


class flipped:
    """One bit of a file, the other way round inside the block."""

    def __init__(self, path, byte, bit):
        self.path, self.byte, self.mask = path, byte, 1 << bit

    def __enter__(self):
        with self.path.open("r+b", buffering=0) as file:
            file.seek(self.byte)
            value = file.read(1)[0]
            file.seek(self.byte)
            file.write(bytes([value ^ self.mask]))

    def __exit__(self, *_):
        self.__enter__()


def flip_extents(flash, count, seed):
    """Flip bits one by one; return how many were found in what, and how many nobody needs."""
    chosen = random.Random(seed)
    path = flash.folder / "extents"
    found = {}
    with FlashReader(flash.folder) as reader:
        step = reader.steps[-1]
        for _ in range(count):
            byte, bit = chosen.randrange(len(flash.extents)), chosen.randrange(8)
            with flipped(path, byte, bit):
                if not flash.needed[byte]:
                    reader.verify(step)
                    assert reader.content_hash(step) == flash.hash, (seed, byte, bit)
                    found["nobody's"] = found.get("nobody's", 0) + 1
                    continue
                with pytest.raises(CorruptionError) as caught:
                    reader.verify(step)
            text = str(caught.value)
            match = re.search(
                rf"^(.*): damaged in bytes ([\d,]+) to ([\d,]+), which hold (.*): .*"
                rf"{CHECKSUMS}",
                text,
            )
            assert match, text
            begin, end = (int(number.replace(",", "")) for number in match.group(2, 3))
            good = bytearray(flash.extents[begin:end])
            assert begin <= byte < end
            bad = bytearray(good)
            bad[byte - begin] ^= 1 << bit
            assert match[1] == str(path)
            assert match[5] == xxhash.xxh3_128_hexdigest(bytes(good))
            assert match[6] == xxhash.xxh3_128_hexdigest(bytes(bad))
            found[match[4]] = found.get(match[4], 0) + 1
    return found


def flip_journal(flash, count, seed):
    """Flip bits one by one: every byte of a journal is needed. Returns what was hit."""
    chosen = random.Random(seed)
    path = flash.folder / "journal"
    whole = read_records(path)[0]
    size, hit = path.stat().st_size, set()
    for _ in range(count):
        byte, bit = chosen.randrange(size), chosen.randrange(8)
        with flipped(path, byte, bit), pytest.raises(CorruptionError) as caught:
            read_records(path)
        text = str(caught.value)
        place = re.search(r"(header|seal) of record \d+, at byte ([\d,]+):", text)
        if place:
            begin = int(place[2].replace(",", ""))
            assert begin <= byte < begin + SECTOR_BYTES
            hit.add(place[1])
        else:
            place = re.search(r"record \d+, bytes ([\d,]+) to ([\d,]+):", text)
            assert place, text
            begin, end = (int(number.replace(",", "")) for number in place.groups())
            assert begin <= byte < end
            hit.add("payload")
        good, bad = re.search(CHECKSUMS, text).groups()
        assert text.startswith(f"{path}: ")
        assert bad != good
    assert read_records(path)[0] == whole
    return hit


@pytest.fixture(scope="module")
def checkpoint(kind, tmp_path_factory):
    """The folder of two checkpoints, and the store of which the newer one is."""
    folder = tmp_path_factory.mktemp("flips") / "checkpoints"
    precision, moments = kind
    store = training_store(program_of(precision), precision, optimizer=optimizer_of(moments))
    store.load(random_weights(store.program, 3).items())
    for step in (1, 2):
        train(store, 1, 3)
        save_checkpoint(store, folder, {"note": "é", "loss": 1.5, "saved_at": step}, best=step == 1)
    return folder, store


def flip_checkpoint(checkpoint, name, count, seed):
    """Flip bits of a file of the newer checkpoint; return how many changed nothing."""
    chosen = random.Random(f"{name} {seed}")
    folder = find_checkpoint(checkpoint[0], "latest")
    path = folder / name
    original, state, harmless = path.read_bytes(), verify_checkpoint(folder), 0
    for _ in range(count):
        byte, bit = chosen.randrange(len(original)), chosen.randrange(8)
        damaged = bytearray(original)
        damaged[byte] ^= 1 << bit
        with flipped(path, byte, bit):
            if name == "state.json" and same_json(original, damaged):
                assert verify_checkpoint(folder) == state
                harmless += 1
                continue
            with pytest.raises(CorruptionError, match=re.escape(str(path))) as caught:
                verify_checkpoint(folder)
        text = str(caught.value)
        if path.suffix == ".safetensors":
            assert f"damaged in bytes 0 to {len(original):,}" in text
            good, bad = re.search(CHECKSUMS, text).groups()
            assert bad == xxhash.xxh3_128_hexdigest(bytes(damaged))
            assert good == xxhash.xxh3_128_hexdigest(original)
        else:
            assert re.search(f"{CHECKSUMS}|it is not JSON: |no checksum or no content", text)
    return harmless


def flip_index(checkpoint, count, seed):
    chosen = random.Random(seed)
    path = checkpoint[0] / "index.json"
    original, harmless = path.read_bytes(), 0
    expected = find_checkpoint(checkpoint[0], "latest"), find_checkpoint(checkpoint[0], "best")
    for _ in range(count):
        byte, bit = chosen.randrange(len(original)), chosen.randrange(8)
        damaged = bytearray(original)
        damaged[byte] ^= 1 << bit
        with flipped(path, byte, bit):
            if same_json(original, damaged):
                assert find_checkpoint(checkpoint[0], "latest") == expected[0]
                assert find_checkpoint(checkpoint[0], "best") == expected[1]
                harmless += 1
                continue
            with pytest.raises(CorruptionError, match=re.escape(str(path))) as caught:
                find_checkpoint(checkpoint[0], "latest")
        text = str(caught.value)
        assert re.search(f"{CHECKSUMS}|it is not JSON: |no checksum or no content", text)
        assert text.endswith("delete the file: Penstock then uses the folders of the checkpoints")
    return harmless


def same_json(original, damaged):
    """Whether the flip made one spelling of the same content into another: 1e5 and 1E5."""
    try:
        return json.loads(damaged) == json.loads(original)
    except ValueError:
        return False


def flip_everything(flash, checkpoint, kind, count, seed):
    """Flip about `count` bits, half of them on flash."""
    precision, moments = kind
    found = flip_extents(flash, count * 3 // 10, seed)
    hit = flip_journal(flash, count // 5, seed)
    names = ["stage-00000.safetensors", "stage-00001.safetensors", "state.json"]
    for name in names:
        assert flip_checkpoint(checkpoint, name, count // 8, seed) < count // 80 + 2
    flip_index(checkpoint, count // 8, seed)
    store = training_store(checkpoint[1].program, precision, optimizer=optimizer_of(moments))
    load_checkpoint(store, find_checkpoint(checkpoint[0], "latest"))
    assert store.content_hash() == checkpoint[1].content_hash()
    return found, hit


def test_flipped_bit_is_detected_and_named(flash, checkpoint, kind):
    flip_everything(flash, checkpoint, kind, 200, seed=4)


@pytest.mark.slow
def test_ten_thousand_flipped_bits_are_detected_and_named(flash, checkpoint, kind):
    """3,400 of either precision of weights, and with 8-bit moments."""
    found, hit = flip_everything(flash, checkpoint, kind, 3_400, seed=5)
    assert hit == {"header", "payload", "seal"}
    held = {what for what in found if what != "nobody's"}
    for what in ("the weights of", "the state of"):
        for name in ("embed", "block.weight"):
            assert any(each.startswith(what) and name in each for each in held), (what, name)
    assert any(what.startswith("the weights of") and "frozen" in what for what in held)
    assert found["nobody's"] > 0


@pytest.mark.parametrize("moments", test_flash_crashes.DENSE)
@pytest.mark.parametrize("count", [60, pytest.param(2_000, marks=pytest.mark.slow)])
def test_flipped_bit_of_gradient_on_flash_is_detected_and_named(moments, count, tmp_path):
    """From when it leaves memory until its update: its file has no name, and is no other's."""
    store = test_flash_crashes.opened(tmp_path / "flash", moments)
    store.load(random_weights(store.program, 3).items())
    send(store, random_gradients(store.program, np.random.default_rng(3)))
    store._pipeline.drain()
    spill, chosen = store._spill, random.Random(6)
    path = Path(f"/proc/self/fd/{spill._file._descriptor}")
    blocks = [(u, b) for u in store._layout.units if u in spill for b in u.blocks]
    assert blocks
    for _ in range(count):
        unit, block = chosen.choice(blocks)
        good, bad = (allocate(spill.block_bytes(unit, block)) for _ in range(2))
        begin = spill._offset(unit, block)
        byte, bit = chosen.randrange(good.nbytes), chosen.randrange(8)
        spill.fetch(unit, block, good)
        with flipped(path, begin + byte, bit):
            spill.fetch(unit, block, bad)
        with pytest.raises(CorruptionError) as caught:
            spill.checked(unit, block, bad)
        text = str(caught.value)
        assert text.startswith(
            f"{tmp_path}/flash/gradients: damaged in bytes {begin:,} to {begin + good.nbytes:,}, "
            f"which hold gradients of {unit.names[0]}: "
        )
        assert re.search(CHECKSUMS, text).groups() == (
            xxhash.xxh3_128_hexdigest(bytes(good)),
            xxhash.xxh3_128_hexdigest(bytes(bad)),
        )
    store.discard()
    store.close()

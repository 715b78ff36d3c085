"""Formats of weights: exact for every pattern of bits, and as many bytes as they say."""

import numpy as np
import pytest
import torch
from store_programs import (
    LAYERS,
    SMALL_BLOCK,
    flash_store,
    forward_sweep,
    make_program,
    random_weights,
    train,
    training_store,
)

from penstock.errors import ConfigError, ProgramError
from penstock.program import verify
from penstock.store import AdamW, ShardMap, load_checkpoint, save_checkpoint
from penstock.store.checkpoint import read_state
from penstock.store.codecs import decode, encode, saved_values, values_of_saved
from penstock.store.flash import FlashReader
from penstock.store.flash.layout import FlashLayout
from penstock.weight_formats import BFLOAT16, DENSE, FORMATS, SPLIT, format_of

BFLOAT16_PATTERNS = np.arange(1 << 16, dtype=np.uint16)
"""All there are: zeros, subnormals, infinities and every NaN among them."""
FLOAT32_BITS = np.array(
    [
        0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF,
        0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF,
        0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0x3F80FFFF, 0x7F7F8000,
    ],
    np.uint32,
)  # fmt: skip
"""Zeros, subnormals, the greatest, infinities, NaNs, and what lies about a bfloat16 midway."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FROZEN = ("position", "block.0.weight", "block.1.weight", "block.1.scale")
NARROW = FROZEN[1:]


def parts_of(form, count):
    return [np.zeros(count, part.dtype) for part in form.parts]


@pytest.mark.parametrize("form", [DENSE, SPLIT])
@pytest.mark.parametrize("seed", range(3))
def test_trained_formats_give_back_every_float32(form, seed):
    drawn = np.random.default_rng(seed).integers(0, 1 << 32, 10_000, dtype=np.uint32)
    values = np.concatenate([FLOAT32_BITS, drawn]).view(np.float32)
    parts = parts_of(form, values.size)
    encode(form, "w", values, parts)
    found = decode(form, parts, 3, values.size - 5)
    assert np.array_equal(found.view(np.uint32), values[3:-5].view(np.uint32)), seed
    assert sum(part.nbytes for part in parts) == form.width * values.size


def test_bfloat16_gives_back_every_bfloat16():
    values = torch.from_numpy(BFLOAT16_PATTERNS).view(torch.bfloat16).float().numpy()
    (part,) = parts = parts_of(BFLOAT16, values.size)
    encode(BFLOAT16, "w", values, parts)
    assert np.array_equal(part, BFLOAT16_PATTERNS)
    found = decode(BFLOAT16, parts, 0, values.size)
    assert np.array_equal(found.view(np.uint32), BFLOAT16_PATTERNS.astype(np.uint32) << 16)
    saved = saved_values(BFLOAT16, "w", values)
    assert np.array_equal(values_of_saved(saved).view(np.uint32), values.view(np.uint32))


@pytest.mark.parametrize("bits", [int(b) for b in FLOAT32_BITS if b & 0xFFFF])
def test_bfloat16_refuses_any_other_float32(bits):
    values = np.array([1.0, 0.0], np.float32)
    values.view(np.uint32)[1] = bits
    with pytest.raises(ConfigError, match="weight w is stored as bfloat16, but its element 1 is"):
        encode(BFLOAT16, "w", values, parts_of(BFLOAT16, 2))


def test_what_streams_is_what_torch_says_it_is():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    for form in (SPLIT, BFLOAT16):
        parts = parts_of(form, values.numel())
        encode(form, "w", values.numpy(), parts)
        assert torch.equal(torch.from_numpy(parts[0]).view(form.stream_dtype), values.bfloat16())
    assert [one.width for one in FORMATS.values()] == [4, 4, 2, 4, 4]
    assert [format_of(t) for t in DTYPES.values()] == [DENSE, SPLIT]


def test_a_trained_weight_cannot_be_in_a_format_without_updates():
    program = make_program(LAYERS, narrow=("position",))
    with pytest.raises(ProgramError, match="'position' is trained, and its format bfloat16 takes"):
        verify(program)


def program_of(precision, narrow=NARROW):
    return make_program(LAYERS, FROZEN, DTYPES[precision], narrow=narrow)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("where", ["memory", "flash"])
def test_frozen_bfloat16_changes_bytes_and_no_bit(precision, where, tmp_path):
    """The same weights and gradients, with frozen weights in float32 and in bfloat16."""
    narrow, wide = program_of(precision), program_of(precision, narrow=())
    found = []
    for number, program in enumerate((narrow, wide)):
        if where == "memory":
            store = training_store(program, precision, clip_norm=1.0)
        else:
            store = flash_store(program, tmp_path / f"flash{number}", clip_norm=1.0)
        store.load(random_weights(narrow, 0).items())
        commits = train(store, 4, 0)
        streamed = {n: view.float() for n, view in forward_sweep(store).items()}
        store.take_traffic()
        forward_sweep(store)
        found.append((commits, streamed, store.content_hash(), store.take_traffic(), store))
    (commits, streamed, content, traffic, ours), (*others, whole, theirs) = found
    assert [commits, content] == [others[0], others[2]]
    assert all(torch.equal(view, others[1][name]) for name, view in streamed.items())
    elements = sum(narrow.weights[name].elements for name in NARROW)
    saved_on_the_way = 2 * elements if precision == "fp32" else 0
    assert whole.streamed_bytes - traffic.streamed_bytes == saved_on_the_way
    for name in NARROW:
        assert torch.equal(ours.master(name), theirs.master(name))
    if where == "flash":
        for store in (ours, theirs):
            store.close()


def test_memory_is_two_bytes_for_a_frozen_bfloat16():
    program = make_program(LAYERS, FROZEN, torch.bfloat16, narrow=FROZEN)
    store = training_store(program, "bf16")
    # In one slab per stage, where each weight but the last is filled up to 64 bytes.
    slabs = {0: 2 * 7 * 16, 1: 2 * 33 * 17, 2: 2 * 64 * 40 + 2}
    assert store.memory_bytes["bfloat16"] == sum(slabs.values())
    trained = sum(spec.elements for spec in program.weights.values() if spec.trainable)
    assert trained * 2 <= store.memory_bytes["low"] <= trained * 2 + 64 * len(program.weights)


def test_flash_keeps_two_bytes_of_a_frozen_bfloat16_and_the_rest_where_it_was():
    layers = ({"frozen": (8192,), "a": (4096,)}, {"b": (4096,)})
    roles = AdamW().roles

    def layout(**options):
        program = make_program(layers, ("frozen",), torch.bfloat16, **options)
        return FlashLayout.of(program, roles, 2, SMALL_BLOCK)

    before, after = layout(), layout(narrow=("frozen",))
    assert before.unit("frozen").place_bytes == 4 * 8192
    assert after.unit("frozen").place_bytes == 2 * 8192
    assert before.file_bytes - after.file_bytes == 2 * 8192
    # As the releases before had it: high halves, low halves and two moments, in three places.
    assert after.unit("a").place_bytes == after.unit("b").place_bytes == (2 + 2 + 8) * 4096
    assert [unit["split"] for unit in before.described()] == [True, True, True]
    assert [unit.get("format") for unit in after.described()].count("bfloat16") == 1
    again = FlashLayout.from_description(after.described(), 2, SMALL_BLOCK)
    assert again == after


def test_a_store_on_flash_opens_again_in_its_format(tmp_path):
    program = program_of("bf16")
    store = flash_store(program, tmp_path / "flash")
    store.load(random_weights(program, 0).items())
    train(store, 2, 0)
    store.make_durable()
    expected = store.content_hash()
    store.close()
    with FlashReader(tmp_path / "flash") as reader:
        reader.verify(2)
        assert reader.content_hash(2) == expected
    opened = flash_store(program, tmp_path / "flash")
    assert (opened.step, opened.content_hash()) == (2, expected)
    opened.close()
    with pytest.raises(ConfigError, match=r"'block.0.weight': kept as bf16, frozen there, fp32"):
        flash_store(program_of("bf16", narrow=()), tmp_path / "flash")


@pytest.mark.parametrize("count", [2, 3])
def test_shards_of_a_frozen_bfloat16_carry_equal_bytes(count):
    layers = ({"frozen": (64, 4096), "a": (64, 4096)},)
    program = make_program(layers, ("frozen",), narrow=("frozen",))
    loads = [
        sum(spec.stored_bytes for spec in part.weights.values())
        for part in ShardMap.of(program, count).parts(program)
    ]
    assert sum(loads) == (2 + 4) * 64 * 4096
    assert max(loads) - min(loads) <= 4 * 4096


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_holds_a_frozen_bfloat16_in_two_bytes(precision, tmp_path):
    program = program_of(precision)
    store = training_store(program, precision)
    store.load(random_weights(program, 0).items())
    train(store, 2, 0)
    narrow = save_checkpoint(store, tmp_path / "narrow", {})
    state = read_state(narrow.folder)
    kinds = {n: state.tensors[f"master/{n}"].extent.dtype for n in program.weights}
    assert kinds == {n: "BF16" if n in NARROW else "F32" for n in program.weights}
    for number, other in enumerate((program, program_of(precision, narrow=()))):
        opened = training_store(other, precision)
        load_checkpoint(opened, narrow.folder)
        assert (opened.step, opened.content_hash()) == (2, store.content_hash())
        again = save_checkpoint(opened, tmp_path / f"again{number}", {})
        third = training_store(program, precision)
        load_checkpoint(third, again.folder)  # float32 where it had to hold more
        assert third.content_hash() == store.content_hash()

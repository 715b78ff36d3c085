"""Packed folders: what is written is read back to the bit, and damaged ones are refused."""

import json
import struct

import numpy as np
import pytest
import torch
from hf_folders import model_of, save
from safetensors.torch import load_file, save_file

from penstock.errors import ConfigError, CorruptionError
from penstock.models import ModelSource
from penstock.training import prune_model

PACKED = "model.packed.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(model_of("gpt2"), tmp_path_factory.mktemp("gpt2"))


def pruned_by_hand(weight, sparsity):
    """The weight with its smallest magnitudes set to zero; without equal magnitudes."""
    count = int(np.floor(weight.numel() * (1 - sparsity) + 0.5))
    flat = weight.flatten()
    kept = flat.abs().argsort(descending=True)[:count]
    result = torch.zeros_like(flat)
    result[kept] = flat[kept]
    return result.view(weight.shape)


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.99])
def test_pruning_sets_the_smallest_magnitudes_to_zero(folder, tmp_path, sparsity):
    done = prune_model(folder, tmp_path / "out", sparsity)
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "out"))
    dense = {"transformer.wte.weight", "transformer.wpe.weight"}
    expected = {n for n, w in before.items() if w.dim() == 2 and n not in dense}
    assert set(done.kept) == expected
    for name, weight in before.items():
        wanted = pruned_by_hand(weight, sparsity) if name in expected else weight
        assert torch.equal(after[name], wanted), name
    assert done.sparsity == pytest.approx(sparsity, abs=0.001)


def test_packed_folder_is_read_as_the_dense_one(folder, tmp_path):
    prune_model(folder, tmp_path / "dense", 0.8)
    done = prune_model(folder, tmp_path / "packed", 0.8, packed=True)
    assert [path.name for path in done.files] == [PACKED]
    dense, packed = (ModelSource.from_hf(tmp_path / name) for name in ("dense", "packed"))
    weights = dict(packed.initial_weights(0))
    for name, weight in dense.initial_weights(0):
        assert torch.equal(weight, weights[name]), name
        mask = packed.mask(name)
        assert (mask is not None) == (name in done.kept)
        if mask is not None:
            assert np.array_equal(mask.mask(), (weight != 0).flatten().numpy())
    assert dense.mask("transformer.h.0.mlp.c_fc.weight") is None
    size = (tmp_path / "packed" / PACKED).stat().st_size
    assert size < 0.7 * (tmp_path / "dense" / "model.safetensors").stat().st_size


def test_pruning_a_packed_folder_keeps_the_masks_of_the_other_weights(folder, tmp_path):
    first = prune_model(folder, tmp_path / "first", 0.5, packed=True)
    further = prune_model(
        tmp_path / "first", tmp_path / "out", 0.9, patterns=["*.mlp.*"], packed=True
    )
    before, after = (ModelSource.from_hf(tmp_path / name) for name in ("first", "out"))
    others = set(first.kept) - set(further.kept)
    assert others
    for name in others:
        old, new = before.mask(name), after.mask(name)
        assert old is not None
        assert new is not None
        assert np.array_equal(old.mask(), new.mask())
    values = dict(before.initial_weights(0))
    for name, weight in after.initial_weights(0):
        if name not in further.kept:
            assert torch.equal(weight, values[name])


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_packed_values_have_the_type_that_is_asked_for(folder, tmp_path, dtype):
    prune_model(folder, tmp_path / "dense", 0.8, dtype=dtype)
    prune_model(folder, tmp_path / "packed", 0.8, dtype=dtype, packed=True)
    dense, packed = (ModelSource.from_hf(tmp_path / name) for name in ("dense", "packed"))
    weights = dict(packed.initial_weights(0))
    assert all(torch.equal(w, weights[name]) for name, w in dense.initial_weights(0))
    assert dense.weights_fingerprint() != packed.weights_fingerprint()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"sparsity": 1.0},
            "sparsity: expected a share of absent entries from 0 to below 1, such as 0.9, got 1.0",
        ),
        (
            {"sparsity": -0.1},
            "sparsity: expected a share of absent entries from 0 to below 1, such as 0.9, got -0.1",
        ),
        (
            {"sparsity": 0.99999},
            "sparsity: the mask of transformer.h.0.attn.c_attn.weight would keep no entry, "
            "expected at least 1; lower the sparsity, or leave this weight out of the sparse ones",
        ),
    ],
)
def test_sparsities_that_cannot_be(folder, tmp_path, options, expected):
    with pytest.raises(ConfigError) as raised:
        prune_model(folder, tmp_path / "out", **options)
    assert str(raised.value) == expected
    assert not (tmp_path / "out").exists()


def test_patterns_that_match_nothing(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"sparsity\.weights.*'\*\.nothing\.\*'"):
        prune_model(folder, tmp_path / "out", 0.5, patterns=["*.nothing.*"])


def test_embeddings_and_heads_stay_dense(tmp_path):
    llama = ModelSource.from_hf(save(model_of("llama"), tmp_path))
    assert llama.embeddings_and_head() == {"model.embed_tokens.weight", "lm_head.weight"}
    tied = ModelSource.from_preset("gpt2", {"n_layer": 1})
    assert tied.embeddings_and_head() == {"transformer.wte.weight", "transformer.wpe.weight"}


NAME = "transformer.h.0.mlp.c_fc.weight"


def _without(part):
    return lambda tensors: tensors.pop(NAME + part)


def _set(part, value):
    return lambda tensors: tensors.update({NAME + part: value})


DAMAGES = {
    "no values": _without(".packed_values"),
    "no mask": _without(".packed_index"),
    "no shape": _without(".packed_shape"),
    "both packed and dense": _set("", torch.zeros(2)),
    "a shape of zero": _set(".packed_shape", torch.tensor([0, 4])),
    "a negative shape": _set(".packed_shape", torch.tensor([-32, -128])),
    "a shape of 2^62": _set(".packed_shape", torch.tensor([2**31, 2**31])),
    "a shape of floats": _set(".packed_shape", torch.tensor([32.0, 128.0])),
    "a shape without dimensions": _set(".packed_shape", torch.empty(0, dtype=torch.int64)),
    "a shape of 65 dimensions": _set(".packed_shape", torch.ones(65, dtype=torch.int64)),
    "values in two dimensions": _set(".packed_values", torch.ones(2, 2)),
    "no value": _set(".packed_values", torch.empty(0)),
    "more values than elements": _set(".packed_values", torch.ones(32 * 128 + 1)),
    "a mask of floats": _set(".packed_index", torch.ones(4)),
    "a mask of megabytes": _set(".packed_index", torch.zeros(1 << 21, dtype=torch.uint8)),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damaged_packed_files_are_refused_at_once(folder, tmp_path, what):
    prune_model(folder, tmp_path, 0.8, packed=True)
    tensors = load_file(tmp_path / PACKED)
    DAMAGES[what](tensors)
    save_file(tensors, tmp_path / PACKED)
    with pytest.raises(CorruptionError, match="not a usable packed checkpoint"):
        ModelSource.from_hf(tmp_path)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        (".packed_index", torch.full((40,), 3, dtype=torch.uint8)),
        (".packed_index", torch.empty(0, dtype=torch.uint8)),
        (".packed_values", torch.ones(818)),  # one less than the mask keeps
    ],
)
def test_masks_of_another_weight_are_refused_when_read(folder, tmp_path, part, value):
    prune_model(folder, tmp_path, 0.8, packed=True)
    tensors = load_file(tmp_path / PACKED)
    tensors[NAME + part] = value
    save_file(tensors, tmp_path / PACKED)
    source = ModelSource.from_hf(tmp_path)
    with pytest.raises(CorruptionError, match="packed"):
        list(source.initial_weights(0, [NAME]))
    with pytest.raises(CorruptionError, match="packed"):
        source.mask(NAME)


def test_shape_of_another_model_is_refused(folder, tmp_path):
    prune_model(folder, tmp_path, 0.8, packed=True)
    tensors = load_file(tmp_path / PACKED)
    tensors[NAME + ".packed_shape"] = torch.tensor([128, 32])
    save_file(tensors, tmp_path / PACKED)
    with pytest.raises(ConfigError, match=r"is \[128, 32\], transformer\.h\.0\.mlp\.c_fc\.weight"):
        ModelSource.from_hf(tmp_path)


def test_file_has_the_layout_that_is_documented(folder, tmp_path):
    prune_model(folder, tmp_path, 0.9, packed=True)
    data = (tmp_path / PACKED).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    found = {
        key: header[NAME + key] for key in (".packed_values", ".packed_index", ".packed_shape")
    }
    kept = round(0.1 * 32 * 128)
    assert (found[".packed_values"]["dtype"], found[".packed_values"]["shape"]) == ("F32", [kept])
    assert found[".packed_index"]["dtype"] == "U8"
    assert (found[".packed_shape"]["dtype"], found[".packed_shape"]["shape"]) == ("I64", [2])
    assert NAME not in header
    assert "transformer.wte.weight" in header

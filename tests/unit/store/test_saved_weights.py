"""A checkpoint's weights in pieces: those of the store, each checked before it is given out."""

import itertools

import numpy as np
import pytest
import torch
from store_programs import make_program, random_weights, training_store

from penstock.errors import CorruptionError
from penstock.store import SavedWeights, save_checkpoint
from penstock.store.files import CHUNK_BYTES

ELEMENTS = 5_000_001  # three chunks, and no multiple of anything


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    program = make_program([{"small": (7,), "large": (ELEMENTS,)}, {"last": (3, 5)}])
    store = training_store(program)
    store.load(random_weights(program, seed=4).items())
    return store, save_checkpoint(store, tmp_path_factory.mktemp("run"), {}).folder


@pytest.mark.parametrize("seed", [0, 1])
def test_any_range_equals_the_store(saved, seed):
    store, folder = saved
    weights = SavedWeights(folder)
    assert weights.shapes == {"small": (7,), "large": (ELEMENTS,), "last": (3, 5)}
    random = np.random.default_rng(seed)
    cuts = [0, *sorted(random.integers(ELEMENTS, size=8).tolist()), ELEMENTS]
    for begin, end in itertools.pairwise(cuts):
        found = weights.read("large", "master", begin, end)
        assert found.dtype == np.float32
        assert np.array_equal(found, store.read("large", "master", begin, end)), (begin, end)
    for name in ("small", "last"):
        size = torch.Size(weights.shapes[name]).numel()
        assert np.array_equal(
            weights.read(name, "master", 0, size), store.master(name).flatten().numpy()
        )


def test_flipped_bit_is_found_only_at_its_position(saved, tmp_path):
    _, folder = saved
    damaged = tmp_path / "step"
    damaged.mkdir()
    for path in folder.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    large = max(damaged.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(large.read_bytes())
    content[CHUNK_BYTES + 9] ^= 4
    large.write_bytes(content)
    weights = SavedWeights(damaged)
    weights.read("large", "master", 0, 1000)
    weights.read("last", "master", 0, 15)
    begin = CHUNK_BYTES // 4
    with pytest.raises(CorruptionError, match=f"{large.name}: damaged in bytes 8,388,608 to"):
        weights.read("large", "master", begin, begin + 1000)

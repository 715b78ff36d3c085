"""Checkpoints: what is saved comes back to the bit, and what was changed on disk is named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import xxhash
from store_programs import LAYERS, make_program, random_weights, train, training_store

from penstock.errors import ConfigError, CorruptionError
from penstock.store import (
    SGD,
    Lion,
    find_checkpoint,
    load_checkpoint,
    read_state,
    save_checkpoint,
    verify_checkpoint,
)
from penstock.store.checkpoint import save as saving
from penstock.store.files import CHUNK_BYTES


def trained(layers=LAYERS, steps=3, seed=0, **settings):
    dtype = torch.bfloat16 if settings.get("precision") == "bf16" else torch.float32
    program = make_program(layers, frozen=("position",), stream_dtype=dtype)
    store = training_store(program, clip_norm=1.0, **settings)
    store.load(random_weights(program, seed).items())
    train(store, steps, seed)
    return store


def empty_like(store, layers=LAYERS, **settings):
    dtype = torch.bfloat16 if settings.get("precision") == "bf16" else torch.float32
    program = make_program(layers, frozen=("position",), stream_dtype=dtype)
    return training_store(program, clip_norm=1.0, **settings)


def everything(store):
    table = {}
    for name in store.program.weights:
        table[name] = store.master(name)
        for role, tensor in store.state(name).items():
            table[f"{role} of {name}"] = tensor.clone()
    return table


def assert_same_state(one, other):
    assert one.step == other.step
    left, right = everything(one), everything(other)
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name].view(torch.int32), right[name].view(torch.int32)), name


EXTRA = {"best_loss": 3.25, "seed": 7, "nothing": None, "names": ["a", "ü"], "inf": float("inf")}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(3))
def test_resumed_run_equals_uninterrupted_run(tmp_path, precision, seed):
    steady = trained(steps=7, seed=seed, precision=precision)
    stopped = trained(steps=4, seed=seed, precision=precision)
    saved = save_checkpoint(stopped, tmp_path, EXTRA)
    assert saved.folder == tmp_path / "step-00000004"
    assert saved.step == 4
    resumed = empty_like(stopped, precision=precision)
    assert load_checkpoint(resumed, find_checkpoint(tmp_path, "latest")) == EXTRA
    assert_same_state(resumed, stopped)
    train(resumed, 3, seed)
    assert_same_state(resumed, steady)
    assert resumed.content_hash() == steady.content_hash()


def test_saving_changes_no_bit(tmp_path):
    steady, saving_run = trained(steps=6), trained(steps=0)
    for _ in range(6):
        train(saving_run, 1, seed=0)
        save_checkpoint(saving_run, tmp_path, {})
    assert_same_state(steady, saving_run)


def test_checkpoint_loads_with_other_precision_and_stage_cut(tmp_path):
    store = trained()
    folder = save_checkpoint(store, tmp_path, {}).folder
    merged = [{name: shape for layer in LAYERS for name, shape in layer.items()}]
    for layers, precision in ((LAYERS, "bf16"), (merged, "fp32"), (merged, "bf16")):
        other = empty_like(store, layers, precision=precision)
        load_checkpoint(other, folder)
        assert_same_state(other, store)


def test_the_files_are_plain_safetensors_with_the_float32_weights(tmp_path):
    store = trained(precision="bf16")
    folder = save_checkpoint(store, tmp_path, {}).folder
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= safetensors.torch.load_file(path)
    for name in store.program.weights:
        assert torch.equal(found.pop(f"master/{name}"), store.master(name))
        for role, tensor in store.state(name).items():
            assert torch.equal(found.pop(f"{role}/{name}"), tensor)
    assert found == {}
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}


def test_large_stages_are_cut_into_files_of_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "MAX_FILE_BYTES", 6000)
    store = trained()
    folder = save_checkpoint(store, tmp_path, {}).folder
    largest = max(store.program.weights[name].elements * 4 for name in store.program.weights)
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    assert len(sizes) > len(LAYERS)
    assert max(sizes.values()) < max(6000, largest) + 2000
    other = empty_like(store)
    load_checkpoint(other, folder)
    assert_same_state(other, store)


# --- which checkpoints there are ------------------------------------------------------------------


def folders(checkpoints):
    return sorted(path.name for path in checkpoints.iterdir() if path.is_dir())


def test_the_last_two_and_the_best_are_kept(tmp_path):
    store = trained(steps=0)
    for step in range(1, 7):
        train(store, 1, seed=0)
        save_checkpoint(store, tmp_path, {"step": step}, best=step in (1, 2))
    assert folders(tmp_path) == ["step-00000002", "step-00000005", "step-00000006"]
    assert find_checkpoint(tmp_path, "latest").name == "step-00000006"
    assert find_checkpoint(tmp_path, "best").name == "step-00000002"
    assert find_checkpoint(tmp_path, 5).name == "step-00000005"
    with pytest.raises(ConfigError) as caught:
        find_checkpoint(tmp_path, 3)
    assert str(caught.value) == f"{tmp_path}: no checkpoint of step 3; there are: 2, 5, 6"
    assert all(read_state(tmp_path / name).extra["step"] for name in folders(tmp_path))
    with pytest.raises(ConfigError) as caught:
        find_checkpoint(tmp_path / "elsewhere", "best")
    assert "no checkpoint is marked as the best" in str(caught.value)
    assert find_checkpoint(tmp_path / "elsewhere", "latest") is None


def test_saving_a_step_twice_overwrites_nothing(tmp_path):
    store = trained(steps=4)
    first = save_checkpoint(store, tmp_path, {"turn": 1}).folder
    content = {path.name: path.read_bytes() for path in first.iterdir()}
    second = save_checkpoint(store, tmp_path, {"turn": 2}).folder
    assert second.name == "step-00000004-1"
    assert {path.name: path.read_bytes() for path in first.iterdir()} == content
    assert find_checkpoint(tmp_path, "latest") == find_checkpoint(tmp_path, 4) == second
    third = save_checkpoint(store, tmp_path, {"turn": 3}).folder
    fourth = save_checkpoint(store, tmp_path, {"turn": 4}).folder
    assert folders(tmp_path) == sorted([third.name, fourth.name])


def test_saves_after_rollback_to_older_checkpoint_are_kept(tmp_path):
    store = trained(steps=0)
    for _ in range(2):
        train(store, 10, seed=0)
        save_checkpoint(store, tmp_path, {})
    load_checkpoint(store, find_checkpoint(tmp_path, 10))
    train(store, 1, seed=5)
    save_checkpoint(store, tmp_path, {})
    assert find_checkpoint(tmp_path, "latest").name == "step-00000011"
    assert folders(tmp_path) == ["step-00000011", "step-00000020"]


def test_missing_index_is_replaced_by_the_folder_list(tmp_path):
    store = trained(steps=0)
    for _ in range(3):
        train(store, 1, seed=0)
        save_checkpoint(store, tmp_path, {})
    (tmp_path / "index.json").unlink()
    (tmp_path / "step-00000009").mkdir()  # incomplete: it has no state.json
    assert find_checkpoint(tmp_path, "latest").name == "step-00000003"


# --- what must be refused -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_folder(tmp_path_factory):
    """A checkpoint of 3 MB with several files; tests copy what they damage."""
    return save_checkpoint(
        trained([*LAYERS, {"large": (1000, 270)}]), tmp_path_factory.mktemp("c"), {"loss": 1.5}
    ).folder


def copy_of(folder, destination):
    destination.mkdir()
    for path in folder.iterdir():
        (destination / path.name).write_bytes(path.read_bytes())
    return destination


@pytest.mark.parametrize("seed", range(3))
def test_every_flipped_bit_is_found_and_named(tmp_path, saved_folder, seed):
    folder = copy_of(saved_folder, tmp_path / "step-00000003")
    store = training_store(make_program([*LAYERS, {"large": (1000, 270)}], frozen=("position",)))
    generator = np.random.default_rng(seed)
    for path in sorted(folder.iterdir()):
        original = path.read_bytes()
        places = [0, 7, 8, len(original) - 1, *generator.integers(len(original), size=12)]
        for place in places:
            damaged = bytearray(original)
            damaged[place] ^= 1 << int(generator.integers(8))
            path.write_bytes(damaged)
            if path.name == "state.json" and json.loads(original) == _json_or_none(damaged):
                continue  # one white space became another: nothing is lost
            with pytest.raises(CorruptionError, match=path.name) as caught:
                load_checkpoint(store, folder)
            if path.suffix == ".safetensors":
                good = xxhash.xxh3_128_hexdigest(original)
                bad = xxhash.xxh3_128_hexdigest(bytes(damaged))
                text = str(caught.value)
                assert f"damaged in bytes 0 to {len(original):,}" in text, f"{seed=} {place=}"
                assert f"expected checksum {good}, got {bad}" in text
        path.write_bytes(original)
    assert load_checkpoint(store, folder) == {"loss": 1.5}


def _json_or_none(data):
    try:
        return json.loads(data)
    except ValueError:
        return None


def test_damage_is_named_by_file_tensors_and_place(tmp_path):
    store = trained([{"first": (1 << 20,), "second": (1 << 21,)}], steps=1, optimizer=SGD())
    folder = save_checkpoint(store, tmp_path, {}).folder
    path = folder / "stage-00000.safetensors"
    with path.open("r+b") as file:
        file.seek(CHUNK_BYTES + 100)
        byte = file.read(1)
        file.seek(CHUNK_BYTES + 100)
        file.write(bytes([byte[0] ^ 16]))
    data = path.read_bytes()[CHUNK_BYTES:]
    expected = read_state(folder).files[path.name].checksums[1]
    with pytest.raises(CorruptionError) as caught:
        verify_checkpoint(folder)
    assert str(caught.value) == (
        f"{path}: damaged in bytes 8,388,608 to {path.stat().st_size:,}, which hold master/second: "
        f"expected checksum {expected}, got {xxhash.xxh3_128_hexdigest(data)}; use another "
        "checkpoint: without a store on flash, `penstock inspect RUN --repair` goes back to the "
        "newest intact one"
    )


def test_truncated_swapped_missing_or_empty_files_are_refused(tmp_path, saved_folder):
    name = "stage-00001.safetensors"
    content = (saved_folder / name).read_bytes()
    other = (saved_folder / "stage-00002.safetensors").read_bytes()
    size = len(content)
    folder = copy_of(saved_folder, tmp_path / "copy")
    for change, message in (
        (content[:-1], f"{name}: expected {size:,} bytes, got {size - 1:,}"),
        (content + b"0", f"{name}: expected {size:,} bytes, got {size + 1:,}"),
        (other, f"{name}: expected"),
        (bytes(size), f"{name}: damaged in bytes 0 to {size:,}"),
        (None, f"{name}: this file is missing"),
    ):
        (folder / name).unlink()
        if change is not None:
            (folder / name).write_bytes(change)
        with pytest.raises(CorruptionError, match=message):
            verify_checkpoint(folder)


def test_files_of_another_step_are_refused(tmp_path):
    store = trained(steps=1)
    older = save_checkpoint(store, tmp_path, {}).folder
    train(store, 1, 0)
    newer = save_checkpoint(store, tmp_path, {}).folder
    name = "stage-00001.safetensors"
    (newer / name).write_bytes((older / name).read_bytes())
    with pytest.raises(CorruptionError, match=f"{name}: damaged in bytes"):
        load_checkpoint(store, newer)


def test_store_is_unusable_after_a_damaged_load_until_reloaded(tmp_path):
    store = trained(steps=1)
    good = save_checkpoint(store, tmp_path, {}).folder
    expected = everything(store)
    train(store, 1, 0)
    bad = save_checkpoint(store, tmp_path, {}).folder
    (bad / "stage-00003.safetensors").write_bytes(b"")
    with pytest.raises(CorruptionError):
        load_checkpoint(store, bad)
    with pytest.raises(RuntimeError, match="holds no weights"):
        store.fetch(0)
    load_checkpoint(store, good)
    found = everything(store)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_checkpoint_of_another_model_is_refused_with_first_differences(tmp_path):
    folder = save_checkpoint(trained(), tmp_path, {}).folder
    other = [{"embed": (50, 16), "position": (7, 16)}, {"norm": (17,), "head": (5, 5)}]
    store = empty_like(None, other)
    with pytest.raises(ConfigError) as caught:
        load_checkpoint(store, folder)
    assert str(caught.value) == (
        f"{folder}: a checkpoint of another model: master/norm is F32 [16], not F32 [17]; "
        "exp_avg/norm is F32 [16], not F32 [17]; exp_avg_sq/norm is F32 [16], not F32 [17]; "
        "master/head is missing in it; exp_avg/head is missing in it; and 16 more; "
        "use the configuration that wrote it"
    )


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    folder = save_checkpoint(trained([{"a": (3,)}]), tmp_path, {}).folder
    store = empty_like(None, [{"a": (3,)}], optimizer=Lion())
    with pytest.raises(ConfigError) as caught:
        load_checkpoint(store, folder)
    assert str(caught.value) == (
        f"{folder}: a checkpoint of another optimizer: exp_avg_sq/a is only in it; use the "
        "optimizer that wrote it, or export it and start a new run from the export (model.hf)"
    )


def test_newer_checkpoint_format_is_refused(tmp_path):
    from penstock.store import sealed_json

    store = trained()
    folder = save_checkpoint(store, tmp_path, {}).folder
    for path, known in ((folder / "state.json", 3), (tmp_path / "index.json", 1)):
        content = sealed_json.unseal(path)
        path.write_bytes(sealed_json.seal(content | {"version": 4}))
        with pytest.raises(ConfigError) as caught:
            load_checkpoint(store, find_checkpoint(tmp_path, "latest"))
        assert str(caught.value) == (
            f"{path}: written in format 4 by a newer penstock; this one reads formats up to "
            f"{known}; update penstock to use it"
        )
        path.write_bytes(sealed_json.seal(content))


def test_folder_without_checkpoint_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"not a checkpoint: it has no state\.json"):
        read_state(tmp_path)


HOSTILE_STATES = {
    "a file outside": lambda c: c["files"].update({"../x": {"bytes": 0, "checksums": []}}),
    "an absolute file": lambda c: c["files"].update({"/etc/x": {"bytes": 0, "checksums": []}}),
    "too few checksums": lambda c: c["files"]["stage-00000.safetensors"].update(checksums=[]),
    "a size of 2^60": lambda c: c["files"]["stage-00000.safetensors"].update(bytes=2**60),
    "a tensor in no file": lambda c: c["tensors"]["master/norm"].__setitem__(0, "other"),
    "a tensor that is a text": lambda c: c["tensors"].update({"master/norm": "here"}),
    "a tensor elsewhere": lambda c: c["tensors"]["master/norm"].__setitem__(3, 64),
    "another chunk size": lambda c: c.update(chunk_bytes=1),
    "a negative step": lambda c: c.update(step=-1),
    "no files": lambda c: c.pop("files"),
}


@pytest.mark.parametrize("what", HOSTILE_STATES)
def test_forged_state_with_valid_checksum_is_refused(tmp_path, saved_folder, what):
    from penstock.store import sealed_json

    folder = copy_of(saved_folder, tmp_path / "step-00000003")
    content = sealed_json.unseal(folder / "state.json")
    HOSTILE_STATES[what](content)
    (folder / "state.json").write_bytes(sealed_json.seal(content))
    with pytest.raises(CorruptionError):
        verify_checkpoint(folder)


def test_damaged_index_error_names_the_remedy(tmp_path):
    save_checkpoint(trained(), tmp_path, {})
    path = tmp_path / "index.json"
    path.write_text(path.read_text().replace("step-00000003", "step-00000002"))
    with pytest.raises(CorruptionError, match="delete the file: Penstock then uses the folders"):
        find_checkpoint(tmp_path, "latest")


@pytest.mark.long
def test_saving_and_loading_need_no_second_copy_of_the_model(tmp_path):
    script = Path(__file__).with_name("checkpoint_memory.py")
    paths = os.pathsep.join(map(str, Path(__file__).parents[1:3]))
    result = subprocess.run(
        [sys.executable, script, tmp_path], env={"PYTHONPATH": paths}, capture_output=True
    )
    assert result.returncode == 0, result.stderr.decode()
    state_bytes, save_growth, load_growth = map(int, result.stdout.split())
    assert state_bytes > 500 << 20
    assert save_growth < 100 << 20
    assert load_growth < 100 << 20

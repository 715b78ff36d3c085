"""An exported folder is what `from_pretrained` loads, to the bit."""

import json

import pytest
import torch
import transformers
from store_programs import make_program, train, training_store

from penstock.errors import ConfigError, NonFiniteError, StorageError
from penstock.models import Adapter
from penstock.store import DramStore, export_adapters, export_huggingface, files


def tiny_gpt2(seed=0):
    torch.manual_seed(seed)
    config = transformers.GPT2Config(vocab_size=97, n_positions=16, n_embd=24, n_layer=2, n_head=3)
    return transformers.GPT2LMHeadModel(config)


def store_of(model, precision="fp32", frozen=()):
    """A store with the model's weights, one stage per block; the head is tied."""
    layers = [{}, {}, {}, {}]
    for name, weight in model.named_parameters():
        parts = name.split(".")
        place = int(parts[2]) + 1 if parts[1] == "h" else 3 if parts[1] == "ln_f" else 0
        layers[place][name] = tuple(weight.shape)
    layers[3]["transformer.wte.weight"] = layers[0]["transformer.wte.weight"]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    store = training_store(make_program(layers, frozen, dtype), precision)
    store.load(model.named_parameters())
    return store


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("max_shard_bytes", [2 << 30, 20_000])
def test_transformers_loads_the_trained_weights(tmp_path, precision, max_shard_bytes):
    model = tiny_gpt2()
    store = store_of(model, precision, frozen=("transformer.wpe.weight",))
    train(store, 2, seed=0)
    folder = tmp_path / "out" / "model"
    paths = export_huggingface(
        store,
        folder,
        config=model.config.to_dict(),
        max_shard_bytes=max_shard_bytes,
    )
    assert (len(paths) > 1) == (max_shard_bytes < 1 << 20)
    assert all(path.stat().st_size < max_shard_bytes + 4096 for path in paths)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(folder)
    assert loaded.dtype == torch.float32
    parameters = dict(loaded.named_parameters())
    assert parameters.keys() == store.program.weights.keys()
    for name, weight in parameters.items():
        assert torch.equal(weight, store.master(name)), name
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_export_rounds_as_pytorch(tmp_path, dtype):
    model = tiny_gpt2(1)
    export_huggingface(
        store_of(model, "bf16"), tmp_path / "m", config=model.config.to_dict(), dtype=dtype
    )
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "m", dtype="auto")
    for name, weight in loaded.named_parameters():
        assert weight.dtype == dtype
        assert torch.equal(weight, model.get_parameter(name).to(dtype)), name


@pytest.mark.parametrize(
    ("value", "dtype", "error", "message"),
    [
        (
            -70_000.0,
            torch.float16,
            ConfigError,
            "weight a does not fit fp16: it holds 70,000, the largest possible value is 65,504; "
            "use --dtype bf16 or fp32",
        ),
        (
            3.4e38,
            torch.bfloat16,
            ConfigError,
            "weight a does not fit bf16: it holds 3.4e+38, the largest possible value is "
            "3.38953e+38; use --dtype fp32",
        ),
        (
            float("nan"),
            torch.float32,
            NonFiniteError,
            "weight a holds NaN or infinity, so nothing was exported; train again with a lower "
            "optimizer.learning_rate",
        ),
    ],
)
def test_non_finite_weight_is_not_exported(tmp_path, value, dtype, error, message):
    store = DramStore(make_program([{"a": (8, 2), "b": (2, 8)}]), "fp32")
    weights = {"a": torch.ones(8, 2), "b": torch.ones(2, 8)}
    weights["a"][5, 1] = value
    store.load(weights.items())
    with pytest.raises(error) as caught:
        export_huggingface(store, tmp_path / "model", config={}, dtype=dtype)
    assert str(caught.value) == message
    adapter = Adapter(down="a", up="b", rank=2, alpha=2.0, dropout=0.0, transposed=False)
    with pytest.raises(error) as caught:
        export_adapters(store, tmp_path / "adapters", {"w": adapter}, task="causal_lm", dtype=dtype)
    assert str(caught.value) == message
    assert not list(tmp_path.iterdir())


def test_tokenizer_and_json_files_are_exported(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    (tmp_path / "vocab.txt").write_bytes(b"\xff\x00")
    model = tiny_gpt2()
    files_in = [tmp_path / "tokenizer.json", tmp_path / "vocab.txt"]
    folder = tmp_path / "m"
    export_huggingface(store_of(model), folder, config=model.config.to_dict(), files=files_in)
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "vocab.txt",
    }
    assert all((folder / path.name).read_bytes() == path.read_bytes() for path in files_in)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"


def test_failed_export_overwrites_nothing_and_leaves_no_partial_file(tmp_path, monkeypatch):
    store = DramStore(make_program([{"a": (1000,)}]), "fp32")
    store.load([("a", torch.ones(1000))])
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "mine.txt").write_text("precious")
    with pytest.raises(ConfigError) as caught:
        export_huggingface(store, folder, config={})
    assert str(caught.value) == f"{folder}: already in use; choose a new folder, or delete this one"
    monkeypatch.setattr(files, "free_bytes", lambda place: 1_000)
    with pytest.raises(StorageError) as caught:
        export_huggingface(store, tmp_path / "n", config={})
    assert str(caught.value) == (
        f"{tmp_path}/n: cannot write it: No space left on device; it needs 4,104 bytes, 1,000 "
        "bytes are free; free some space or choose another folder; what was saved before is "
        "unchanged"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    with pytest.raises(ConfigError, match=r"not as torch\.int8"):
        export_huggingface(store, tmp_path / "n", config={}, dtype=torch.int8)

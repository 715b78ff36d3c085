"""A Hugging Face checkpoint comes in, trains as in plain PyTorch, resumes alone and goes out."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hf_folders import FAMILIES, auto_class, model_of, save, set_config
from plain_training import Recipe, streamed
from safetensors import safe_open
from test_exactness import assert_same_training
from tiny_models import LENGTH, VOCABULARY, Case, language_model
from transformers import AutoTokenizer
from typer.testing import CliRunner

from penstock import Trainer
from penstock.cli.app import app
from penstock.config import Config, check_run, load_run
from penstock.data import build_dataset
from penstock.engine import Batch, EnginePlan, TorchEngine
from penstock.errors import ConfigError, CorruptionError, DataError
from penstock.models import ModelSource
from penstock.planning.builders import compile_source
from penstock.store import DramStore
from penstock.store.flash import recorded_extra
from penstock.training.export import export_run

FORMS = {
    "gpt2": (torch.float32, None),
    "llama": (torch.bfloat16, "10KB"),
    "llama-tied": (torch.float16, None),
    "qwen3": (torch.float32, "20KB"),
    "bert": (torch.bfloat16, None),
}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, read by the library."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family, tmp_path):
    dtype, shard = FORMS[family]
    save(model_of(family, seed=1, dtype=dtype), tmp_path, shard)
    ids = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    inputs = {"input_ids": ids}
    if family == "bert":
        inputs["attention_mask"] = (torch.arange(LENGTH) < 12).long().expand(2, -1)
    source = ModelSource.from_hf(tmp_path)
    program = compile_source(source, micro_batch=2, length=LENGTH, precision="fp32", goal="logits")
    store = DramStore(program, "fp32")
    store.load(source.initial_weights(0, list(program.weights)))
    engine = TorchEngine(program, EnginePlan(), device="cpu", budget_bytes=1 << 28)
    engine.begin(Batch([inputs], 0, 1, 0, 0))
    for stage in program.stages:
        engine.load(stage.index, store.stream(stage.weights))
        engine.infer(stage.index)
    model = auto_class(family).from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(**inputs).logits
    torch.testing.assert_close(engine.results()[0][0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_five_steps_from_a_checkpoint_agree_with_plain_pytorch(family, tmp_path):
    dtype, shard = FORMS[family]
    folder = save(model_of(family, seed=2, dtype=dtype), tmp_path / "hf", shard)
    model_type, _ = FAMILIES[family]
    plain = language_model(model_type)
    case = Case(
        family,
        lambda: auto_class(family).from_pretrained(folder, dtype=torch.float32),
        lambda seed: ModelSource.from_hf(folder),
        plain.loss,
        plain.arrays,
    )
    recipe = Recipe(steps=5, warmup_steps=1)
    assert_same_training(streamed(case, recipe, tmp_path / "run"), case, recipe)


TEXT = "the water turns the wheel, the weights turn the loss, and the stream goes on\n" * 200


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A Llama checkpoint in shards with all that comes along, and a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("made")
    (folder / "text.txt").write_text(TEXT)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = [*sorted(set(TEXT) - {" ", "\n"}), "Ġ", "Ċ"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["</s>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([TEXT], trainer=trainer)
    assert tokenizer.get_vocab_size() <= VOCABULARY
    hf = save(model_of("llama", dtype=torch.bfloat16), folder / "hf", "10KB")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    fast.save_pretrained(hf)
    (hf / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7}))
    (hf / "LICENSE").write_text("do as you like")
    return folder


def settings(made: Path, run: Path, steps: int, **changes) -> dict:
    return {
        "model": {"hf": str(made / "hf")},
        "data": {"input": [str(made / "text.txt")], "sequence_length": 16},
        "batch": {"size": 4, "micro": 2},
        "optimizer": {"learning_rate": 1e-3, "schedule": {"name": "constant"}},
        "engine": {"threads": 1},
        "run": {"dir": str(run), "steps": steps},
        "evaluation": {"every": None},
        **changes,
    }


def on_flash(run: Path) -> dict:
    return {"store": {"dram": "16MiB", "flash": {"path": str(run / "flash")}}}


def trained(config: dict) -> tuple[str, int]:
    trainer = Trainer(config)
    trainer.train()
    found = trainer.store.content_hash(), trainer.step
    trainer.close()
    return found


@pytest.fixture(scope="module")
def unbroken(made, tmp_path_factory):
    """The hash after four steps without a pause, and the run."""
    run = tmp_path_factory.mktemp("unbroken") / "run"
    return trained(settings(made, run, 4))[0], run


@pytest.mark.long
@pytest.mark.parametrize("store", ["dram", "flash"])
def test_resumed_run_does_not_need_the_checkpoint(store, made, unbroken, tmp_path):
    shutil.copytree(made / "hf", tmp_path / "hf")
    (tmp_path / "text.txt").symlink_to(made / "text.txt")
    extra = on_flash(tmp_path) if store == "flash" else {}
    trained(settings(tmp_path, tmp_path / "run", 2, **extra))
    shutil.rmtree(tmp_path / "hf")
    assert trained(settings(tmp_path, tmp_path / "run", 4, **extra)) == (unbroken[0], 4)


@pytest.mark.long
def test_checkpoint_content_not_path_identifies_the_run(made, unbroken, tmp_path):
    run = tmp_path / "run"
    trained(settings(made, run, 2))
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "text.txt").symlink_to(made / "text.txt")
    shutil.copytree(made / "hf", moved / "hf")
    assert trained(settings(moved, run, 3))[1] == 3
    save(model_of("llama", seed=9, dtype=torch.bfloat16), moved / "hf", "10KB")
    with pytest.raises(ConfigError) as caught:
        trained(settings(moved, run, 4))
    assert str(caught.value) == (
        f"{run} was started from other weights than model.hf has now; set model.hf to the folder "
        "that the run was started from (a deleted folder is also accepted), or choose another "
        "run.dir"
    )
    assert trained(settings(made, run, 4)) == (unbroken[0], 4)
    preset = Config.from_mapping({**settings(made, run, 5), "model": "tiny"})
    with pytest.raises(ConfigError, match=r'model\.hf: "a checkpoint" in the run, null now'):
        check_run(preset, recorded_extra)


def test_untrained_weights_on_flash_are_not_confused_with_others(made, tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    trainer = Trainer(settings(made, run, 2, **on_flash(tmp_path)))
    expected = tensors_of(made / "hf")
    assert trainer.program.weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(trainer.store.master(name), tensor.float()), name
    trainer.close()
    other.mkdir()
    (other / "text.txt").symlink_to(made / "text.txt")
    shutil.copytree(made / "hf", other / "hf")
    save(model_of("llama", seed=9, dtype=torch.bfloat16), other / "hf", "10KB")
    message = "holds untrained weights of another checkpoint than .*other/hf; delete the folder"
    with pytest.raises(ConfigError, match=message):
        Trainer(settings(other, run, 2, **on_flash(tmp_path)))


def test_export_import_export_is_identical(made, tmp_path):
    """Through Penstock and out again, untouched: tensors, tokenizer, and what else came along."""
    frozen = {"optimizer": {"learning_rate": 1e-12, "weight_decay": 0.0}}
    config = settings(made, tmp_path / "one", 1, **frozen, **on_flash(tmp_path))
    trained(config)
    out = CliRunner().invoke(
        app,
        f"export {tmp_path}/one {tmp_path}/first --dtype bf16 --shard-size 10KB".split(),
    )
    assert out.exit_code == 0, out.output
    first = tmp_path / "first"
    shards = sorted(path.name for path in first.glob("*.safetensors"))
    assert len(shards) > 3
    assert all((first / name).stat().st_size < 10_000 + 4096 for name in shards)
    index = json.loads((first / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == shards
    assert "wrote" in out.output
    again = {**settings(made, tmp_path / "two", 1, **frozen), "model": {"hf": str(first)}}
    trainer = Trainer(again)
    trainer.export(tmp_path / "second", "bf16", 20_000)
    expected = tensors_of(made / "hf")
    for folder in (first, tmp_path / "second"):
        found = tensors_of(folder)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == torch.bfloat16
            assert torch.equal(found[name], tensor), name
        names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"]
        for name in [*names, "generation_config.json"]:
            if (made / "hf" / name).exists():
                assert (folder / name).read_bytes() == (made / "hf" / name).read_bytes(), name


def test_a_trained_run_is_exported_for_transformers(unbroken, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, run = unbroken
    export_run(load_run(run), tmp_path / "out", "fp32", 20_000)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    trainer = Trainer(load_run(run))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), trainer.store.master(name)), name
    assert model.generation_config.max_new_tokens == 7
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = trainer._data.dataset.tokenizer()
    text = "the water turns the weights"
    assert tokenizer(text)["input_ids"] == ours.encode_batch([text])[0].tolist()
    assert tokenizer.apply_chat_template([{"content": "hello"}], tokenize=False) == "hello"


def test_a_damaged_checkpoint_is_not_exported(unbroken, tmp_path):
    shutil.copytree(unbroken[1], tmp_path / "run")
    *_, file = sorted((tmp_path / "run" / "checkpoints").glob("step-*/*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptionError, match=f"{file.name}: damaged in bytes"):
        export_run(load_run(tmp_path / "run"), tmp_path / "out", "fp32", 1 << 30)
    assert not (tmp_path / "out").exists()


def test_run_keeps_the_configuration_that_was_trained(made, tmp_path):
    shutil.copytree(made / "hf", tmp_path / "hf")
    (tmp_path / "text.txt").symlink_to(made / "text.txt")
    trainer = Trainer(settings(tmp_path, tmp_path / "run", 2))
    before = json.loads((tmp_path / "hf" / "config.json").read_text())
    set_config(tmp_path / "hf", rms_norm_eps=0.5)
    trainer.train()
    trainer.close()
    kept = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert kept == before
    assert trained(settings(tmp_path, tmp_path / "run", 4))[1] == 4


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(made, tmp_path):
    shutil.copytree(made / "hf", tmp_path / "tokenizer", ignore=shutil.ignore_patterns("c*", "m*"))
    config = settings(made, tmp_path / "run", 1)
    config["data"] |= {"tokenizer": str(tmp_path / "tokenizer")}
    path = tmp_path / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    for number in range(VOCABULARY):
        content["model"]["vocab"].setdefault(f"more{number}", len(content["model"]["vocab"]))
    path.write_text(json.dumps(content))
    config["run"]["dir"] = str(tmp_path / "more")
    with pytest.raises(DataError, match=r"vocab_size 96"):
        Trainer(config)


@pytest.fixture(scope="module")
def otherwise(made):
    """A data set of the same text by another tokenizer of the same size, whose ids all fit."""
    from tokenizers import Tokenizer

    shutil.copytree(made / "hf", made / "turned", ignore=shutil.ignore_patterns("c*", "m*"))
    path = made / "turned" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    a, b = (vocabulary[letter] for letter in "es")
    vocabulary |= {"e": b, "s": a}
    path.write_text(json.dumps(content))
    assert Tokenizer.from_file(str(path)).get_vocab_size() <= VOCABULARY
    build_dataset([made / "text.txt"], str(made / "turned"), made / "by-turned")
    return made / "by-turned"


def test_data_set_of_another_tokenizer_is_refused(made, otherwise, tmp_path):
    data = {"path": str(otherwise), "sequence_length": 16}
    message = (
        f"{otherwise} was built with the tokenizer turned, but the tokenizer of the model in {{}} "
        "gives other ids; build the data set with that folder as its tokenizer, or set "
        "data.tokenizer: turned if the model is to learn other tokens"
    )
    with pytest.raises(DataError) as caught:
        Trainer(settings(made, tmp_path / "run", 1, data=data))
    assert str(caught.value) == message.format(made / "hf")
    meant = {**data, "tokenizer": "turned"}
    assert trained(settings(made, tmp_path / "run", 1, data=meant))[1] == 1
    with pytest.raises(DataError) as caught:  # the run resumes from what it kept of the folder
        Trainer(settings(made, tmp_path / "run", 2, data=data))
    assert str(caught.value) == message.format(tmp_path / "run" / "model")


def test_data_set_of_resaved_model_tokenizer_is_accepted(made, tmp_path):
    build_dataset([made / "text.txt"], str(made / "hf"), tmp_path / "data")
    AutoTokenizer.from_pretrained(made / "hf", model_max_length=64).save_pretrained(tmp_path / "t")
    shutil.copytree(made / "hf", tmp_path / "hf")
    shutil.copy(tmp_path / "t" / "tokenizer.json", tmp_path / "hf" / "tokenizer.json")
    data = {"path": str(tmp_path / "data"), "sequence_length": 16}
    assert trained(settings(tmp_path, tmp_path / "run", 1, data=data))[1] == 1


def test_masked_training_uses_the_tokenizers_mask_token(made, tmp_path):
    from tokenizers import Tokenizer

    shutil.copytree(made / "hf", tmp_path / "hf", ignore=shutil.ignore_patterns("model*", "conf*"))
    save(model_of("bert"), tmp_path / "hf")
    tokenizer = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    tokenizer.add_special_tokens(["[MASK]"])
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab_size()
    set_config(tmp_path / "hf", vocab_size=VOCABULARY)
    assert vocabulary <= VOCABULARY
    (tmp_path / "text.txt").symlink_to(made / "text.txt")
    trainer = Trainer(settings(tmp_path, tmp_path / "run", 2))
    assert trainer._data.training.mask_token_id == tokenizer.token_to_id("[MASK]")
    trainer.train()

"""LoRA by weight streaming, against adapters written out in plain PyTorch.

`PlainLora` is the reference: a layer of `transformers` with its two matrices beside it.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from grids import quick_first
from plain_training import Recipe, assert_same_training, streamed, trained_by, trainer_of
from safetensors.torch import load_file
from tiny_models import LENGTH, ROWS, language_model, with_rows
from torch import nn
from torch.nn import functional as F

from penstock.cli import main
from penstock.engine import Batch, EnginePlan, TorchEngine
from penstock.errors import ConfigError
from penstock.planning.builders import compile_source
from penstock.progress.figures import show_count
from penstock.telemetry.events import Notice
from penstock.training.export import export_adapters

RANK, ALPHA = 4, 6.0
TARGETS = {
    "gpt2": ("*.attn.c_attn.weight", "*.mlp.c_fc.weight", "*.mlp.c_proj.weight"),
    "llama": ("*.q_proj.weight", "*.v_proj.weight", "*.down_proj.weight"),
}
# The gradients of adapters are small: the clip is to bind here as it does elsewhere.
RECIPE = Recipe(steps=10, warmup_steps=2, learning_rate=1e-2, clip_norm=0.05)


class PlainLora(nn.Module):
    """y = base(x) + (alpha / rank) (x A^T) B^T, the base a Linear or a Conv1D."""

    def __init__(self, base, down, up, scale):
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = nn.Linear(down.shape[1], down.shape[0], bias=False)
        self.lora_B = nn.Linear(up.shape[1], up.shape[0], bias=False)
        with torch.no_grad():
            self.lora_A.weight.copy_(down)
            self.lora_B.weight.copy_(up)
        self.scale, self.transposed = scale, not isinstance(base, nn.Linear)

    def forward(self, x):
        weight = self.weight.T if self.transposed else self.weight
        return F.linear(x, weight, self.bias) + self.scale * self.lora_B(self.lora_A(x))


def lora(family, **changes):
    return {"rank": RANK, "alpha": ALPHA, "targets": list(TARGETS[family]), **changes}


def with_plain_adapters(model, values, scale=ALPHA / RANK):
    """Put `PlainLora` in the place of every layer that `values` has an A and a B for."""
    for name in [n for n in values if n.endswith(".lora_A.weight")]:
        path = name.removesuffix(".lora_A.weight")
        parent, _, attribute = path.rpartition(".")
        up = values[f"{path}.lora_B.weight"]
        layer = PlainLora(model.get_submodule(path), values[name], up, scale)
        setattr(model.get_submodule(parent), attribute, layer)
    return model


def adapted(case, recipe, trained=()):
    """Return the case and the recipe of the reference: adapters, and what else is not frozen."""
    source = case.source(recipe.seed).with_adapters(
        rank=RANK, alpha=ALPHA, targets=TARGETS[case.name]
    )
    start = dict(source.initial_weights(recipe.seed, source.adapter_weights))
    frozen = [n for n in source.shapes() if n not in start and n not in trained]
    plain_case = replace(case, build=lambda: with_plain_adapters(case.build(), start))
    return plain_case, replace(recipe, freeze=tuple(frozen))


@pytest.mark.parametrize(
    ("family", "train", "seed"),
    [
        ("gpt2", (), 0),
        pytest.param("gpt2", ("*.ln_1.bias",), 1, marks=pytest.mark.long),
        pytest.param("llama", (), 1, marks=pytest.mark.long),
    ],
)
def test_ten_steps_agree_with_plain_pytorch(family, train, seed, tmp_path):
    case, recipe = language_model(family), replace(RECIPE, seed=seed)
    trainer, events = trainer_of(case, recipe, tmp_path, lora=lora(family), train=list(train))
    trainer.train()
    ours = trained_by(trainer, events)
    named = {n for n in ours.weights if n.endswith("ln_1.bias")} if train else ()
    assert_same_training(ours, *adapted(case, recipe, named))
    start = dict(case.plain(seed).named_parameters())
    changed = {n for n, w in start.items() if not torch.equal(w, ours.weights[n])}
    assert changed == set(named)
    assert ours.weights.keys() - start.keys() == trainer.model.adapter_weights
    trained = sum(ours.weights[n].numel() for n in (*named, *trainer.model.adapter_weights))
    for event in events:
        assert event.gradient_bytes == 4 * trained  # of frozen weights nothing comes back


@pytest.mark.long
def test_comparison_detects_another_scale(tmp_path):
    case = language_model("gpt2")
    ours = streamed(case, RECIPE, tmp_path, lora=lora("gpt2", alpha=ALPHA * 1.01))
    with pytest.raises(AssertionError):
        assert_same_training(ours, *adapted(case, RECIPE))


@pytest.mark.long
@pytest.mark.parametrize("precision", quick_first(["fp32", "bf16"], ["fp32"]))
def test_frozen_weights_stream_without_optimizer_state(precision, tmp_path):
    """Bytes from the module's parameters alone; without weight decay, A too trains by gradient."""
    case = language_model("llama")
    recipe = Recipe(steps=3, warmup_steps=0, weight_decay=0.0, learning_rate=0.1)
    trainer, events = trainer_of(
        case, recipe, tmp_path, precision=precision, lora=lora("llama"),
        engine={"recompute": "always"},
    )  # fmt: skip
    trainer.train()
    ours = trained_by(trainer, events)
    start = dict(case.plain(0).named_parameters())
    assert all(torch.equal(weight, ours.weights[name]) for name, weight in start.items())
    adapters = {n: w for n, w in ours.weights.items() if n not in start}
    trained = sum(w.numel() for w in adapters.values())
    in_blocks = sum(w.numel() for n, w in ours.weights.items() if ".layers." in n)
    outside = sum(w.numel() for n, w in ours.weights.items() if ".layers." not in n)
    size = 2 if precision == "bf16" else 4
    memory = trainer.store.memory_bytes
    kept = memory.pop("gradient")
    assert sum(memory.values()) == 4 * (in_blocks + outside) + 8 * trained
    assert kept == size * trained  # in the precision of the run
    for event in events:
        assert event.streamed_bytes == size * (outside + 2 * in_blocks)
        assert event.gradient_bytes == 4 * trained
    first = dict(trainer.model.initial_weights(0, adapters))
    assert not any(torch.equal(first[name], adapters[name]) for name in adapters)


def run_bits(folder, until=None, **changes):
    """Return the hash of six steps in bf16 with dropout in the adapters; maybe stopped between.

    What the steps write to flash is less than the frozen weights are, which are there already.
    """
    recipe = Recipe(steps=6, warmup_steps=0)
    settings = {"precision": "bf16", "lora": lora("gpt2", dropout=0.25), **changes}
    for stop in (until, None) if until else (None,):
        trainer, steps = trainer_of(language_model("gpt2"), recipe, folder, stop, **settings)
        trainer.train()
        assert trainer.program.draws_dropout
        frozen = trainer.program.parameters - trainer.program.trainable_parameters
        assert all(step.flash_written_bytes < 4 * frozen for step in steps)
        found = trainer.store.content_hash()
        trainer.close()
    return found


@pytest.mark.long
def test_any_store_engines_recomputation_and_stop_give_the_same_bits(tmp_path):
    bits = run_bits(tmp_path / "one")
    flash = {"dram": "64MiB", "flash": {"path": str(tmp_path / "flash")}}
    assert run_bits(tmp_path / "two", engine={"recompute": "always"}, engines=2) == bits
    assert run_bits(tmp_path / "three", until=3, store=flash) == bits


@pytest.mark.long
@pytest.mark.parametrize("freeze", [[], ["*.lora_B.weight"]])
def test_only_untrained_adapters_are_named(freeze, tmp_path):
    """A's gradient is zero in the first step, since B is; as long as B stays zero, in all."""
    told = []
    trainer, _ = trainer_of(
        language_model("llama"), Recipe(steps=7), tmp_path, lora=lora("llama"), freeze=freeze
    )
    listener = trainer._listener
    trainer._listener = lambda event: (listener(event), told.append(event))
    trainer.train()
    notices = [event.text for event in told if isinstance(event, Notice)]
    assert len(notices) == len(freeze)
    assert all("6 weight(s) do not train" in text and "lora_A" in text for text in notices)
    assert trainer.step == 7


@pytest.fixture(scope="module", params=quick_first(["gpt2", "llama"], ["gpt2"]))
def tuned(request, tmp_path_factory):
    """A trainer whose adapters have moved far, with dropout, and the rows it is evaluated on."""
    case = language_model(request.param)
    rows = case.arrays(1)
    recipe = Recipe(steps=5, warmup_steps=0, learning_rate=0.05)
    trainer, _ = trainer_of(
        with_rows(case, rows),
        recipe,
        tmp_path_factory.mktemp("tuned"),
        lora=lora(request.param, dropout=0.1),
    )
    trainer.train()
    return trainer, case, {name: torch.from_numpy(value) for name, value in rows.items()}


def streamed_logits(trainer, tokens):
    """Return the logits that an engine makes of the store's weights, [rows, tokens, vocabulary]."""
    program = compile_source(
        trainer.model, micro_batch=len(tokens), length=LENGTH, precision="fp32", goal="logits"
    )
    engine = TorchEngine(program, EnginePlan())
    engine.begin(Batch([{"input_ids": tokens}], 0, 1, 0, 0))
    for stage in program.stages:
        engine.load(stage.index, trainer.store.stream(stage.weights))
        engine.infer(stage.index)
    (logits,) = engine.results()[0]
    return logits


def logits_of(model, tokens):
    with torch.no_grad():
        return model.eval()(input_ids=tokens).logits


def close(found, expected):
    return float((found - expected).abs().max() / expected.abs().max()) < 1e-5


def test_merged_export_equals_adapters(tuned, tmp_path):
    import transformers

    trainer, case, rows = tuned
    trainer.export(tmp_path / "merged")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokens = rows["input_ids"][:8]
    expected = streamed_logits(trainer, tokens)
    assert close(logits_of(model, tokens), expected)
    assert not close(logits_of(case.plain(0), tokens), expected)  # the adapters do something
    assert {n for n, _ in model.named_parameters()} == {
        n for n, _ in case.plain(0).named_parameters()
    }
    with torch.no_grad():
        loss = float(case.loss(model.eval(), rows)) / int((rows["labels"] != -100).sum())
    assert trainer.evaluate(batches=ROWS // 8)["loss"] == pytest.approx(loss, rel=1e-5)


def test_piecewise_merge_equals_whole_merge(tuned, tmp_path, monkeypatch):
    trainer, _, _ = tuned
    monkeypatch.setattr(
        "penstock.store.huggingface_export._PIECE_ELEMENTS", 1000
    )  # ends within rows
    trainer.export(tmp_path / "merged")
    found = load_file(tmp_path / "merged" / "model.safetensors")
    for name, adapter in trainer.model.adapters.items():
        down, up = (trainer.store.master(n).double() for n in (adapter.down, adapter.up))
        product = (up @ down).T if "c_" in name else up @ down
        expected = trainer.store.master(name).double() + ALPHA / RANK * product
        assert float((found[name] - expected).abs().max() / expected.abs().max()) < 1e-6, name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_exported_adapters_are_readable_by_peft(tuned, dtype, tmp_path):
    trainer, case, rows = tuned
    trainer.export_adapters(tmp_path / "adapters", dtype)
    assert {p.name for p in (tmp_path / "adapters").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    settings = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert settings["peft_type"] == "LORA"
    assert settings["task_type"] == "CAUSAL_LM"
    assert (settings["r"], settings["lora_alpha"], settings["lora_dropout"]) == (RANK, ALPHA, 0.1)
    assert settings["fan_in_fan_out"] is (case.name == "gpt2")
    stored = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    prefix = "base_model.model."
    assert all(name.startswith(prefix) for name in stored)
    values = {name.removeprefix(prefix): value.float() for name, value in stored.items()}
    assert {name.rpartition(".lora_")[0] for name in values} == set(settings["target_modules"])
    model = with_plain_adapters(case.plain(0), values, settings["lora_alpha"] / settings["r"])
    tokens = rows["input_ids"][:8]
    found, expected = logits_of(model, tokens), streamed_logits(trainer, tokens)
    if dtype == "fp32":
        assert close(found, expected)
    else:
        assert all(value.dtype == torch.bfloat16 for value in stored.values())
        assert torch.allclose(found, expected, atol=0.02 * float(expected.abs().max()))


def test_adapter_export_is_refused_if_other_weights_trained(tmp_path):
    trainer, _ = trainer_of(
        language_model("llama"), RECIPE, tmp_path / "a", lora=lora("llama"),
        train=["model.norm.weight"],
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        trainer.export_adapters(tmp_path / "out")
    assert str(caught.value) == (
        "training changed more than the adapters: model.norm.weight; export the whole model, "
        "without --adapters"
    )
    without = language_model("llama").source(0)
    with pytest.raises(ConfigError) as caught:
        export_adapters(trainer.config, trainer.store, without, tmp_path / "out", "fp32")
    assert str(caught.value) == (
        "llama was trained without adapters (lora.rank is null); export the model"
    )


@pytest.mark.long
def test_commands_work_on_a_run_with_adapters(tmp_path, monkeypatch, capsys):
    def penstock(*arguments):
        monkeypatch.setattr(sys, "argv", ["penstock", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        assert not stopped.value.code, captured.err
        return captured.out

    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("water weights stream layer\n" * 400)
    settings = {
        "model": {"preset": "tiny", "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32},
        "lora": {"rank": 2, "targets": ["*.c_attn.weight"]},
        "data": {"input": ["text.txt"], "tokenizer": "bytes", "validation": 0.2},
        "batch": {"size": 4},
        "engine": {"threads": 1},
        "run": {"dir": "run", "steps": 3},
    }
    Path("run.yaml").write_text(yaml.safe_dump(settings))
    penstock("train", "run.yaml", "--quiet")
    assert "loss" in penstock("eval", "run")
    penstock("generate", "run", "--prompt", "water", "--max-new-tokens", "3")
    assert "model.safetensors" in penstock("export", "run", "whole")
    exported = penstock("export", "run", "small", "--adapters")
    assert "adapter_model.safetensors" in exported
    assert exported.endswith(
        "the base of these adapters is preset tiny with the initial weights of run.seed 0, "
        "which no folder holds, so base_model_name_or_path is null: build the model after "
        "torch.manual_seed(0), or export without --adapters\n"
    )
    whole = load_file("whole/model.safetensors")
    small = load_file("small/adapter_model.safetensors")
    settings = json.loads(Path("small/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] is None
    assert not any("lora" in name for name in whole)
    assert len(small) == 4
    both = sum(tensor.numel() for tensor in (*whole.values(), *small.values()))
    assert show_count(both) in penstock("program", "run.yaml")

"""Buffers in a Hugging Face folder, such as the biases of a router's scores.

They are constants of the run: used by every engine, kept when the folder is deleted, and exported.
"""

import shutil
from pathlib import Path

import pytest
import torch
from grids import quick_first
from hf_folders import set_config
from plain_training import Recipe, distance, plain, streamed
from safetensors.torch import load_file, save_file
from tiny_models import VOCABULARY, Case, language_model
from transformers import AutoConfig, AutoModelForCausalLM

from penstock import Trainer
from penstock.compiler import CompileOptions
from penstock.distributed.worker.roles import _require_same_model
from penstock.errors import ClusterError, ConfigError, CorruptionError
from penstock.models import KEPT, ModelSource, OpenedFolder
from penstock.planning import model_sources
from penstock.planning.program_cache.key import Request, program_key
from penstock.store import MAX_SHARD_BYTES
from penstock.telemetry import Notice
from penstock.training.export import export_run
from penstock.training.prune import prune_model
from penstock.training.run_start import keep_files_of_model

SIZES = {
    "vocab_size": VOCABULARY,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "intermediate_size": 48,
}
EXPERTS = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
MODELS = {
    "apertus": SIZES,
    "deepseek_v3": {**SIZES, **EXPERTS, **LATENT},
    "gemma4_text": {
        **SIZES,
        "head_dim": 8,
        "global_head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    },
    "glm4_moe": {**SIZES, **EXPERTS, "head_dim": 8},
    "minimax_m2": {**SIZES, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mimo_v2_flash": {**SIZES, **EXPERTS, "head_dim": 8},
}
BUFFERS = ("act_fn.beta", "layer_scalar", "e_score_correction_bias")
TEXT = "the water turns the wheel, the weights turn the loss, and the stream goes on\n" * 200


def saved(family: str, folder: Path, **changes) -> Path:
    """Save a model whose buffers differ from those of a new one."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**MODELS[family], **changes}), dtype=torch.float32
    )
    changed = [b for name, b in model.named_buffers() if name.endswith(BUFFERS)]
    assert changed
    with torch.no_grad():
        for buffer in changed:
            buffer.add_(0.5 * torch.rand_like(buffer))
    model.save_pretrained(folder)
    return folder


def buffers_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the changed buffers of a folder."""
    return {n: t for n, t in tensors_of(folder).items() if n.endswith(BUFFERS)}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def settings(hf: Path, run: Path, **changes) -> dict:
    run.parent.mkdir(exist_ok=True)
    (run.parent / "text.txt").write_text(TEXT)
    return {
        "model": {"hf": str(hf)},
        "data": {
            "input": [str(run.parent / "text.txt")],
            "tokenizer": "bytes",
            "sequence_length": 16,
        },
        "batch": {"size": 4, "micro": 2},
        "optimizer": {"learning_rate": 1e-3, "schedule": {"name": "constant"}},
        "engine": {"threads": 1},
        "run": {"dir": str(run), "steps": 4},
        "evaluation": {"every": None},
        **changes,
    }


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """Return a folder of a DeepSeek that knows all bytes."""
    return saved("deepseek_v3", tmp_path_factory.mktemp("deepseek") / "hf", vocab_size=257)


@pytest.mark.parametrize("family", quick_first(MODELS, ["apertus", "deepseek_v3", "gemma4_text"]))
def test_model_trains_with_the_buffers_of_its_folder(family, tmp_path):
    folder = saved(family, tmp_path / "hf")
    llama = language_model("llama")
    case = Case(
        family,
        lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        lambda seed: ModelSource.from_hf(folder),
        llama.loss,
        llama.arrays,
    )

    def new_source(seed: int) -> ModelSource:
        """Return the source without the folder's buffers."""
        for name, value in new.items():
            if name.endswith(BUFFERS):
                model.get_buffer(name).copy_(value)
        return ModelSource.from_module(model)

    stored = ModelSource.from_hf(folder).buffers.stored()
    model = case.plain(0)
    new = ModelSource.from_hf_config(folder).buffers.values()
    # In files, some families have other names for their modules than in the model.
    read = [value for name, value in sorted(stored.items()) if name.endswith(BUFFERS)]
    held = [value for _, value in sorted(buffers_of(folder).items())]
    assert len(read) == len(held) > 0
    assert all(torch.equal(one, other) for one, other in zip(read, held, strict=True))
    assert not any(torch.equal(new[n], v) for n, v in stored.items() if n.endswith(BUFFERS))
    recipe = Recipe(steps=3, warmup_steps=1)
    ours = streamed(case, recipe, tmp_path / "run")
    reference = plain(case, recipe)
    assert ours.losses == pytest.approx(reference.losses, rel=2e-6)
    # Some of these gradients are so small that Adam makes much of their rounding.
    assert max(distance(ours.weights[n], w) for n, w in reference.weights.items()) < 1e-4
    others = Case(family, case.build, new_source, llama.loss, llama.arrays)
    wrong = streamed(others, recipe, tmp_path / "wrong")
    assert max(distance(wrong.weights[n], w) for n, w in reference.weights.items()) > 1e-3


KINDS = {
    "memory": {},
    "flash": {"store": {"dram": "16MiB", "flash": {"path": "flash"}}},
    "lora": {"lora": {"rank": 2, "targets": ["*.o_proj.weight"]}},
    "processes": {"cluster": {"start": "local"}, "engines": 2},
}


@pytest.mark.parametrize("kind", quick_first(KINDS, ["memory", "lora"]))
def test_run_does_not_need_the_folder_of_its_buffers(kind, hf, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    needs_base = kind == "lora"  # its checkpoints omit the frozen weights
    own = tmp_path / "own"
    shutil.copytree(hf, own)
    changes = KINDS["lora"] if needs_base else {}
    whole = Trainer(settings(own, tmp_path / "one" / "run", **changes), quiet=True)
    whole.train()
    expected = whole.store.content_hash()
    whole.close()
    config = settings(own, tmp_path / "two" / "run", **KINDS[kind])
    first = Trainer({**config, "run": {**config["run"], "steps": 2}}, quiet=True)
    first.train()
    first.close()
    if not needs_base:
        shutil.rmtree(own)
    second = Trainer(config, quiet=True)
    assert second.resumed_from == 2
    second.train()
    assert second.store.content_hash() == expected
    second.export(tmp_path / "exported")
    second.close()
    found = buffers_of(tmp_path / "exported")
    assert found.keys() == buffers_of(hf).keys()
    assert all(torch.equal(found[name], value) for name, value in buffers_of(hf).items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    state = loaded.state_dict()
    assert all(torch.equal(state[name], value) for name, value in found.items())


def test_engines_in_processes_compute_with_the_buffers_of_the_folder(hf, tmp_path):
    hashes = set()
    for kind in ("memory", "processes"):
        trainer = Trainer(settings(hf, tmp_path / kind / "run", **KINDS[kind]), quiet=True)
        trainer.train()
        hashes.add(trainer.store.content_hash())
        trainer.close()
    assert len(hashes) == 1


def test_packed_folder_has_the_buffers(hf, tmp_path):
    pruned = prune_model(hf, tmp_path / "packed", 0.5, packed=True)
    assert [path.name for path in pruned.files] == ["model.packed.safetensors"]
    packed, held = ModelSource.from_hf(tmp_path / "packed").buffers.stored(), buffers_of(hf)
    assert all(torch.equal(packed[name], value) for name, value in held.items())
    config = settings(
        tmp_path / "packed",
        tmp_path / "two" / "run",
        sparsity={"method": "static", "sparsity": 0.5},
    )
    trainer = Trainer({**config, "run": {**config["run"], "steps": 1}}, quiet=True)
    trainer.train()
    trainer.close()
    export_run(trainer.config, tmp_path / "again", "fp32", MAX_SHARD_BYTES, packed=True)
    again = ModelSource.from_hf(tmp_path / "again").buffers.stored()
    assert all(torch.equal(again[name], value) for name, value in held.items())


def test_program_in_the_cache_is_that_of_the_buffers(hf, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(hf, other)
    tensors = load_file(other / "model.safetensors")
    for name in buffers_of(hf):
        tensors[name] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    trainer = Trainer(settings(hf, tmp_path / "one" / "run"), quiet=True)
    keep_files_of_model(trainer.config, trainer.model)
    trainer.close()
    opened = OpenedFolder.without_weights(tmp_path / "one" / "run" / KEPT, {})
    kept = ModelSource.from_opened_folder(opened)

    def key(source: ModelSource) -> str | None:
        request = Request(source, "train", source.input_specs(1, 8), CompileOptions(), True)
        return program_key(request, source.module)

    ours, theirs = ModelSource.from_hf(hf), ModelSource.from_hf(other)
    assert key(ours) is not None
    assert key(ours) == key(kept)
    assert key(ours) != key(theirs)
    assert ours.fields() == kept.fields() != theirs.fields()
    with pytest.raises(ClusterError, match=r"another model .* than the trainer \(buffers: "):
        _require_same_model({"model": ours.fields()}, theirs)


def test_folder_without_a_buffer_says_so_at_the_start(hf, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(hf, other)
    (name,) = buffers_of(hf)
    tensors = load_file(other / "model.safetensors")
    del tensors[name]
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    events: list = []
    Trainer(settings(other, tmp_path / "run"), quiet=True, on_event=events.append).close()
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert (
        f"{other}: no values of {name}, which the state of DeepseekV3ForCausalLM contains; the "
        "values of a new model are used"
    ) in notices


def test_stored_type_of_another_model_is_refused(hf, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(hf, other)
    (name,) = buffers_of(hf)
    tensors = load_file(other / "model.safetensors")
    tensors[name] = tensors[name].long()
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        ModelSource.from_hf(other).buffers.values()
    assert str(caught.value) == (
        f"{other / 'model.safetensors'}: {name!r} is stored as I64, but is a buffer of float32 in "
        "the model; config.json and weights are of different models"
    )


def damaged(kept: Path) -> None:
    content = bytearray((kept / "buffers.safetensors").read_bytes())
    content[-1] ^= 1
    (kept / "buffers.safetensors").write_bytes(content)


def torn(kept: Path) -> None:
    unsealed(kept)
    (kept / "buffers.safetensors").write_bytes(b"\x08")


def of_another_model(kept: Path) -> None:
    unsealed(kept)
    set_config(kept, n_routed_experts=8)


def unsealed(kept: Path) -> None:
    """Remove the checksums, so that what reads the files itself is tested."""
    (kept / "checksums.json").unlink()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (damaged, r"buffers\.safetensors is corrupt between byte 0 and \d+: checksum"),
        (torn, r"buffers\.safetensors: cannot read it: "),
        (of_another_model, r"buffers\.safetensors: it has a buffer .* torch\.float32 \[4\], the "),
    ],
)
def test_damaged_copy_of_buffers_is_refused(harm, message, hf, tmp_path):
    config = settings(hf, tmp_path / "run")
    trainer = Trainer({**config, "run": {**config["run"], "steps": 1}}, quiet=True)
    trainer.train()
    trainer.close()
    harm(tmp_path / "run" / KEPT)
    with pytest.raises(CorruptionError, match=message):
        model_sources.model_source(trainer.config.model, tmp_path / "run" / KEPT)

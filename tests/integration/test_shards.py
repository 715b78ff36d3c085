"""Whole runs whose store is in shards: the bits of one store, whatever their number."""

from pathlib import Path

import pytest
import torch
from plain_training import Recipe, trainer_of
from safetensors.torch import load_file
from tiny_models import WIDE, language_model
from typer.testing import CliRunner

from penstock import Trainer
from penstock.cli.app import app
from penstock.config import ByteSize, Config
from penstock.errors import BudgetError, ConfigError, CorruptionError
from penstock.store import ShardMap
from penstock.store.flash import FlashReader, OtherStoreError

ROOT = Path(__file__).parents[2]
RECIPE = Recipe(steps=5, warmup_steps=0, learning_rate=1e-2, clip_norm=0.05)


def trained(case, folder, shards, *, on_flash=False, recipe=RECIPE, until=None, **changes):
    """Train, and return losses, norms and hash as a user sees them, and the state by weight."""
    store = {"shards": shards}
    if on_flash:
        store |= {"dram": "24MiB", "flash": {"path": str(folder / "flash")}}
    changes.setdefault("precision", "fp32")
    trainer, events = trainer_of(case, recipe, folder, until, store=store, **changes)
    trainer.train()
    losses = [(event.loss, event.grad_norm) for event in events]
    state = {
        name: (trainer.store.master(name), trainer.store.state(name) if spec.trainable else {})
        for name, spec in trainer.program.weights.items()
    }
    shard_map = ShardMap.of(trainer.program, shards)
    cut = [name for name, pieces in shard_map.pieces.items() if len(pieces) > 1]
    found = trainer.store.content_hash()
    trainer.close()
    return losses, found, state, cut


def assert_same(ours, theirs):
    assert ours[:2] == theirs[:2]
    for name, (master, state) in theirs[2].items():
        assert torch.equal(ours[2][name][0].view(torch.int32), master.view(torch.int32)), name
        assert ours[2][name][1].keys() == state.keys()
        for role, values in state.items():
            assert torch.equal(ours[2][name][1][role], values), (name, role)


OPTIMIZERS = {
    "adamw": {"name": "adamw"},
    "adamw in 8 bits": {"name": "adamw", "moments": "8bit"},
    "lion": {"name": "lion"},
    "sgd": {"name": "sgd", "momentum": 0.9},
}


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [
        ("fp32", "adamw"),
        ("bf16", "adamw in 8 bits"),
        pytest.param("bf16", "lion", marks=pytest.mark.long),
        # Of the stores alone: tests/unit/store/test_sharded.py
        pytest.param("bf16", "adamw", marks=pytest.mark.slow),
        pytest.param("bf16", "sgd", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("speculated")
def test_bits_are_independent_of_the_number_of_shards(tmp_path, precision, optimizer):
    changes = {"precision": precision, "optimizer": OPTIMIZERS[optimizer]}
    one = trained(WIDE, tmp_path / "one", 1, **changes)
    assert len({loss for loss, _ in one[0]}) == RECIPE.steps
    every = [(2, False), (3, False), (1, True), (2, True), (3, True)]
    for shards, on_flash in every if optimizer == "adamw" else [(2, False), (3, True)]:
        run = tmp_path / f"{shards}-{on_flash}"
        other = trained(WIDE, run, shards, on_flash=on_flash, **changes)
        assert_same(other, one)
        assert other[3] == (["second.weight"] if shards > 1 else [])
        if on_flash:
            result = CliRunner().invoke(app, ["inspect", str(run), "--hash"])
            assert result.output == one[1] + "\n"


@pytest.mark.long
def test_shards_with_tied_and_frozen_weights_and_groups(tmp_path):
    """GPT-2 with evaluation, its embedding tied and cut, a weight that is cut frozen, others with
    settings by their names."""
    case = language_model("gpt2", n_embd=128)
    recipe = Recipe(steps=4, warmup_steps=0, freeze=("*.h.0.mlp.c_fc.*",))
    groups = [{"match": ["*.c_attn.weight"], "weight_decay": 0.3, "learning_rate_scale": 0.5}]
    changes = {"recipe": recipe, "precision": "bf16", "optimizer": {"groups": groups}}
    changes["evaluation"] = {"every": 2, "batches": 1}
    one = trained(case, tmp_path / "one", 1, **changes)
    for on_flash in (False, True):
        run = tmp_path / f"three-{on_flash}"
        other = trained(case, run, 3, on_flash=on_flash, **changes)
        assert "transformer.wte.weight" in other[3]
        assert "transformer.h.0.mlp.c_fc.weight" in other[3]
        assert_same(other, one)


@pytest.mark.long
def test_shards_with_adapters(tmp_path):
    case = language_model("gpt2", n_embd=128)
    changes = {
        "recipe": Recipe(steps=4, warmup_steps=0),
        "lora": {"rank": 40, "alpha": 8.0, "targets": ["*.c_attn.weight", "*.c_proj.weight"]},
    }
    one = trained(case, tmp_path / "one", 1, **changes)
    for shards, on_flash in ((2, False), (3, True)):
        other = trained(case, tmp_path / str(shards), shards, on_flash=on_flash, **changes)
        assert_same(other, one)


def test_run_in_memory_resumes_with_another_number_of_shards(tmp_path):
    one = trained(WIDE, tmp_path / "one", 1)
    losses = []
    for shards, until in ((3, 2), (1, 3), (2, None)):
        changes = {"checkpoint": {"every": 1}}  # written beside the steps
        part = trained(WIDE, tmp_path / "run", shards, until=until, **changes)
        losses += part[0]
    assert losses == one[0]
    assert_same((losses, *part[1:]), one)


@pytest.mark.usefixtures("speculated")
def test_a_run_on_flash_keeps_its_number_of_shards(tmp_path):
    one = trained(WIDE, tmp_path / "one", 1)
    first = trained(WIDE, tmp_path / "run", 2, on_flash=True, until=2)
    for shards, held in ((1, "2 shards"), (3, "2 shards")):
        with pytest.raises(OtherStoreError) as refused:
            trained(WIDE, tmp_path / "run", shards, on_flash=True)
        assert str(refused.value) == (
            f"{tmp_path / 'run' / 'flash'} holds a store in {held}, the configuration says "
            f"{shards}; set store.shards to 2, or start another run in another store.flash.path (a "
            "run in memory continues from its checkpoints with any number)"
        )
    rest = trained(WIDE, tmp_path / "run", 2, on_flash=True)
    assert_same((first[0] + rest[0], *rest[1:]), one)


def test_untrained_weights_on_flash_are_reloaded_for_another_number_of_shards(tmp_path):
    store = {"shards": 2, "dram": "24MiB", "flash": {"path": str(tmp_path / "run" / "flash")}}
    trainer, _ = trainer_of(WIDE, RECIPE, tmp_path / "run", store=store)
    trainer.close()
    found = trained(WIDE, tmp_path / "run", 3, on_flash=True)
    assert_same(found, trained(WIDE, tmp_path / "one", 1))
    assert sorted(p.name for p in (tmp_path / "run" / "flash").glob("shard-*")) == [
        "shard-0",
        "shard-1",
        "shard-2",
    ]


@pytest.mark.long
def test_text_and_exports_equal_those_of_one_store(tmp_path):
    """Generation streams by name, for another program; an export reads what is on flash."""
    found = []
    for shards in (1, 3):
        run = tmp_path / str(shards)
        store = {"shards": shards, "dram": "24MiB", "flash": {"path": str(run / "flash")}}
        trainer = Trainer(
            {
                "model": {"preset": "tiny", "n_positions": 64},
                "data": {"input": [str(ROOT / "LICENSE")], "path": str(tmp_path / "data")},
                "batch": {"size": 4, "micro": 2},
                "store": store,
                "run": {"dir": str(run), "steps": 2},
                "engine": {"threads": 1},
            }
        )
        trainer.train()
        text = "".join(trainer.generate("The ", seed=1, max_new_tokens=20))
        (live,) = trainer.export(tmp_path / f"{shards}-live")
        trainer.close()
        result = CliRunner().invoke(app, ["export", str(run), str(tmp_path / f"{shards}-later")])
        assert result.exit_code == 0, result.output
        found.append((text, load_file(live), load_file(tmp_path / f"{shards}-later" / live.name)))
    expected = found[0]
    assert found[1][0] == expected[0]
    for weights in (expected[2], *found[1][1:]):
        assert weights.keys() == expected[1].keys()
        for name, values in expected[1].items():
            assert torch.equal(weights[name].view(torch.int32), values.view(torch.int32)), name


def test_inspect_shows_all_shards_and_repairs_them_together(tmp_path):
    run = tmp_path / "run"
    found = trained(WIDE, run, 2, on_flash=True)
    shown = CliRunner().invoke(app, ["inspect", str(run)])
    assert shown.exit_code == 0
    assert " parameters in 6 weights, in 2 shards" in shown.output
    assert "durable      step 5  all checksums match (newest)" in shown.output
    assert f"weights      {found[1]}" in shown.output
    extents = run / "flash" / "shard-1" / "extents"
    with FlashReader(run / "flash" / "shard-1") as reader:
        unit = reader._layout.units[-1]
        place = unit.stream_offset(reader.version(5)._place[unit.index])
    with extents.open("r+b") as file:
        file.seek(place)
        file.write(b"damaged")
    shown = CliRunner().invoke(app, ["inspect", str(run)])
    assert isinstance(shown.exception, CorruptionError)
    assert str(extents) in str(shown.exception)
    assert "durable      step 4  all checksums match" in shown.output
    assert "durable      step 5  DAMAGED (newest)" in shown.output
    repaired = CliRunner().invoke(app, ["inspect", str(run), "--repair"])
    assert repaired.output == (
        f"{run / 'flash'} is at step 4, all checksums match\ndiscarded: step 5 (damaged)\n"
    )
    again = trained(WIDE, run, 2, on_flash=True)
    assert again[1] == found[1]
    assert len(again[0]) == 1  # the step that was damaged, once more


def test_configured_sizes_are_totals_of_all_shards(tmp_path):
    case = language_model("gpt2", n_embd=128)

    def store(**sizes):
        flash = {"path": str(tmp_path / "run" / "flash"), "size": sizes.pop("size", None)}
        return {"store": {"shards": 3, "flash": flash, **sizes}}

    with pytest.raises(BudgetError, match=r"in 3 shards needs [\d,]+ bytes of memory") as refused:
        trainer_of(case, RECIPE, tmp_path / "run", **store(dram="1MiB"))
    least = int(str(refused.value).split("needs ")[1].split(" ")[0].replace(",", ""))
    pasted = str(refused.value).split("(store.dram=")[1].split(")")[0]
    assert least <= ByteSize.parse(pasted) < least + (1 << 14)
    with pytest.raises(BudgetError, match=r"in 3 shards needs"):
        trainer_of(case, RECIPE, tmp_path / "run", **store(dram=least - 1))
    trainer, _ = trainer_of(case, RECIPE, tmp_path / "run", **store(dram=least + 2))
    used = sum(trainer.store.memory_bytes.values())
    assert used <= least + 2
    size = trainer.store.flash_bytes
    trainer.close()
    with pytest.raises(
        BudgetError, match=r"the 3 shards share store\.dram and store\.flash\.size equally"
    ):
        trainer_of(case, RECIPE, tmp_path / "run", **store(size=size // 2))


def test_shards_need_two_durable_steps():
    flash = {"path": "flash", "keep_steps": 1}
    Config.from_mapping({"model": "gpt2", "store": {"flash": flash}})
    with pytest.raises(ConfigError, match=r"store\.flash\.keep_steps: expected 2 or more with"):
        Config.from_mapping({"model": "gpt2", "store": {"shards": 2, "flash": flash}})
    with pytest.raises(ConfigError, match=r"store\.shards: expected .*64"):
        Config.from_mapping({"model": "gpt2", "store": {"shards": 65}})

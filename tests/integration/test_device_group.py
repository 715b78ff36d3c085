"""Several devices of one host train to the bits of one, and share the way to the store.

On a machine without GPUs the devices are CPUs, over gloo; where there are GPUs they are those, over
NCCL. One device's own run is the reference.
"""

import re
import threading

import pytest
import torch
from plain_training import Recipe, trainer_of
from tiny_models import language_model

from penstock.config import Config
from penstock.engine import Sharing, predict_bytes
from penstock.errors import BudgetError, ConfigError, NonFiniteError
from penstock.trainer import Trainer

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.15}
RECIPE = Recipe(steps=3, warmup_steps=0, size=10, micro=2)  # 5 micro-batches: no power of two
TWO = {"cpu": ["cpu", "cpu"], "cuda": [f"cuda:{number}" for number in range(min(GPUS, 2))]}
THREE = {"cpu": ["cpu"] * 3, "cuda": [f"cuda:{number}" for number in range(min(GPUS, 3))]}
KINDS = ["cpu", *(["cuda"] if GPUS else [])]


@pytest.fixture(params=KINDS)
def kind(request):
    was, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield request.param
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(was)


def run(folder, case, kind, devices=None, recipe=RECIPE, until=None, **changes):
    """Train; return losses, norms and the hash of the weights."""
    engine = {"device": kind, "devices": devices, **changes.pop("engine", {})}
    trainer, events = trainer_of(case, recipe, folder, until, engine=engine, **changes)
    trainer.train()
    found = [(e.loss, e.grad_norm) for e in events], trainer.store.content_hash()
    moved = [(e.streamed_bytes, e.gradient_bytes) for e in events]
    fabric = trainer.fabric.traffic
    trainer.close()
    return found, moved, (fabric.broadcast_bytes, fabric.reduced_bytes)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_any_number_of_devices_has_the_bits_and_the_traffic_of_one(precision, kind, tmp_path):
    """GPT-2, whose embedding and head are one weight, with dropout."""
    case = language_model("gpt2", **DROPOUT)
    alone = run(tmp_path / "1", case, kind, precision=precision)
    for devices in ([TWO[kind][0]], TWO[kind], THREE[kind]):
        folder = tmp_path / f"{len(devices)} together"
        assert run(folder, case, kind, devices, precision=precision) == alone, devices


def test_frozen_weights_shards_and_recomputation(kind, tmp_path):
    case = language_model("llama")
    recipe = Recipe(steps=3, warmup_steps=0, size=12, micro=2, freeze=("model.layers.0.*",))
    changes = {"recipe": recipe, "engine": {"recompute": "always"}, "store": {"shards": 2}}
    alone = run(tmp_path / "1", case, kind, **changes)
    assert run(tmp_path / "3", case, kind, THREE[kind], **changes) == alone


def test_a_run_goes_on_with_other_devices(kind, tmp_path):
    case = language_model("gpt2", **DROPOUT)
    (steps, weights), *_ = run(tmp_path / "whole", case, kind)
    (first, _), *_ = run(tmp_path / "parts", case, kind, until=1)
    (second, _), *_ = run(tmp_path / "parts", case, kind, TWO[kind], until=2)
    (third, last), *_ = run(tmp_path / "parts", case, kind, engines=2)
    assert (first + second + third, last) == (steps, weights)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_on_one_device_ends_the_step_and_nothing_else(where, kind, tmp_path):
    case = language_model("gpt2")
    devices = TWO[kind]
    alone = run(tmp_path / "1", case, kind)
    before = set(threading.enumerate())
    trainer, _ = trainer_of(
        case, RECIPE, tmp_path / "2", engine={"device": kind, "devices": devices}
    )
    trainer.run_step()
    engine = trainer.engines[-1]._member.engine
    whole = getattr(type(engine), where)

    def failing(stage):
        setattr(engine, where, lambda stage: whole(engine, stage))
        raise MemoryError(f"no room for stage {stage}")

    setattr(engine, where, failing)
    with pytest.raises(MemoryError, match="no room for stage") as caught:
        trainer.run_step()
    assert f"({devices[-1]}), one of engine.devices" in caught.value.__notes__[0]
    assert trainer.step == 1
    trainer.train()
    assert trainer.store.content_hash() == alone[0][1]
    trainer.close()
    assert set(threading.enumerate()) <= before


def test_a_loss_that_is_no_number_names_the_stage(kind, tmp_path):
    case, texts = language_model("gpt2"), []
    recipe = Recipe(steps=3, warmup_steps=0, learning_rate=1e25)
    for devices in (None, TWO[kind]):
        engine = {"device": kind, "devices": devices}
        trainer, _ = trainer_of(case, recipe, tmp_path / str(len(texts)), engine=engine)
        with pytest.raises(NonFiniteError, match="is the first stage whose output") as caught:
            trainer.train()
        trainer.close()
        texts.append(str(caught.value).replace(str(tmp_path), ""))
    assert texts[0] == texts[1]


def test_the_account_of_every_device_stays_below_what_was_predicted(kind, tmp_path):
    case = language_model("gpt2")
    engine = {"device": kind, "devices": TWO[kind], "memory": "8MiB"}
    trainer, _ = trainer_of(case, RECIPE, tmp_path, engine=engine)
    trainer.train()
    layout, devices = trainer._layout, len(TWO[kind])
    sharing = Sharing(devices, layout.micro_batches)
    share = -(-layout.micro_batches // devices)
    predicted = predict_bytes(layout.program, share, layout.plan, kind, sharing).peak_bytes
    held = sharing.device_bytes(layout.program, layout.plan.slots)
    for each in trainer.engines:
        assert held < each.memory.peak_bytes <= predicted
    trainer.close()


def test_a_budget_that_the_buffers_of_the_group_do_not_fit_is_refused(tmp_path):
    """What fits one device alone need not fit it in a group; the amount that is named does."""
    case = language_model("gpt2")
    least = r"Raise engine\.memory to at least (?P<least>\S+ [KM]iB)"
    found = {}
    for devices in (None, ["cpu", "cpu"]):
        engine = {"devices": devices, "memory": "40KiB"}
        with pytest.raises(BudgetError) as caught:
            trainer_of(case, RECIPE, tmp_path / "refused", engine=engine)
        found[devices is None] = str(caught.value)
    alone, group = (re.search(least, found[key])["least"] for key in (True, False))
    engine = {"devices": ["cpu", "cpu"], "memory": group.replace(" ", "")}
    trainer, _ = trainer_of(case, RECIPE, tmp_path / "enough", engine=engine)
    trainer.train()
    trainer.close()
    assert alone != group


def test_devices_without_a_micro_batch_are_refused(tmp_path):
    case = language_model("gpt2")
    with pytest.raises(ConfigError) as caught:
        trainer_of(case, RECIPE, tmp_path, engine={"devices": ["cpu"] * 6})
    assert str(caught.value) == (
        "engine.devices: 6 devices cannot share 5 micro-batch(es) of 2; lower batch.micro or "
        "engine.devices, or raise batch.size"
    )


def test_devices_that_are_not_there_are_refused_with_what_is(tmp_path):
    there = ", ".join(f"cuda:{number}" for number in range(GPUS)) or "no GPU"

    def refused(devices):
        config = Config.from_mapping(
            {"engine": {"devices": devices}, "run": {"dir": str(tmp_path)}}
        )
        with pytest.raises(ConfigError) as caught:
            Trainer(config, model=language_model("gpt2").plain(0))
        return str(caught.value)

    missing = f"cuda:{GPUS + 1}"
    assert refused([missing]) == f"engine.devices: this machine has {there}, got {missing}"
    if not GPUS:
        assert refused("all") == (
            "engine.devices: all stands for all GPUs, of which this machine has none; leave it "
            "out to compute on the CPU"
        )

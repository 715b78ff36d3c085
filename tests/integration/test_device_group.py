"""Several devices of one host train to the bits of one, and share the way to the store.

On a machine without GPUs the devices are CPUs, over gloo; where there are GPUs they are those, over
NCCL. One device's own run is the reference.
"""

import functools
import threading

import pytest
import torch
from plain_training import Recipe, trainer_of
from tiny_models import language_model
from waiting import wait_until

from penstock.config import Config
from penstock.engine import Sharing, predict_bytes
from penstock.errors import ConfigError, GroupError, NonFiniteError
from penstock.step.local_engines import DeviceGroup
from penstock.training.trainer import Trainer

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


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return what one device makes of GPT-2 with dropout, by kind and precision; made once."""

    @functools.cache
    def train(kind, precision="fp32"):
        folder = tmp_path_factory.mktemp("alone")
        return run(folder, language_model("gpt2", **DROPOUT), kind, precision=precision)

    return train


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bits_and_traffic_are_independent_of_the_number_of_devices(
    precision, kind, alone, tmp_path
):
    """The embedding of GPT-2 is its head too: one weight in two stages."""
    case = language_model("gpt2", **DROPOUT)
    groups = (TWO[kind], THREE[kind]) if precision == "fp32" else (THREE[kind],)
    for number, devices in enumerate(groups):  # on one GPU both are that one
        folder = tmp_path / f"group {number}"
        found = run(folder, case, kind, devices, precision=precision)
        assert found == alone(kind, precision), devices


@pytest.mark.long
def test_device_group_with_frozen_weights_shards_and_recomputation(kind, tmp_path):
    case = language_model("llama")
    recipe = Recipe(steps=2, warmup_steps=0, size=12, micro=2, freeze=("model.layers.0.*",))
    changes = {"recipe": recipe, "engine": {"recompute": "always"}, "store": {"shards": 2}}
    by_one = run(tmp_path / "1", case, kind, **changes)
    assert run(tmp_path / "3", case, kind, THREE[kind], **changes) == by_one


@pytest.mark.slow
def test_device_group_with_a_flash_store_that_evicts_weights(kind, tmp_path):
    fields = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
    case = language_model("llama", num_hidden_layers=16, **fields)
    found = []
    for number, devices in enumerate((None, THREE[kind])):
        store = {"dram": "2MiB", "flash": {"path": str(tmp_path / f"flash {number}")}}
        engine = {"recompute": "always"}
        found.append(run(tmp_path / str(number), case, kind, devices, engine=engine, store=store))
    assert found[0] == found[1]
    streamed_bytes, _ = found[0][1][-1]
    assert streamed_bytes > 2 * 2**20  # more than is in memory, so that it is read again


def test_run_resumes_with_other_devices(kind, alone, tmp_path):
    case = language_model("gpt2", **DROPOUT)
    (steps, weights), *_ = alone(kind)
    (first, _), *_ = run(tmp_path, case, kind, until=1, engines=2)
    (others, last), *_ = run(tmp_path, case, kind, TWO[kind])
    assert (first + others, last) == (steps, weights)


def test_error_on_one_device_ends_only_the_step(kind, alone, tmp_path):
    devices = TWO[kind]
    trainer, events = trainer_of(
        language_model("gpt2", **DROPOUT),
        RECIPE,
        tmp_path,
        engine={"device": kind, "devices": devices},
    )
    engine = trainer.engines[-1]._member.engine

    def fail_once_in(where):
        whole = getattr(engine, where)

        def failing(stage):
            setattr(engine, where, whole)
            raise MemoryError(f"no room for stage {stage}")

        setattr(engine, where, failing)

    for step, where in enumerate(("forward", "turn", "backward")):
        fail_once_in(where)
        with pytest.raises(MemoryError, match="no room for stage") as caught:
            trainer.run_step()
        assert f"({devices[-1]}), one of engine.devices" in caught.value.__notes__[0]
        assert trainer.step == step
        trainer.run_step()
    (steps, weights), *_ = alone(kind)
    assert [(event.loss, event.grad_norm) for event in events] == steps
    assert trainer.store.content_hash() == weights
    account_is_below_what_was_predicted(trainer, kind, len(devices))
    trainer.close()
    names = [f"penstock-{engine.name}" for engine in trainer.engines]
    wait_until(lambda: not any(thread.name in names for thread in threading.enumerate()))


def account_is_below_what_was_predicted(trainer, kind, devices):
    layout = trainer._layout
    sharing = Sharing(devices, layout.micro_batches)
    share = -(-layout.micro_batches // devices)
    predicted = predict_bytes(layout.program, share, layout.plan, kind, sharing).peak_bytes
    held = sharing.device_bytes(layout.program, layout.plan.slots)
    for engine in trainer.engines:
        assert held < engine.memory.peak_bytes <= predicted


def test_error_of_a_device_that_the_first_waits_for_is_raised(monkeypatch, tmp_path):
    def member(group, rank, name):
        if rank == 1:
            raise MemoryError("no room on the second device")
        assert group._meeting.is_broken.wait(timeout=20), "the first device waited for the second"
        raise GroupError("another device has left the group")

    monkeypatch.setattr(DeviceGroup, "_member", member)
    with pytest.raises(MemoryError, match="no room on the second device"):
        trainer_of(language_model("gpt2"), RECIPE, tmp_path, engine={"devices": ["cpu", "cpu"]})


def test_non_finite_loss_names_the_stage(kind, tmp_path):
    recipe = Recipe(steps=3, warmup_steps=0, learning_rate=1e25)
    engine = {"device": kind, "devices": TWO[kind]}
    trainer, _ = trainer_of(language_model("gpt2"), recipe, tmp_path, engine=engine)
    with pytest.raises(
        NonFiniteError,
        match=r"^step 2: the loss is (nan|inf); \S+ is the first stage whose output is not",
    ):
        trainer.train()
    assert trainer.step == 1
    trainer.close()


def test_devices_without_a_micro_batch_are_refused(tmp_path):
    case = language_model("gpt2")
    with pytest.raises(ConfigError) as caught:
        trainer_of(case, RECIPE, tmp_path, engine={"devices": ["cpu"] * 6})
    assert str(caught.value) == (
        "engine.devices: 6 devices cannot share 5 micro-batches of 2; set batch.micro to 1, "
        "or lower engine.devices"
    )


def test_missing_devices_are_refused_with_the_available_ones(tmp_path):
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
            "engine.devices: all means all GPUs, but this machine has none; remove the key to "
            "compute on the CPU"
        )

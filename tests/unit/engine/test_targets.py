"""The registry of targets: what depends on the kind of device is asked there by name."""

import pytest
import torch
from sweeps import compiled, weights_of
from torch import nn

from penstock.compiler import PRODUCTS
from penstock.engine import (
    TARGETS,
    Batch,
    EnginePlan,
    NullEngine,
    Target,
    TorchEngine,
    accelerators,
    choose_target,
    target_of,
)
from penstock.errors import ConfigError
from penstock.kernels.processor import Processor

AMD, INTEL = Processor("x86_64", "AuthenticAMD"), Processor("x86_64", "GenuineIntel")
WITHOUT_AVX512 = Processor("x86_64", "AuthenticAMD", has_avx512=False, multiplies_bfloat16=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).square().mean()


def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def with_gpus(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_target_is_the_device_name_before_the_colon():
    assert target_of("cpu") is TARGETS["cpu"]
    assert target_of("cuda:3") is target_of("cuda")
    with pytest.raises(
        ConfigError, match=r"expected one of cpu, wafer, cuda, null, described, got 'tpu:0'"
    ):
        target_of("tpu:0")


def test_auto_chooses_a_gpu_if_available(monkeypatch):
    without_gpu(monkeypatch)
    assert choose_target("auto").name == "cpu"
    assert accelerators() == ()
    with pytest.raises(
        ConfigError, match=r"expected cpu, got cuda, which this machine does not have"
    ):
        choose_target("cuda")
    with_gpus(monkeypatch, 2)
    assert choose_target("auto").name == "cuda"
    assert choose_target("cpu").name == "cpu"
    assert accelerators() == ("cuda:0", "cuda:1")


def test_added_target_is_found(monkeypatch):
    class Simulated(type(target_of("null"))):
        name = "simulated"

    made = Simulated()
    monkeypatch.setitem(TARGETS, made.name, made)
    assert target_of("simulated:7") is made
    assert choose_target("simulated") is made


@pytest.mark.parametrize("name", ["cpu", "wafer", "null"])
def test_engine_of_each_target_executes_a_step(name):
    module, rows = Net(), {"x": torch.ones(3, 4)}
    program = compiled(module, rows, device=target_of(name).trace_device)
    plan = EnginePlan()
    engine = target_of(name).make_engine(program, plan, budget_bytes=1 << 20)
    assert isinstance(engine, NullEngine if name == "null" else TorchEngine)
    engine.begin(Batch([rows], 0, 1, 0, 0))
    weights = weights_of(module, program)
    for stage in program.stages:
        engine.load(stage.index, [weights[n] for n in stage.weights])
        engine.infer(stage.index)
    ((loss,),) = engine.results()
    assert loss.numel() == 1
    if name != "null":
        assert float(loss) == pytest.approx(float(module(**rows).detach()), rel=1e-5)
        assert engine.losses() == [float(loss)]
    else:
        assert engine.losses() == [0.0]


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_recorded_products_are_kept_if_available(target: Target, monkeypatch):
    monkeypatch.setattr("penstock.compiler.product_libraries.has_onednn", lambda: True)
    monkeypatch.setattr("penstock.engine.targets.has_onednn", lambda: True)
    for processor in (AMD, INTEL, WITHOUT_AVX512):
        chosen = target.products_as_recorded(None, processor)
        assert chosen == target.choose_products(processor)
        assert chosen in target.products
        for recorded in PRODUCTS:
            kept = recorded if recorded in target.products else chosen
            assert target.products_as_recorded(recorded, processor) == kept
    chooses = {target.choose_products(each) for each in (AMD, INTEL)}
    assert len(chooses) == (
        2 if target.name in ("cpu", "wafer") else 1
    )  # no host decides a null device


def test_missing_product_library_is_refused_with_remedy(monkeypatch):
    monkeypatch.setattr("penstock.engine.targets.has_onednn", lambda: False)
    with pytest.raises(ConfigError, match=r"float32 products by onednn, which this PyTorch was"):
        target_of("cpu").products_as_recorded("onednn", AMD)
    assert target_of("cpu").products_as_recorded("torch", AMD) == "torch"


def test_only_targets_with_own_memory_report_free_memory():
    for name, target in TARGETS.items():
        if not target.has_own_memory:
            assert target.memory_bytes(name) is None

"""What makes a process an engine or a shard, on hosts that are fit for it and that are not."""

from __future__ import annotations

import pytest
import torch
from fake_workers import config

from penstock.compiler import uses_onednn
from penstock.distributed.control_messages import ReplicaSlot
from penstock.distributed.run_spec import RunSpec
from penstock.distributed.worker.roles import build_engine, build_shard
from penstock.errors import UnfitHostError
from penstock.telemetry import process_memory


@pytest.fixture
def told(layout, tmp_path):
    """Return what is told of a run whose processes are on other hosts."""

    def tell(device: str = "cpu", **terms) -> tuple[RunSpec, dict]:
        made = config(tmp_path, start="listen", shards="apart")
        made = made.model_copy(update={"engine": made.engine.model_copy(update={"device": device})})
        plan = RunSpec.of(made, layout)
        return plan, {**plan.terms, "device": device, **terms}

    return tell


@pytest.mark.long
def test_shard_of_gpu_run_needs_no_gpu(told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plan, terms = told("cuda")
    made = build_shard(terms, ReplicaSlot(1, 0), "when asked")
    assert made.digest == plan.shard_digest


def test_host_without_gpu_is_unfit_for_gpu_engine(told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnfitHostError, match=r"on GPUs, and PyTorch finds no GPU on"):
        build_engine(told("cuda")[1])


def test_host_without_memory_is_unfit_for_engine(told, monkeypatch):
    plan, terms = told()
    assert 0 < terms["engine_host"] <= terms["engine_bytes"]
    assert build_engine(terms).digest == plan.engine_digest
    less = terms["engine_host"] - 1
    monkeypatch.setattr(process_memory, "available_bytes", lambda: less)
    with pytest.raises(
        UnfitHostError, match=r"needs [0-9.]+ [KM]iB of memory, .* start it on a la"
    ):
        build_engine(terms)


def test_engine_uses_matrix_library_of_run(told, monkeypatch):
    monkeypatch.setattr("penstock.engine.targets.has_onednn", lambda: True)
    plan, terms = told()
    other = "torch" if uses_onednn(terms["products"]) else "onednn"
    assert build_engine(terms).digest == plan.engine_digest
    assert build_engine({**terms, "products": other}).digest != plan.engine_digest


def test_host_without_matrix_library_is_unfit_for_engine(told, monkeypatch):
    monkeypatch.setattr("penstock.engine.targets.has_onednn", lambda: False)
    plan, terms = told()
    assert build_engine({**terms, "products": "torch"})
    with pytest.raises(UnfitHostError, match=r"multiply float32 matrices by onednn, which PyTorch"):
        build_engine({**terms, "products": "onednn"})
    shard = build_shard({**terms, "products": "onednn"}, ReplicaSlot(1, 0), "when asked")
    assert shard.digest == plan.shard_digest

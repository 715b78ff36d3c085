"""What makes a process an engine or a shard, on hosts that are fit for it and that are not."""

from __future__ import annotations

import json
import re
import shutil
import socket
import time
from types import SimpleNamespace

import pytest
import torch
from fake_workers import config, model_source
from hf_folders import model_of, save, set_config

from penstock.compiler import uses_onednn
from penstock.config import Config
from penstock.distributed.control_messages import ReplicaSlot
from penstock.distributed.protocol import TransferSchedule
from penstock.distributed.run_spec import RunSpec
from penstock.distributed.worker.roles import EngineRole, build_engine, build_shard
from penstock.errors import ClusterError, UnfitHostError
from penstock.models import KEPT, keep_small_files
from penstock.planning import model_sources, plan_execution
from penstock.step_schedule import ByStep
from penstock.telemetry import process_memory


@pytest.fixture
def told(layout, tmp_path):
    """Return what is told of a run whose processes are on other hosts."""

    def tell(device: str = "cpu", **terms) -> tuple[RunSpec, dict]:
        made = config(tmp_path, start="listen", shards="apart")
        made = made.model_copy(update={"engine": made.engine.model_copy(update={"device": device})})
        plan = RunSpec.of(made, layout, model_source())
        return plan, {**plan.terms, "device": device, **terms}

    return tell


@pytest.mark.long
def test_shard_of_gpu_run_needs_no_gpu(told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plan, terms = told("cuda")
    made = build_shard(terms, ReplicaSlot(1, 0), "when asked")
    assert made.digest == plan.shard_digest


@pytest.mark.parametrize("has_folder", [False, True])
def test_host_without_stored_shard_is_unfit_to_replace_it(told, tmp_path, has_folder):
    """Another host may have it; and nothing is written where it is not."""
    _, terms = told()
    flash = tmp_path / "flash"
    terms["config"]["store"]["flash"] = {"path": str(flash)}
    if has_folder:  # as of a disk that is not mounted
        (flash / "shard-1").mkdir(parents=True)
    before = sorted(flash.rglob("*"))
    with pytest.raises(UnfitHostError, match=r"shard-1: .* no durable step .* that shard's flash"):
        build_shard(terms, ReplicaSlot(1, 0), "what was left")
    assert sorted(flash.rglob("*")) == before


def test_engine_that_joins_again_counts_its_computing_time_from_then():
    """The trainer knows it as another node, and would count everything in one step."""
    work = SimpleNamespace(peak_bytes=7, computed=(2.0, 4))
    role = EngineRole(work, ByStep.always(TransferSchedule((), shards=1)))
    context = SimpleNamespace(clock=time.perf_counter)
    role.node(1000, context)
    work.computed = (5.0, 10)
    assert role.metrics() == {"peak_bytes": 7, "computed": [3.0, 6]}
    role.node(1001, context)
    assert role.metrics()["computed"] == [0.0, 0]
    work.computed = (6.0, 12)
    assert role.metrics()["computed"] == [1.0, 2]


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


def test_engine_keeps_pages_beside_what_its_process_has(told, monkeypatch):
    _, terms = told("cpu")
    kept = []
    monkeypatch.setattr("penstock.planning.keep_pages", lambda *given: kept.append(given))
    monkeypatch.setattr(process_memory, "resident_bytes", lambda: 300 << 20)
    build_engine(terms)
    assert kept == [((300 << 20) + terms["engine_most"],)]


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


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save(model_of("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def own_folder(model_folder, tmp_path):
    return shutil.copytree(model_folder, tmp_path / "llama")


def spec_of(folder, run, is_resumed=False) -> RunSpec:
    made = Config.from_mapping(
        {
            "model": {"hf": str(folder)},
            "batch": {"size": 2, "micro": 1},
            "engine": {"device": "cpu", "threads": 1},
            "engines": 1,
            "run": {"dir": str(run)},
            "cluster": {"start": "local"},
        }
    )
    source = model_sources.source_of(made, None, is_resumed, lambda text: None)
    return RunSpec.of(made, plan_execution(made, source, "cpu", 16), source)


def other_rope(folder) -> None:
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    set_config(folder, rope_parameters={**rope, "rope_theta": 123.0})


def test_engine_of_same_folder_has_the_digest_of_the_run(own_folder, tmp_path):
    spec = spec_of(own_folder, tmp_path / "run")
    assert build_engine(json.loads(json.dumps(spec.terms))).digest == spec.engine_digest


def test_engine_that_reads_another_model_is_refused(own_folder, tmp_path):
    spec = spec_of(own_folder, tmp_path / "run")
    other_rope(own_folder)
    assert spec_of(own_folder, tmp_path / "run").engine_digest != spec.engine_digest
    with pytest.raises(ClusterError) as caught:
        build_engine(spec.terms)
    assert str(caught.value) == (
        f"{socket.gethostname()} has read another model from {own_folder} than the trainer "
        '(rope_parameters: expected {"rope_theta": 10000.0, "rope_type": "default"}, found '
        '{"rope_theta": 123.0, "rope_type": "default"}); copy the model\'s files from the '
        "trainer's host and install the same versions of Penstock and transformers; if the files "
        "were changed after the run had started, start the run again"
    )


def test_only_first_three_differing_fields_are_named(own_folder, tmp_path):
    spec = spec_of(own_folder, tmp_path / "run")
    set_config(own_folder, pad_token_id=5, bos_token_id=6, eos_token_id=7, rms_norm_eps=0.5)
    with pytest.raises(ClusterError) as caught:
        build_engine(spec.terms)
    fields = re.search(r"\((.*)\); copy", str(caught.value))[1].split("; ")
    names = [field.split(":")[0] for field in fields]
    assert names == ["bos_token_id", "eos_token_id", "pad_token_id", "1 more"]


def test_workers_get_run_copy_only_if_trainer_has_read_it(own_folder, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    keep_small_files(own_folder, run / KEPT)  # by a start that was killed
    other_rope(own_folder)
    spec = spec_of(own_folder, run)
    assert spec.terms["kept"] is None
    assert build_engine(spec.terms).digest == spec.engine_digest
    resumed = spec_of(own_folder, run, is_resumed=True)
    assert resumed.terms["kept"] == str(run / KEPT)
    assert build_engine(resumed.terms).digest == resumed.engine_digest != spec.engine_digest

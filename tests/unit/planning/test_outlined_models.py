"""Models and outlines of programs from the cache: when they are used, and that plans are equal."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import warm_start

from penstock.compiler.serialization import MalformedError, read_outline, write_outline
from penstock.config import Config
from penstock.engine import EnginePlan, predict_bytes
from penstock.errors import ProgramError
from penstock.models import ModelSource
from penstock.planning import OutlinedModels, RememberedModel, builders
from penstock.planning.program_cache import entries, outlined
from penstock.program import Kind, Program

SMALL = {"preset": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 40}
OPTIONS: dict[str, Any] = {"micro_batch": 2, "length": 8, "precision": "fp32", "products": "torch"}
HEAVY = {
    "accelerate",
    "datasets",
    "huggingface_hub",
    "matplotlib",
    "pandas",
    "pyarrow",
    "scipy.linalg",
    "scipy.optimize",
    "sympy",
    "tokenizers",
    "transformers",
}

compile_source = builders.compile_source  # before the tests of a process share programs


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Return the folder of outlines of a cache that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock" / "outlines"


@pytest.fixture
def fresh(monkeypatch) -> Callable[[], None]:
    """Return what makes this process look as one that has not imported `transformers`."""

    def apply() -> None:
        loaded = {name: module for name, module in sys.modules.items() if name != "transformers"}
        monkeypatch.setattr(outlined, "sys", SimpleNamespace(modules=loaded))

    return apply


class Models:
    """Models of one process; `recorded` and `compiled` count what the cache did not have."""

    def __init__(self, remember: bool = True) -> None:
        self.recorded = self.compiled = 0
        self.outlined = OutlinedModels(self._record, self._compile, remember=remember)

    def _record(self, config: Config) -> ModelSource:
        self.recorded += 1
        return builders.source_of(config, None, False, lambda text: None)

    def _compile(self, source: ModelSource, **options: Any) -> Program:
        self.compiled += 1
        return compile_source(source, **options)


def config_of(**changes: Any) -> Config:
    return Config.from_mapping({"model": {**SMALL, **changes}})


def program_of(models: Models, config: Config, **changes: Any) -> Program:
    model = models.outlined.model(config)
    return models.outlined.program(model, **{**OPTIONS, **changes})


def test_outline_has_all_of_a_program_but_its_graphs():
    program = program_of(Models(), config_of())
    outline = read_outline(write_outline(program))
    for field in fields(Program):
        if field.name not in ("stages", "constants", "prelude"):
            assert getattr(outline, field.name) == getattr(program, field.name), field.name
    assert list(outline.constants) == list(program.constants)
    assert (outline.prelude is None) == (program.prelude is None)
    executables = {"forward", "infer", "backward", "recompute", "turn"}
    for ours, theirs in zip(outline.stages, program.stages, strict=True):
        for name in ("index", "name", "weights", "inputs", "outputs", "first_dropout"):
            assert getattr(ours, name) == getattr(theirs, name)
        for field in fields(Kind):
            if field.name not in executables | {"graphs"}:
                assert getattr(ours.kind, field.name) == getattr(theirs.kind, field.name)
        with pytest.raises(ProgramError, match="outline of a program has no executables"):
            ours.kind.forward()


@pytest.mark.parametrize("micro_batches", [1, 2, 7])
def test_memory_of_an_outline_is_that_of_its_program(micro_batches):
    program = program_of(Models(), config_of())
    outline = read_outline(write_outline(program))
    for plan in (EnginePlan(), EnginePlan(recompute=frozenset({1, 2}))):
        assert predict_bytes(outline, micro_batches, plan, "described") == predict_bytes(
            program, micro_batches, plan, "described"
        )


def test_remembered_model_answers_as_its_source(fresh):
    config = Config.from_mapping(
        {"model": SMALL, "lora": {"rank": 2, "targets": ["*.c_fc.weight"]}}
    )
    source = Models().outlined.model(config)
    fresh()
    model = Models().outlined.model(config)
    assert isinstance(model, RememberedModel)
    assert isinstance(source, ModelSource)
    for name in ("name", "task", "max_sequence_length", "aliases", "adapter_weights", "bfloat16"):
        assert getattr(model, name) == getattr(source, name), name
    assert model.trainable == source.trainable
    assert dict(model.inputs) == dict(source.inputs)
    assert list(model.shapes().items()) == list(source.shapes().items())
    for name in ("parameter_count", "trained_count", "buffer_bytes"):
        assert getattr(model, name)() == getattr(source, name)(), name
    for name in ("hidden_size", "num_attention_heads"):
        assert getattr(model.hf_config, name) == getattr(source.hf_config, name)
    assert model.resident_bytes > 0


def test_second_process_records_and_compiles_nothing(fresh):
    config = config_of()
    expected = program_of(Models(), config)
    fresh()
    models = Models()
    found = program_of(models, config)
    assert (models.recorded, models.compiled) == (0, 0)
    assert found.weights == expected.weights
    other = program_of(models, config, micro_batch=1)  # not outlined yet
    assert (models.recorded, models.compiled) == (1, 1)
    assert other.values["input_ids"].tensor.shape == (1, 8)
    again = Models()
    assert program_of(again, config, micro_batch=1).values == other.values
    assert (again.recorded, again.compiled) == (0, 0)


def test_process_that_imported_transformers_records_the_model():
    program_of(Models(), config_of())
    models = Models()
    program_of(models, config_of())
    assert (models.recorded, models.compiled) == (1, 1)


@pytest.mark.parametrize("changed", ["code", "library", "settings", "damage", "another model"])
def test_what_determines_a_program_is_checked(fresh, folder, monkeypatch, changed):
    program_of(Models(), config_of())
    config = config_of()
    if changed == "code":
        monkeypatch.setattr(outlined, "code_digest", lambda: "another version")
    elif changed == "library":
        monkeypatch.setattr(outlined, "file_digest", lambda path: "edited")
    elif changed == "settings":
        monkeypatch.setattr(outlined, "torch_settings", lambda device: {"changed": True})
    elif changed == "damage":
        for path in folder.iterdir():
            path.write_bytes(path.read_bytes()[:-1])
    else:
        config = config_of(n_layer=1)
    fresh()
    models = Models()
    program_of(models, config)
    assert models.compiled == 1


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON", '{"files": {}, "model": "{}"}'])
def test_entry_of_another_form_is_removed(fresh, folder, text):
    program_of(Models(), config_of())
    key = outlined._model_key(config_of())
    entries.write_entry(key, text.encode(), "outlines")
    fresh()
    models = Models()
    models.outlined.model(config_of())
    assert models.recorded == 1


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"name": 3}'])
def test_bytes_of_no_outline_are_refused(text):
    with pytest.raises(MalformedError):
        read_outline(text.encode())


def test_models_whose_plans_need_more_are_not_remembered(folder):
    sparse = Config.from_mapping(
        {"model": SMALL, "sparsity": {"method": "static", "sparsity": 0.5}}
    )
    assert isinstance(Models().outlined.model(sparse), ModelSource)
    fields = Config.from_mapping(
        {"model": {"hf_config": {"model_type": "gpt2", **{k: SMALL[k] for k in ("n_layer",)}}}}
    )
    assert isinstance(Models().outlined.model(fields), ModelSource)
    assert not folder.exists()


MACHINE = """
name: desk
kind: host
engine: {is_host: true, rates: [{work: product, rates: [1e11]}, {work: pointwise, rates: [1e10]}]}
store: {memory: 24GiB, rates: [{work: update, rates: [1e10]}]}
"""
PLAN = """
import gc, json, sys
from penstock.cli import main
sys.argv[1:] = json.loads(sys.argv[1])
try:
    main()
except SystemExit as end:
    assert not end.code
print(json.dumps(gc.get_stats()[2]["collections"]))
print(json.dumps(sorted(name for name in sys.modules if name.count(".") < 3)))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "tiny", "batch.size=4", "--machine", "desk.yaml", "--json"],
        ["program", "tiny"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command_with_a_cached_model_imports_no_library_that_models_or_traces(
    tmp_path, arguments
):
    (tmp_path / "desk.yaml").write_text(MACHINE)
    command = [sys.executable, "-c", PLAN, json.dumps(arguments)]
    said = []
    for run in (warm_start.run, subprocess.run):  # the first one imports everything anyway
        done = run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        said.append(done.stdout.splitlines())
    first, second = (set(json.loads(lines[-1])) for lines in said)
    assert first >= {"transformers", "penstock.models.source", "penstock.compiler.build"}
    assert second & HEAVY == set()
    traces = {"torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes"}
    assert second & traces == set()
    assert arguments[0] == "plan" or "numba" not in second  # kernels
    ours = {"penstock.models.source", "penstock.compiler.build", "penstock.planning.builders"}
    assert second & ours == set()
    assert json.loads(said[1][-2]) == 0  # full collections, each of which traverses all modules
    # Equal also in the memory of libraries that the second has not imported.
    assert said[0][:-2] == said[1][:-2]


def test_libraries_have_the_memory_of_the_first_model_of_a_process(fresh, monkeypatch):
    resident = [300 << 20]
    monkeypatch.setattr(
        outlined, "process_memory", SimpleNamespace(resident_bytes=lambda: resident[0])
    )
    outlined._resident_at_first.cache_clear()
    try:
        models = Models()
        first = models.outlined.model(config_of())
        resident[0] = 900 << 20  # programs that were compiled since
        second = models.outlined.model(
            Config.from_mapping({"model": {**SMALL, "n_layer": 3}, "batch": {"size": 2}})
        )
        assert models.outlined.resident_bytes(first) == 300 << 20
        assert models.outlined.resident_bytes(second) == 300 << 20
        fresh()
        assert Models().outlined.model(config_of()).resident_bytes == 300 << 20
    finally:
        outlined._resident_at_first.cache_clear()


def test_models_are_kept_only_by_a_process_that_holds_nothing_else(fresh):
    models = Models(remember=False)  # whose resident memory may be that of data
    program = program_of(models, config_of())
    assert models.outlined.resident_bytes(models.outlined.model(config_of())) > 0
    fresh()
    later = Models()
    assert isinstance(later.outlined.model(config_of()), ModelSource)
    assert program_of(later, config_of()).graph_digest == program.graph_digest
    assert (later.recorded, later.compiled) == (1, 1)
    assert isinstance(Models().outlined.model(config_of()), RememberedModel)

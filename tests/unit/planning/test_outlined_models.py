"""Models and outlines of programs from the cache: when they are used, and that plans are equal."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.compiler.serialization import MalformedError, read_outline, write_outline
from penstock.config import Config
from penstock.engine import EnginePlan, predict_bytes
from penstock.errors import ProgramError
from penstock.models import ModelSource
from penstock.planning import OutlinedModels, builders, model_sources
from penstock.planning.program_cache import library_memory, outlined, remembered
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


@pytest.fixture(autouse=True)
def fresh(monkeypatch) -> None:
    """Make this process look as one that has not imported `transformers`."""
    loaded = {name: module for name, module in sys.modules.items() if name != "transformers"}
    monkeypatch.setattr(remembered, "sys", SimpleNamespace(modules=loaded))


class Models:
    """Models of one process; `recorded` and `compiled` count what the cache did not have."""

    def __init__(self) -> None:
        self.compiled = 0
        self.sources: list[ModelSource] = []
        self.outlined = OutlinedModels(self._source_of, self._compile)

    @property
    def recorded(self) -> int:
        return sum(source.structure.is_recorded for source in self.sources)

    def _source_of(self, config: Config) -> ModelSource:
        self.sources.append(model_sources.source_of(config, None, False, lambda text: None))
        return self.sources[-1]

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


def test_second_process_records_and_compiles_nothing():
    config = config_of()
    expected = program_of(Models(), config)
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


def test_outline_of_a_program_that_was_compiled_for_training_needs_no_model():
    source = Models().outlined.model(config_of())
    expected = compile_source(source, **OPTIONS)
    models = Models()
    assert program_of(models, config_of()).weights == expected.weights
    assert (models.recorded, models.compiled) == (0, 1)  # which reads the program
    again = Models()
    program_of(again, config_of())
    assert (again.recorded, again.compiled) == (0, 0)


@pytest.mark.parametrize("changed", ["settings", "damage", "another model"])
def test_what_determines_a_program_is_checked(folder, monkeypatch, changed):
    program_of(Models(), config_of())
    config = config_of()
    if changed == "settings":
        monkeypatch.setattr(outlined, "torch_settings", lambda device: {"changed": True})
    elif changed == "damage":
        for path in folder.iterdir():
            path.write_bytes(path.read_bytes()[:-1])
    else:
        config = config_of(n_layer=1)
    models = Models()
    program_of(models, config)
    assert models.compiled == 1


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"name": 3}'])
def test_bytes_of_no_outline_are_refused(text):
    with pytest.raises(MalformedError):
        read_outline(text.encode())


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
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        said.append(done.stdout.splitlines())
    first, second = (set(json.loads(lines[-1])) for lines in said)
    assert first >= {"transformers", "penstock.models.recording", "penstock.compiler.build"}
    assert second & HEAVY == set()
    traces = {"torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes"}
    assert second & traces == set()
    assert arguments[0] == "plan" or "numba" not in second  # kernels
    ours = {"penstock.models.recording", "penstock.compiler.build", "penstock.planning.builders"}
    assert second & ours == set()
    assert json.loads(said[1][-2]) == 0  # full collections, each of which traverses all modules
    # Equal also in the memory of libraries, which the first has measured.
    assert said[0][:-2] == said[1][:-2]


@pytest.fixture
def resident(monkeypatch) -> Iterator[list[int]]:
    """Give the resident memory of this process, in bytes, to be changed."""
    bytes_now = [300 << 20]
    process_memory = SimpleNamespace(resident_bytes=lambda: bytes_now[0])
    monkeypatch.setattr(library_memory, "process_memory", process_memory)
    library_memory._resident_at_first.cache_clear()
    yield bytes_now
    library_memory._resident_at_first.cache_clear()


def test_libraries_have_the_memory_of_a_process_before_its_first_model(resident):
    assert library_memory.library_bytes(keep=True) == 316 << 20
    resident[0] = 900 << 20  # programs that were compiled since
    assert library_memory.library_bytes(keep=True) == 316 << 20
    library_memory._resident_at_first.cache_clear()  # another process
    assert library_memory.library_bytes(keep=True) == 316 << 20
    assert library_memory.library_bytes(keep=False) == 900 << 20


def test_memory_of_libraries_is_kept_only_by_a_process_that_holds_nothing_else(resident):
    assert library_memory.library_bytes(keep=False) == 300 << 20  # perhaps that of data
    library_memory._resident_at_first.cache_clear()
    resident[0] = 200 << 20
    assert library_memory.library_bytes(keep=True) == 216 << 20

"""Numbers wrong by orders of magnitude: refused with the number, soon, in little memory."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from bounded_memory import bounded_memory

from penstock import Trainer
from penstock.config import ByteSize, Config
from penstock.data import ArraySource
from penstock.errors import BudgetError, CompileError, ConfigError
from penstock.kernels.processor import Processor
from penstock.models import ModelSource
from penstock.planning.machine_limits import Machine
from penstock.planning.plausibility import MOST_TENSORS, refuse_implausible
from penstock.telemetry import process_memory

pytestmark = pytest.mark.timeout(120)  # to hang is to fail; alone a case takes a second

TINY = {"preset": "tiny", "n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 16}
HUGE = (2**62, 2**64 - 1, 10**18)

COUNTS = [
    "batch.size",
    "batch.micro",
    "data.sequence_length",
    "run.steps",
    "optimizer.schedule.warmup_steps",
    "optimizer.schedule.decay_steps",
    "evaluation.batches",
    "engines",
    "store.shards",
    "store.replicas",
    "cluster.spare",
    "cluster.port",
    "lora.rank",
]
RATES = ["optimizer.learning_rate", "optimizer.weight_decay", "optimizer.eps", "optimizer.momentum"]


@pytest.fixture(autouse=True)
def _little_memory():
    with bounded_memory():
        yield


def settings(override=""):
    return Config.from_mapping({"model": TINY}, [override] if override else [])


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("key", COUNTS)
def test_absurd_count_is_refused_by_name(key, value):
    with pytest.raises(ConfigError) as caught:
        settings(f"{key}={value}")
    assert str(caught.value).startswith(f"command line, {key}={value}: expected ")


@pytest.mark.parametrize("value", ["1e308", ".inf", ".nan", "1e40"])
@pytest.mark.parametrize("key", RATES)
def test_absurd_rate_is_refused_by_name(key, value):
    name = "sgd" if key.endswith("momentum") else "adamw"
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping({"model": TINY, "optimizer": {"name": name}}, [f"{key}={value}"])
    assert str(caught.value).startswith(f"command line, {key}={value}: expected ")


def test_message_names_number():
    with pytest.raises(ConfigError) as caught:
        settings("batch.size=4611686018427387904")
    assert str(caught.value) == (
        "command line, batch.size=4611686018427387904: expected a number up to 1e+09, got "
        "4611686018427387904; for example batch.size: 32 (sequences)"
    )


@pytest.mark.parametrize("size", ["9" * 400 + "GiB", "9" * 400 + ".5GiB", "9" * 5000 + "TiB"])
def test_size_of_many_digits_is_refused(size):
    with pytest.raises(ValueError, match="got a number of"):
        ByteSize.parse(size)


@pytest.mark.parametrize("seed", range(20))
def test_largest_divisor_equals_exhaustive_search(seed):
    draw = np.random.default_rng(seed)
    size, micro = int(draw.integers(2, 3000)), int(draw.integers(2, 3000))
    if size % micro == 0:
        return
    largest = max(d for d in range(1, min(size, micro) + 1) if size % d == 0)
    with pytest.raises(ConfigError, match=rf"next lower divisor is {largest}$"):
        Config.from_mapping({"model": TINY, "batch": {"size": size, "micro": micro}})


def test_a_large_prime_batch_is_answered_at_once():
    with pytest.raises(ConfigError, match=r"the next lower divisor is 1$"):
        Config.from_mapping({"model": TINY, "batch": {"size": 999_999_937, "micro": 999_999_936}})


MODELS = {
    "layers": ({**TINY, "n_layer": 100_000}, "gpt2: n_layer is 100,000, at most 4,096 can be "),
    "width": ({**TINY, "n_embd": 10**9}, "transformers cannot build a gpt2 of this configuration"),
    "heads": ({**TINY, "n_embd": 10**18, "n_head": 10**18}, "transformers cannot build a gpt2"),
    "no layers": (
        {"hf_config": {"model_type": "gpt2", "n_layer": 0}},
        "gpt2: expected n_layer of 1 or more, got 0",
    ),
    "no layers under the common name": (
        {"hf_config": {"model_type": "gpt2", "num_hidden_layers": -1}},
        "gpt2: expected num_hidden_layers of 1 or more, got -1",
    ),
    "no vocabulary": (
        {"hf_config": {"model_type": "llama", "vocab_size": 0}},
        "llama: expected vocab_size of 1 or more, got 0",
    ),
    "negative positions": (
        {"hf_config": {"model_type": "gpt2", "n_positions": -1}},
        "gpt2: expected n_positions of 1 or more, got -1",
    ),
    "labels": (
        {"hf_config": {"model_type": "bert", "num_labels": 10**9}},
        "bert: num_labels is 1,000,000,000, at most 1,048,576 can be built",
    ),
    "experts": (
        {"hf_config": {"model_type": "mixtral", "num_local_experts": 10**9}},
        "mixtral: num_local_experts is 1,000,000,000, at most 65,536 can be built",
    ),
}


@pytest.mark.parametrize("what", MODELS)
def test_absurd_model_is_refused_before_it_is_built(what, tmp_path):
    model, said = MODELS[what]
    with pytest.raises(ConfigError) as caught:
        Trainer({"model": model, "run": {"dir": str(tmp_path / "run")}}, source=rows())
    assert said in str(caught.value)
    assert not (tmp_path / "run").exists()


def rows():
    return ArraySource({"input_ids": np.zeros((4, 8), int), "labels": np.zeros((4, 8), int)})


NEEDS = {
    "the store": ({"model": {**TINY, "n_embd": 2**20}}, "store (", "make the model smaller"),
    "the batch": ({"batch": {"size": 10**9}}, "batch (1,000,000,000 sequences", "lower batch.size"),
    "the length": (
        {"model": {**TINY, "n_positions": 10**9}, "data": {"sequence_length": 10**9}},
        "one sequence's hidden states (1,000,000,000 tokens)",
        "lower ",
    ),
}


@pytest.mark.parametrize("what", NEEDS)
def test_model_beyond_any_machine_is_refused_by_arithmetic(what, tmp_path, monkeypatch):
    changes, part, advice = NEEDS[what]
    monkeypatch.setattr(process_memory, "resident_bytes", lambda: 2**29)
    monkeypatch.setattr(process_memory, "available_bytes", lambda: 2**35 - 2**29)
    whole = {"model": TINY, "run": {"dir": str(tmp_path / "run")}, **changes}
    with pytest.raises(BudgetError) as caught:
        Trainer(whole, source=rows())
    text = str(caught.value)
    assert text.startswith("this run needs at least ")
    assert ", this machine has 32.00 GiB (" in text
    assert part in text
    assert f"; {advice}" in text


def test_arithmetic_refuses_nothing_within_budget():
    """Only what is many times too large is refused before the budget, which is exact."""
    config = settings()
    source = ModelSource.from_preset("tiny", {k: v for k, v in TINY.items() if k != "preset"})
    store = source.parameter_count() * 16

    def refuse(free: int) -> None:
        machine = Machine(Processor("x86_64", "GenuineIntel"), 2, 0, free)
        refuse_implausible(config, source, 16, "cpu", machine)

    refuse(store // 8 + 2**12)
    with pytest.raises(BudgetError, match="this run needs at least"):
        refuse(store // 8 - 1)


def test_module_with_too_many_tensors_is_refused(monkeypatch):
    source = ModelSource.from_preset("tiny", {k: v for k, v in TINY.items() if k != "preset"})
    monkeypatch.setattr("penstock.planning.plausibility.MOST_TENSORS", 3)
    with pytest.raises(CompileError, match=r"tiny has 16 parameter tensors, at most 3 can be "):
        refuse_implausible(settings(), source, 16, "cpu", Machine.here())
    assert MOST_TENSORS > 16


def command(*arguments, **variables):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **variables}
    return subprocess.run(
        [sys.executable, "-m", "penstock", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        errors="surrogateescape",
    )


def test_too_long_name_is_refused():
    with pytest.raises(ConfigError) as caught:
        settings("run.dir=" + "r" * 300)
    assert str(caught.value).endswith(
        ": expected a path of names of at most 255 bytes, 4095 in all, got one with a name "
        "of 300, 300 in all; choose a shorter one"
    )


@pytest.mark.parametrize("where", ["argument", "file"])
def test_name_outside_locale_encoding_is_refused(tmp_path, where):
    path = tmp_path / "run.yaml"
    name = "run" if where == "argument" else "données"
    path.write_text(f"model: gpt2\ndata: {{input: [{path}]}}\nrun: {{dir: {name}}}\n")
    found = command(
        *("train", str(path), *(["run.dir=données"] if where == "argument" else [])),
        LC_ALL="C",
        PYTHONUTF8="0",
        PYTHONCOERCECLOCALE="0",
        PYTHONIOENCODING="ascii",
    )
    assert found.returncode == 2
    wanted = {
        "argument": (
            "error: expected arguments in the encoding of this system's locale (ascii), got "
            "'run.dir=donn\\xe9es'; set LC_ALL=C.UTF-8 or PYTHONUTF8=1\n"
        ),
        "file": f"error: {path}:3: run.dir: expected a path that this system's locale can write "
        "(ascii), got 'donn\\xe9es'; set LC_ALL=C.UTF-8 or PYTHONUTF8=1\n",
    }
    assert found.stderr == wanted[where]

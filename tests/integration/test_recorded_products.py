"""Who multiplies is recorded with a run: a resume on another kind of processor keeps its bits."""

import pytest
from plain_training import Recipe, trainer_of
from tiny_models import language_model

from penstock.compiler import has_onednn
from penstock.kernels.processor import Processor
from penstock.training.resume_state import ResumeState

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this PyTorch has no oneDNN")

RECIPE = Recipe(steps=4, warmup_steps=1)
MACHINES = {"onednn": "AuthenticAMD", "torch": "GenuineIntel"}


@pytest.fixture
def on_machine(monkeypatch, tmp_path):
    """Let this machine pass for one whose processor would choose the library that is named."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # the size below is in no key

    def move(products):
        processor = Processor("x86_64", MACHINES[products])
        monkeypatch.setattr(Processor, "here", classmethod(lambda cls: processor))
        # What the tests' models multiply is too small for a library to matter.
        monkeypatch.setattr("penstock.compiler.matmul_backend._LEAST_FLOPS", 0)

    return move


def train(folder, until=None):
    trainer, events = trainer_of(language_model("gpt2"), RECIPE, folder, until)
    try:
        trainer.train()
        return trainer, [event.loss for event in events], trainer.store.content_hash()
    finally:
        trainer.close()


def multiplies_with(trainer):
    called = {
        str(node.target)
        for stage in trainer.program.stages
        for graph in stage.kind.graphs.values()
        for node in graph.nodes
    }
    return "onednn" if any("onednn_linear" in name for name in called) else "torch"


@pytest.mark.long
@pytest.mark.parametrize(("first", "then"), [("onednn", "torch"), ("torch", "onednn")])
def test_resume_uses_the_recorded_matrix_products(first, then, on_machine, tmp_path):
    on_machine(first)
    trainer, losses, weights = train(tmp_path / "whole")
    assert multiplies_with(trainer) == first

    _, begun, _ = train(tmp_path / "moved", until=2)
    on_machine(then)
    resumed, rest, end = train(tmp_path / "moved")
    assert multiplies_with(resumed) == first
    assert resumed.resumed_from == 2
    assert begun + rest == losses
    assert end == weights

    fresh, _, _ = train(tmp_path / "fresh")
    assert multiplies_with(fresh) == then


def test_run_without_record_chooses_products_for_the_machine(on_machine, tmp_path, monkeypatch):
    on_machine("torch")
    whole = ResumeState.to_mapping

    def older(state):
        return {key: value for key, value in whole(state).items() if key != "products"}

    with monkeypatch.context() as patched:
        patched.setattr(ResumeState, "to_mapping", older)
        train(tmp_path, until=2)
    on_machine("onednn")
    resumed, _, _ = train(tmp_path)
    assert resumed.resumed_from == 2
    assert multiplies_with(resumed) == "onednn"

"""Any number of engines, shards and relays, here or apart, either precision and tier: one engine's
bits.

The hash is the one that `penstock inspect RUN --hash` prints.
"""

from __future__ import annotations

import functools
import itertools

import pytest
from grids import thinned
from speculated import MODES
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.store.flash.guesses import ENVIRONMENT_VARIABLE
from penstock.telemetry.events import ClusterEvent, StepDone
from penstock.training.trainer import Trainer

MODEL = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 300, "n_positions": 32}
STEPS = 30
PRECISIONS, TIERS = ("fp32", "bf16"), ("memory", "flash")
CASES = [
    *itertools.product((1, 2, 3, 4, 8), (1, 2, 3), PRECISIONS, TIERS, ("here",)),
    *itertools.product((1, 3), (2, 3), PRECISIONS, TIERS, ("apart",)),
]
MARKS = {
    (2, 2, "fp32", "flash", "here"): pytest.mark.long,
    (3, 2, "bf16", "flash", "here"): pytest.mark.long,
    (1, 3, "bf16", "memory", "apart"): pytest.mark.long,
}
FEW = 8  # steps of those
RELAYS = [(2, 1), (3, 4), (4, 9)]  # with so many engines


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("bits")
    lines = (f"line {i}: {'water ' * (i % 7)}" for i in range(900))
    (place / "text.txt").write_text("\n".join(lines))
    return place


@pytest.fixture(scope="module")
def alone(folder):
    """The losses and the hash of one engine in one process, by precision and steps."""

    @functools.cache
    def run(precision: str, steps: int, clip_norm=1.0) -> tuple[list[float], str]:
        name = f"alone-{precision}-{steps}-{clip_norm}"
        optimizer = {"clip_norm": clip_norm}
        return train(folder, name, steps, precision=precision, optimizer=optimizer)

    return run


def train(
    folder,
    name: str,
    steps: int,
    *,
    shards=1,
    tier="memory",
    precision="fp32",
    store=None,
    each_event=lambda event: None,
    **changes,
):
    run = folder / name
    flash = {"flash": {"path": str(run / "flash")}} if tier == "flash" else {}
    config = {
        "model": {"preset": "gpt2", "overrides": {**MODEL, "resid_pdrop": 0.1}},
        "data": {"input": [str(folder / "text.txt")], "path": str(folder / "data")},
        "precision": precision,
        "batch": {"size": 8, "micro": 1},
        "engine": {"threads": 1, "memory": "256MiB"},
        "store": {"shards": shards, **flash, **(store or {})},
        "run": {"dir": str(run), "steps": steps},
        **changes,
    }
    losses: list[float] = []

    def hear(event) -> None:
        each_event(event)
        if isinstance(event, StepDone):
            losses.append(event.loss)

    trainer = Trainer(config, on_event=hear)
    try:
        trainer.train()
    finally:
        trainer.close()
    said = CliRunner().invoke(app, ["inspect", str(run), "--hash"])
    assert said.exit_code == 0, said.output
    return losses, said.output.strip()


@pytest.mark.parametrize(
    ("engines", "shards", "precision", "tier", "where"),
    [pytest.param(*case, marks=MARKS.get(case, pytest.mark.slow)) for case in CASES],
)
def test_engines_and_shards_change_no_bit(folder, alone, engines, shards, precision, tier, where):
    steps = FEW if (engines, shards, precision, tier, where) in MARKS else STEPS
    made = train(
        folder,
        f"{engines}-{shards}-{precision}-{tier}-{where}",
        steps,
        engines=engines,
        shards=shards,
        precision=precision,
        tier=tier,
        cluster={"start": "local", "spare": 0, "lease": 10.0, "shards": where},
    )
    assert made == alone(precision, steps)
    losses, weights = made
    assert len(losses) == steps
    assert len(weights) == 32


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "placed"),
    thinned(MODES[1:], [(1, "here", 1), (2, "here", 1), (2, "apart", 1), (2, "apart", 2)]),
)
def test_updates_before_the_commit_change_no_bit(folder, alone, placed, mode, monkeypatch):
    """Every process counts what it has updated before the commit, adopted or thrown away.

    A step that is retried, as on a machine that stalls, may throw away what it had updated.
    """
    shards, where, replicas = placed
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, mode)
    events: list = []
    made = train(
        folder,
        f"{mode}-{shards}-{where}-{replicas}",
        FEW,
        engines=2,
        shards=shards,
        precision="bf16",
        tier="flash",
        store={"replicas": replicas, "dram": "64MiB"},
        each_event=events.append,
        cluster={"start": "local", "spare": 0, "lease": 10.0, "shards": where},
        optimizer={"clip_norm": 1e6},
    )
    assert made == alone("bf16", FEW, 1e6)
    steps = [event for event in events if isinstance(event, StepDone)]
    is_retried = any(isinstance(e, ClusterEvent) and e.kind == "retry" for e in events)
    assert (sum(step.flash_speculated_bytes for step in steps) > 0) == (mode != "wrong")
    if mode != "on" or not is_retried:
        assert (sum(step.flash_discarded_bytes for step in steps) > 0) == (mode != "on")


@pytest.mark.parametrize(
    ("engines", "relays"),
    [
        pytest.param(*case, marks=pytest.mark.long if case == (3, 4) else pytest.mark.slow)
        for case in RELAYS
    ],
)
def test_relays_change_no_bit(folder, alone, engines, relays):
    made = train(
        folder,
        f"{engines}-relays-{relays}",
        FEW,
        engines=engines,
        shards=2,
        cluster={"start": "local", "spare": 0, "lease": 10.0},
        fabric={"relays": relays},
    )
    assert made == alone("fp32", FEW)

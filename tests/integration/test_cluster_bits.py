"""Any number of engines and shards, either precision, either tier: the bits of one engine.

The hash is the one that `penstock inspect RUN --hash` prints.
"""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys

import pytest

from penstock.events import StepDone
from penstock.trainer import Trainer

MODEL = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 300, "n_positions": 32}
STEPS = 30
CASES = list(itertools.product((1, 2, 3, 4, 8), (1, 2, 3), ("fp32", "bf16"), ("memory", "flash")))
IN_EVERY_TEST = (3, 2, "bf16", "flash")
FEW = 8  # steps of that one


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
    def run(precision: str, steps: int) -> tuple[list[float], str]:
        return train(folder, f"alone-{precision}-{steps}", steps, precision=precision)

    return run


def train(folder, name: str, steps: int, *, shards=1, tier="memory", precision="fp32", **changes):
    run = folder / name
    flash = {"flash": {"path": str(run / "flash")}} if tier == "flash" else {}
    config = {
        "model": {"preset": "gpt2", "overrides": {**MODEL, "resid_pdrop": 0.1}},
        "data": {"input": [str(folder / "text.txt")], "path": str(folder / "data")},
        "precision": precision,
        "batch": {"size": 8, "micro": 1},
        "engine": {"threads": 1, "memory": "256MiB"},
        "store": {"shards": shards, **flash},
        "run": {"dir": str(run), "steps": steps},
        **changes,
    }
    losses: list[float] = []

    def hear(event) -> None:
        if isinstance(event, StepDone):
            losses.append(event.loss)

    trainer = Trainer(config, on_event=hear)
    try:
        trainer.train()
    finally:
        trainer.close()
    command = [sys.executable, "-m", "penstock", "inspect", str(run), "--hash"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    return losses, said.stdout.strip()


@pytest.mark.parametrize(
    ("engines", "shards", "precision", "tier"),
    [
        pytest.param(*case, marks=() if case == IN_EVERY_TEST else pytest.mark.slow)
        for case in CASES
    ],
)
def test_engines_and_shards_change_no_bit(folder, alone, engines, shards, precision, tier):
    steps = FEW if (engines, shards, precision, tier) == IN_EVERY_TEST else STEPS
    made = train(
        folder,
        f"{engines}-{shards}-{precision}-{tier}",
        steps,
        engines=engines,
        shards=shards,
        precision=precision,
        tier=tier,
        cluster={"start": "local", "spare": 0, "lease": 10.0},
    )
    assert made == alone(precision, steps)
    losses, weights = made
    assert len(losses) == steps
    assert len(weights) == 32

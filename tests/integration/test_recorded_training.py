"""Whole runs whose engine records a step and repeats it, on a simulated device.

With a GPU and CUDA graphs: `test_devices.py` and `test_sparse_devices.py`.
"""

from __future__ import annotations

import pytest
from plain_training import Recipe, trainer_of
from simulated_device import SimulatedDevice, simulate
from tape_recorder import TapeRecorder
from tiny_models import language_model

from penstock.engine.recorded_steps import RecordingEngine
from penstock.engine.sharing import largest_slot
from penstock.engine.slots import DeviceSlots

RECIPE = Recipe(steps=13, warmup_steps=1)
CALLS = 2 * 4 - 1  # of a step: the embedding, two blocks and the head


@pytest.fixture
def recorders(monkeypatch):
    """Let the simulated device record; return the recorders of its engines, as they are made."""
    made = []

    def make_engine(self, program, plan, *, budget_bytes=None, **_):
        lanes = self.make_lanes(self.name)
        slots = DeviceSlots(largest_slot(program), plan.slots, lanes, self.make_masks(lanes))
        made.append(TapeRecorder())
        return RecordingEngine(
            program,
            plan,
            device="cpu",
            budget_bytes=budget_bytes,
            slots=slots,
            recorder=made[-1],
        )

    simulate(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedDevice, "make_engine", make_engine)
        yield made, patch


def trained(folder, **changes):
    engine = {"device": "auto", **changes.pop("engine", {})}
    trainer, events = trainer_of(language_model("llama"), RECIPE, folder, engine=engine, **changes)
    trainer.train()
    return [event.loss for event in events], trainer.store.content_hash()


@pytest.mark.parametrize(
    ("changes", "records"),
    [
        ({}, 1),
        ({"precision": "bf16", "evaluation": {"every": 5, "batches": 1}}, 3),
        ({"sparsity": {"method": "static", "sparsity": 0.5}}, 1),
        # Every fourth step computes dense gradients and changes the masks.
        ({"sparsity": {"method": "rigl", "sparsity": 0.5, "update_every": 4}}, 3),
        # The masks change too often for that: the second recording is of no use, and the last one.
        ({"sparsity": {"method": "gmp", "sparsity": 0.5, "update_every": 2}}, 3),
        ({"freeze": ["model.layers.0.*"], "engine": {"recompute": "always"}}, 1),
    ],
)
def test_runs_with_recorded_steps_have_the_bits_of_runs_without(
    changes, records, recorders, tmp_path
):
    made, patch = recorders
    ours = trained(tmp_path / "recorded", **changes)
    assert made[0].recorded == records * CALLS
    patch.undo()
    assert trained(tmp_path / "computed", **changes) == ours

"""What a journal or a checkpoint kept for the trainer is used only if it is what it should be."""

import json
from pathlib import Path

import pytest

from penstock.errors import CorruptionError
from penstock.training.resume_state import ResumeState

ARCHITECTURE = {"class_name": "Net", "graph": "g", "captured_with": "torch 2"}
KEPT = ResumeState(
    {"batch.size": 4}, 2, None, "d", None, 3.25, 1, "v", ARCHITECTURE, "onednn",
    sparse_entries={"w": 10}, sparse_products=[{"tokens": 1}], best_step=400, best_batches=8,
    evaluated_step=410, tokenizer="t", buffer_seed=7, run_dir="/runs/x",
    flash_dir="/flash", numerics={"torch": "2"},
)  # fmt: skip


def test_resume_state_round_trips():
    assert ResumeState.read(json.loads(json.dumps(KEPT.to_mapping())), Path("run")) == KEPT


def test_keys_missing_in_older_releases_are_optional():
    found = ResumeState.read({"trajectory": {}}, Path("run"))
    assert found == ResumeState({}, None, None, None, None, None, 0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trajectory", None),
        ("trajectory", [1]),
        ("micro_batch", "4"),
        ("micro_batch", 0),
        ("micro_batch", True),
        ("slot_bytes", 2.5),
        ("slot_bytes", 2**70),
        ("data", 7),
        ("weights", {}),
        ("values", 7),
        ("architecture", "Net"),
        ("architecture", {**ARCHITECTURE, "graph": None}),
        ("architecture", {"class_name": "Net"}),
        ("products", "mkl"),
        ("products", True),
        ("best_loss", "low"),
        ("best_step", "400"),
        ("best_step", 4.0),
        ("best_step", 0),
        ("best_step", True),
        ("best_batches", "8"),
        ("best_batches", 0),
        ("evaluated_step", "410"),
        ("evaluated_step", -1),
        ("evaluated_step", False),
        ("evaluations_since_best", None),
        ("evaluations_since_best", -1),
        ("numerics", "torch 2"),
        ("numerics", {"torch": 2}),
        ("sparse_entries", [10]),
        ("sparse_entries", {"w": 0}),
        ("sparse_entries", {"w": None}),
        ("sparse_entries", {"w": True}),
        ("sparse_products", {"tokens": 1}),
        ("tokenizer", 7),
        ("buffer_seed", None),
        ("buffer_seed", "7"),
        ("buffer_seed", True),
        ("run_dir", 7),
        ("flash_dir", 7),
    ],
)
def test_value_of_another_type_is_refused_by_its_key(key, value):
    with pytest.raises(
        CorruptionError, match=r"^runs/x/flash: expected the resume state of a step, got "
    ):
        ResumeState.read({**KEPT.to_mapping(), key: value}, Path("runs/x/flash"))

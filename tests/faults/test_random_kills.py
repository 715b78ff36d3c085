"""`kill -9` at random moments: what is found is the last durable step, to the bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from store_programs import random_weights, train, training_store
from test_flash_crashes import PROGRAM, SEED

KILLER = Path(__file__).with_name("random_killer.py")
STEPS = 40


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The hash of the weights after every step of a run in memory that was never interrupted."""
    store = training_store(PROGRAM, "bf16")
    store.load(random_weights(PROGRAM, SEED).items())
    hashes = [store.content_hash()]
    for _ in range(STEPS):
        train(store, 1, SEED)
        hashes.append(store.content_hash())
    assert len(set(hashes)) == STEPS + 1
    path = tmp_path_factory.mktemp("reference") / "hashes.json"
    path.write_text(json.dumps(hashes))
    return path


def kill(kind, folder, reference, count, seed):
    """Return what the killer saw; it stops at the first life that finds other than it should."""
    result = subprocess.run(
        [sys.executable, str(KILLER), kind, str(folder), str(reference), str(count), str(seed)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"seed {seed}: {result.stderr[-4000:]}"
    seen = json.loads(result.stdout)
    assert seen["kills"] == count
    assert sum(seen["stages"].values()) == count
    assert seen["steps"] > 0
    return seen


@pytest.mark.parametrize(("kind", "count"), [("flash", 14), ("checkpoints", 8)])
def test_kills_at_random_moments_cost_no_bit(kind, count, reference, tmp_path):
    kill(kind, tmp_path / "run", reference, count, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("flash", 700), ("checkpoints", 300)])
def test_a_thousand_kills_at_random_moments_cost_no_bit(kind, count, reference, tmp_path):
    seen = kill(kind, tmp_path / "run", reference, count, seed=2)
    # Some die before they have opened what is there, some while the first weights go in.
    assert set(seen["stages"]) == {"opening", "loading", "training"}
    assert seen["runs"] > 5

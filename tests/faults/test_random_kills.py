"""`kill -9` at random moments: what is found is the last durable step, to the bit."""

import json
import sys
from pathlib import Path

import pytest
import warm_start
from store_programs import random_weights, train
from test_flash_crashes import DENSE, PROGRAM, SEED, in_memory

KILLER = Path(__file__).with_name("random_killer.py")
STEPS = 40


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """By moments, the hashes of the weights after every step of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("reference")
    for moments in DENSE:
        store = in_memory(moments)
        store.load(random_weights(PROGRAM, SEED).items())
        hashes = [store.content_hash()]
        for _ in range(STEPS):
            train(store, 1, SEED)
            hashes.append(store.content_hash())
        assert len(set(hashes)) == STEPS + 1
        (folder / moments).write_text(json.dumps(hashes))
    return folder


def kill(kind, moments, folder, references, count, seed):
    """Return what the killer saw; it stops at the first life that finds other than it should."""
    arguments = (kind, moments, folder, references / moments, count, seed)
    result = warm_start.run(
        [sys.executable, str(KILLER), *map(str, arguments)],
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "moments", "count"),
    [
        pytest.param("flash", "fp32", 6, marks=pytest.mark.long),
        pytest.param("flash", "8bit", 4, marks=pytest.mark.long),
        ("checkpoints", "8bit", 4),
    ],
)
def test_random_kills_do_not_change_bits(kind, moments, count, references, tmp_path):
    kill(kind, moments, tmp_path / "run", references, count, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "moments", "count"),
    [
        ("flash", "fp32", 400),
        ("flash", "8bit", 300),
        ("checkpoints", "fp32", 150),
        ("checkpoints", "8bit", 150),
    ],
)
def test_thousand_random_kills_do_not_change_bits(kind, moments, count, references, tmp_path):
    seen = kill(kind, moments, tmp_path / "run", references, count, seed=2)
    # Some die before they have opened what is there. The first weights go in too fast, in memory,
    # for any to be sure to die then.
    stages = {"opening", "loading", "training"}
    chance = {"loading"} if kind == "checkpoints" else set()
    assert stages - chance <= set(seen["stages"]) <= stages
    assert seen["runs"] > 5

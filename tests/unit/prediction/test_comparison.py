"""What of a prediction is compared with the measurements of a run."""

import pytest

from penstock.config import Config
from penstock.machines import MachineDescription
from penstock.prediction import Planner, predicted_step

RATES = [{"work": "product", "rates": [1e11]}, {"work": "pointwise", "rates": [1e10]}]
STORE = {"memory": "24GiB", "rates": [{"work": "update", "rates": [1e10]}]}
DESK = MachineDescription.model_validate(
    {"name": "desk", "kind": "host", "engine": {"is_host": True, "rates": RATES}, "store": STORE}
)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def plan(start):
    """Return the prediction of a tiny run whose engines start as `cluster.start` says."""
    settings = {"model": "tiny", "batch": {"size": 8}, "cluster": {"start": start}}
    return Planner(lambda text: None).plan(Config.from_mapping(settings), DESK)


def test_memory_of_one_process_is_compared():
    found = plan("none")
    assert predicted_step(found).peak_memory_bytes == found.peak_memory_bytes > 0


def test_memory_of_several_processes_is_not_compared_with_that_of_one():
    found = plan("local")
    assert found.peak_memory_bytes > plan("none").peak_memory_bytes
    assert predicted_step(found).peak_memory_bytes == 0
    assert predicted_step(found).seconds == found.step_seconds

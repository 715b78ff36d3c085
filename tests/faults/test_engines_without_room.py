"""Engines that have no room for the share of a lost one: a step waits for its replacement."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from test_cluster_processes import alone, settings, text, watched

__all__ = ["text"]  # a fixture
LOCAL = {"start": "local", "spare": 0}


def config(text: Path, folder: Path, **engine) -> dict:
    more = {"engine": {"threads": 1, "recompute": "never", **engine}, "cluster": LOCAL}
    return settings(text, folder, engines=2, **more)


@pytest.mark.long
def test_step_waits_for_the_replacement_of_an_engine_that_was_killed(text, tmp_path):
    roomy = watched(config(text, tmp_path / "roomy"))
    layout = roomy.trainer._runner.manager._layout
    roomy.trainer.close()
    assert layout.least_engines == 1

    whole = layout.shares.engine_peak  # of an engine that computes the shares of both
    run = watched(config(text, tmp_path / "tight", memory=whole - 1))
    try:
        assert run.trainer._runner.manager._layout.least_engines == 2
        run.train(2)
        os.kill(run.pid_of(1), signal.SIGKILL)
        run.train(2)
        assert run.engines() == 2
        assert any(event.kind == "engine lost" for _, event in run.happened)
        losses = [event.loss for _, event in run.steps]
        weights = run.trainer.store.content_hash()
    finally:
        run.trainer.close()
    assert len(losses) == 4
    assert (losses, weights) == alone(text, tmp_path / "one", len(losses))

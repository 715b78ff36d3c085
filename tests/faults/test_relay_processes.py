"""Relays as real processes: killed, stopped, added and taken away; the bits are those of one
engine."""

from __future__ import annotations

import os
import signal

import pytest
from test_cluster_processes import Watched, alone, penstock, settings, text, watched
from waiting import wait_until

__all__ = ["text"]


def relays_of(run: Watched) -> tuple[int, ...]:
    """The relays of the present view."""
    return run.trainer._runner.manager.coordinator._epochs.view.relays


def pid_of(run: Watched, relay: int) -> int:
    manager = run.trainer._runner.manager
    return manager.launcher.pids[manager.registry.find(relay).worker]


def await_relays(run: Watched, count: int) -> None:
    membership = run.trainer._runner.manager.coordinator.membership
    wait_until(lambda: len(membership.relays) == count, f"{count} relays join")


def test_killed_relay_changes_no_bit(text, tmp_path):
    run = watched(
        settings(
            text,
            tmp_path / "many",
            engines=2,
            cluster={"start": "local", "spare": 0},
            fabric={"relays": 1},
        )
    )
    try:
        run.train(1)
        [relay] = relays_of(run)
        os.kill(pid_of(run, relay), signal.SIGKILL)
        run.train(1)
        kinds = [event.kind for _, event in run.happened]
        assert "relay lost" in kinds
        assert "engine lost" not in kinds
        losses = [event.loss for _, event in run.steps]
        weights = run.trainer.store.content_hash()
    finally:
        run.trainer.close()
    assert (losses, weights) == alone(text, tmp_path / "one", len(losses))


@pytest.mark.long
def test_lost_and_added_relays_do_not_change_bits(text, tmp_path, monkeypatch, capsys):
    config = settings(
        text,
        tmp_path / "many",
        engines=2,
        cluster={"start": "local", "spare": 0, "shared_memory": "off"},
        fabric={"relays": 2},
    )
    run = watched(config)
    try:
        run.train(2)
        first = relays_of(run)
        assert len(first) == 2

        os.kill(pid_of(run, first[0]), signal.SIGKILL)
        run.train(1)
        assert "relay lost" in [event.kind for _, event in run.happened]
        await_relays(run, 2)  # it is replaced, like an engine
        run.train(1)
        assert first[1] in relays_of(run)
        assert first[0] not in relays_of(run)
        assert len(relays_of(run)) == 2

        os.kill(pid_of(run, first[1]), signal.SIGSTOP)
        run.train(1)
        assert first[1] not in relays_of(run)
        await_relays(run, 2)

        capsys.readouterr()
        assert penstock(monkeypatch, "scale", str(tmp_path / "many"), "relays=1") == 0
        assert "2 relays now, 1 from the next step" in capsys.readouterr().out
        run.train(1)
        assert len(relays_of(run)) == 1
        assert penstock(monkeypatch, "scale", str(tmp_path / "many"), "engines=3", "relays=0") == 0
        run.train(1)
        assert relays_of(run) == ()
        assert "engine lost" not in [event.kind for _, event in run.happened]
        losses = [event.loss for _, event in run.steps]
        weights = run.trainer.store.content_hash()
    finally:
        run.trainer.close()
    assert (losses, weights) == alone(text, tmp_path / "one", len(losses))


@pytest.mark.long
@pytest.mark.parametrize("where", ["here", "apart"])
def test_relays_with_shards_and_shared_memory_do_not_change_bits(text, tmp_path, where):
    config = settings(
        text,
        tmp_path / "many",
        engines=3,
        cluster={"start": "local", "spare": 0, "shards": where},
        store={"shards": 2},
        fabric={"relays": 3},
        precision="bf16",
    )
    run = watched(config)
    try:
        run.train(3)
        assert len(relays_of(run)) == 3
        losses = [event.loss for _, event in run.steps]
        weights = run.trainer.store.content_hash()
    finally:
        run.trainer.close()
    one = watched(settings(text, tmp_path / "one", precision="bf16"))
    try:
        one.train(3)
        assert losses == [event.loss for _, event in one.steps]
        assert weights == one.trainer.store.content_hash()
    finally:
        one.trainer.close()

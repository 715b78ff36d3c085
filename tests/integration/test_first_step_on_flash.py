"""A run on flash that ended in its first step may start with another configuration."""

import pytest

from penstock import Trainer
from penstock.cli.train import recorded_extra
from penstock.config import Config, check_run
from penstock.errors import ConfigError


def settings(folder, learning_rate):
    (folder / "text.txt").write_text("water flows over the weir. " * 100)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 257, "n_positions": 16}
    return Config.from_mapping(
        {
            "model": {"preset": "gpt2", **sizes},
            "data": {"input": [str(folder / "text.txt")], "sequence_length": 8},
            "batch": {"size": 2, "micro": 2},
            "optimizer": {"learning_rate": learning_rate},
            "store": {"flash": {"path": str(folder / "flash")}},
            "engine": {"threads": 1, "device": "cpu"},
            "evaluation": {"every": None},
            "run": {"dir": str(folder / "run"), "steps": 2},
        }
    )


def train(config):
    trainer = Trainer(config, quiet=True)
    try:
        return trainer.train()["steps"]
    finally:
        trainer.close()


def test_learning_rate_may_change_after_an_error_in_the_first_step(tmp_path, monkeypatch):
    def fail(trainer):
        raise FloatingPointError("diverged")

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "run_step", fail)
        with pytest.raises(FloatingPointError):
            train(settings(tmp_path, 1.0))
    assert (tmp_path / "run" / "config.yaml").exists()
    slower = settings(tmp_path, 1e-3)
    assert check_run(slower, recorded_extra) is False
    assert train(slower) == 2
    assert check_run(slower, recorded_extra) is True
    with pytest.raises(ConfigError, match=r"learning_rate: 0\.001 in the run, 1\.0 now"):
        check_run(settings(tmp_path, 1.0), recorded_extra)

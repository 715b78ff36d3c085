"""`penstock inspect`: checkpoints are verified, and the hash is that of the store."""

import pytest
from store_programs import LAYERS, flash_store, make_program, random_weights, training_store
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.config import Config, write_record
from penstock.errors import ConfigError, CorruptionError
from penstock.store import save_checkpoint


@pytest.fixture
def run(tmp_path):
    write_record(Config.from_mapping({"model": "gpt2", "run": {"dir": str(tmp_path)}}))
    return tmp_path


def loaded_store(seed):
    program = make_program(LAYERS)
    store = training_store(program)
    store.load(random_weights(program, seed).items())
    return store


def inspect(*arguments):
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


@pytest.mark.parametrize("seed", range(3))
def test_hash_equals_that_of_the_saved_store(run, seed):
    store = loaded_store(seed)
    save_checkpoint(store, run / "checkpoints", {})
    assert inspect(run, "--hash").stdout == store.content_hash() + "\n"


def test_inspect_lists_the_content_of_a_run(run):
    store = loaded_store(1)
    save_checkpoint(loaded_store(0), run / "checkpoints", {}, best=True)
    save_checkpoint(store, run / "checkpoints", {})
    result = inspect(run)
    assert result.exit_code == 0
    assert "model        gpt2\n" in result.stdout
    checkpoints = [line for line in result.stdout.splitlines() if line.startswith("checkpoint")]
    assert [line.split()[1] for line in checkpoints] == ["step-00000000", "step-00000000-1"]
    assert checkpoints[0].endswith("all checksums match (best)")
    assert checkpoints[1].endswith("all checksums match (newest)")
    assert f"weights      {store.content_hash()}" in result.stdout


def test_a_damaged_checkpoint_is_named(run):
    save_checkpoint(loaded_store(0), run / "checkpoints", {})
    file = min((run / "checkpoints").glob("step-*/*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 16
    file.write_bytes(data)
    result = inspect(run)
    assert "checkpoint   step-00000000  DAMAGED" in result.stdout
    assert isinstance(result.exception, CorruptionError)
    assert str(file) in str(result.exception)


def test_run_without_checkpoint_is_listed(run):
    assert "checkpoint   none yet" in inspect(run).stdout
    result = inspect(run, "--hash")
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == f"{run}: no checkpoint yet, so there are no weights to hash"


def test_flash_store_killed_during_first_load_is_listed(tmp_path):
    flash = tmp_path / "flash"
    settings = {"run": {"dir": str(tmp_path)}, "store": {"flash": {"path": str(flash)}}}
    write_record(Config.from_mapping({"model": "gpt2", **settings}))
    flash_store(make_program(LAYERS), flash, dram_bytes=600_000).close()
    assert inspect(tmp_path).exit_code == 0
    for option in ("--hash", "--repair"):
        result = inspect(tmp_path, option)
        assert isinstance(result.exception, ConfigError)
        assert str(result.exception) == f"{flash}: no durable step yet; start the run again"

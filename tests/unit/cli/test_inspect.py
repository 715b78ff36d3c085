"""`penstock inspect`: checkpoints are verified, and the hash is that of the store."""

import shutil

import pytest
from store_programs import LAYERS, flash_store, make_program, random_weights, training_store
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.config import Config, write_record
from penstock.errors import ConfigError, CorruptionError, StorageError
from penstock.store import FolderLock, save_checkpoint


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


def damage(checkpoint):
    """Flip a bit of a checkpoint; return the damaged file."""
    file = min(checkpoint.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 16
    file.write_bytes(data)
    return file


def test_a_damaged_checkpoint_is_named(run):
    save_checkpoint(loaded_store(0), run / "checkpoints", {})
    file = damage(run / "checkpoints" / "step-00000000")
    result = inspect(run)
    assert "checkpoint   step-00000000  DAMAGED" in result.stdout
    assert isinstance(result.exception, CorruptionError)
    assert str(file) in str(result.exception)


@pytest.mark.parametrize("is_best", [False, True])
def test_repair_goes_back_to_the_newest_intact_checkpoint(run, is_best):
    older, checkpoints = loaded_store(0), run / "checkpoints"
    save_checkpoint(older, checkpoints, {}, best=not is_best)
    newest = save_checkpoint(loaded_store(1), checkpoints, {}, best=is_best).folder
    content = damage(newest).read_bytes()
    assert "--repair goes back to the newest intact checkpoint" in inspect(run).stdout
    result = inspect(run, "--repair")
    aside = checkpoints / "damaged-step-00000000-1"
    assert result.stdout.splitlines() == [
        f"{checkpoints / 'step-00000000'} is the newest checkpoint, all checksums match",
        f"damaged, no longer used: {aside}",
    ]
    assert min(aside.glob("*.safetensors")).read_bytes() == content
    assert inspect(run, "--hash").stdout == older.content_hash() + "\n"
    shown = inspect(run)
    assert shown.exit_code == 0
    assert ("(newest)" if is_best else "(newest, best)") in shown.stdout
    assert inspect(run, "--repair").stdout.count("\n") == 1


def test_repair_without_an_intact_checkpoint_changes_nothing(run):
    checkpoints = run / "checkpoints"
    for seed in range(2):
        damage(save_checkpoint(loaded_store(seed), checkpoints, {}).folder)
    before = sorted(checkpoints.rglob("*"))
    result = inspect(run, "--repair")
    assert isinstance(result.exception, CorruptionError)
    assert "no checkpoint is intact; nothing was changed" in str(result.exception)
    assert sorted(checkpoints.rglob("*")) == before


def test_repair_drops_a_checkpoint_whose_folder_is_missing(run):
    older, checkpoints = loaded_store(0), run / "checkpoints"
    save_checkpoint(older, checkpoints, {})
    shutil.rmtree(save_checkpoint(loaded_store(1), checkpoints, {}).folder)
    assert inspect(run, "--repair").exit_code == 0
    assert inspect(run, "--hash").stdout == older.content_hash() + "\n"


def test_repair_is_refused_while_the_run_trains(run):
    save_checkpoint(loaded_store(0), run / "checkpoints", {})
    lock = FolderLock(run, "run.dir", "training.lock")
    result = inspect(run, "--repair")
    lock.release()
    assert isinstance(result.exception, StorageError)
    assert f"{run} is in use by process" in str(result.exception)


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

"""`penstock inspect`: checkpoints are verified, and the hash is that of the store."""

import json
import shutil

import pytest
from store_programs import (
    LAYERS,
    flash_store,
    make_program,
    random_weights,
    train,
    training_store,
)
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.config import Config, write_record
from penstock.data import build_dataset
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
    assert str(result.exception).endswith(
        "use another checkpoint: without a store on flash, "
        f"`penstock inspect {run} --repair` goes back to the newest intact one"
    )


@pytest.mark.parametrize("is_best", [False, True])
def test_repair_goes_back_to_the_newest_intact_checkpoint(run, is_best):
    older, checkpoints = loaded_store(0), run / "checkpoints"
    save_checkpoint(older, checkpoints, {}, best=not is_best)
    newest = save_checkpoint(loaded_store(1), checkpoints, {}, best=is_best).folder
    content = damage(newest).read_bytes()
    repair = f"`penstock inspect {run} --repair` goes back to the newest intact checkpoint"
    assert repair in inspect(run).stdout
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


@pytest.mark.parametrize(("last", "repeated"), [(0, None), (1, "step 1"), (3, "steps 1 to 3")])
def test_steps_after_the_newest_checkpoint_are_said_to_be_repeated(run, last, repeated):
    save_checkpoint(loaded_store(0), run / "checkpoints", {})
    rows = [{"event": "step", "step": step, "loss": 2.0} for step in range(last + 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = [line for line in inspect(run).stdout.splitlines() if line.startswith("saved ")]
    told = f"saved        step 0, the newest saved one: a start from it repeats {repeated}"
    assert said == ([told] if repeated else [])


def test_repair_reports_data_that_is_still_damaged(run):
    checkpoints, text = run / "checkpoints", run / "text.txt"
    text.write_text("water streams\n" * 200)
    build_dataset([text], "bytes", run / "data")
    shard = run / "data" / "train-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    save_checkpoint(loaded_store(0), checkpoints, {})
    damage(save_checkpoint(loaded_store(1), checkpoints, {}).folder)
    result = inspect(run, "--repair")
    assert f"data         {run / 'data'}  DAMAGED" in result.stdout
    assert isinstance(result.exception, CorruptionError)
    assert str(result.exception).startswith(f"{shard} is cut short")
    assert not (checkpoints / "step-00000000-1").exists()


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


@pytest.fixture
def flash_run(tmp_path):
    """A run with two durable steps on flash, both damaged; return its folder and the store."""
    flash = tmp_path / "flash"
    settings = {"run": {"dir": str(tmp_path)}, "store": {"flash": {"path": str(flash)}}}
    write_record(Config.from_mapping({"model": "gpt2", **settings}))
    store = flash_store(make_program(LAYERS), flash, keep_steps=2)
    store.load(random_weights(store.program, 0).items())
    for _ in range(2):
        train(store, 1, seed=store.step)
        store.make_durable()
    yield tmp_path, store
    store.close()


def damage_flash(run, store):
    store.close()
    extents = run / "flash" / "extents"
    extents.write_bytes(bytes(byte ^ 1 for byte in extents.read_bytes()))


def test_damaged_step_on_flash_names_the_run_in_the_command(flash_run):
    run, store = flash_run
    unit = store._layout.units[1]
    place = unit.stream_offset(store._version._place[1])
    store.close()
    with (run / "flash" / "extents").open("r+b") as file:
        file.seek(place)
        file.write(b"another")
    result = inspect(run)
    assert "durable      step 1  all checksums match" in result.stdout
    assert str(result.exception).endswith(
        f"; `penstock inspect {run} --repair` rolls back to the newest intact durable step"
    )


def test_without_an_intact_step_on_flash_the_best_checkpoint_is_named(flash_run):
    run, store = flash_run
    best = save_checkpoint(store, run / "checkpoints", {}, best=True).folder
    damage_flash(run, store)
    told = (
        f"{run / 'flash'}: no durable step is intact; {best}, the best checkpoint, of step 2, is "
        f"intact: `penstock export {run} OUT --best` writes its weights to OUT; a new run with "
        "model.hf=OUT starts from them"
    )
    shown = inspect(run)
    assert shown.stdout.count("DAMAGED") == 2
    assert str(shown.exception).endswith(f"\n{told}")
    assert "--repair" not in str(shown.exception)
    repaired = inspect(run, "--repair")
    assert isinstance(repaired.exception, CorruptionError)
    assert str(repaired.exception) == told.replace("intact; ", "intact; nothing was changed; ", 1)


@pytest.mark.parametrize("has_best", [False, True])
def test_run_on_flash_without_any_intact_state_says_so(flash_run, has_best):
    run, store = flash_run
    if has_best:
        damage(save_checkpoint(store, run / "checkpoints", {}, best=True).folder)
    damage_flash(run, store)
    told = f"; {run} has no intact checkpoint either: restore the store from a copy"
    assert told in str(inspect(run).exception)
    assert str(inspect(run, "--repair").exception).endswith(told)


def test_damaged_journal_leaves_the_checkpoints_listed(flash_run):
    run, store = flash_run
    save_checkpoint(store, run / "checkpoints", {}, best=True)
    store.close()
    journal = run / "flash" / "journal"
    content = bytearray(journal.read_bytes())
    content[700] ^= 1
    journal.write_bytes(content)
    result = inspect(run)
    assert f"flash        {run / 'flash'}  DAMAGED" in result.stdout
    assert "checkpoint   step-00000002  step 2" in result.stdout
    assert isinstance(result.exception, CorruptionError)

"""What a run may change when it resumes, and what it may not."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.config import (
    Config,
    check_resumable,
    check_run,
    digest,
    load_run,
    trajectory,
    write_record,
)
from penstock.errors import ConfigError


def made(**sections):
    return Config.from_mapping({"model": "gpt2", **sections})


def no_store(folder):
    raise AssertionError(f"{folder} was opened")


def with_checkpoint(config):
    """Leave what a run with a finished checkpoint leaves, as far as the configuration sees it."""
    write_record(config)
    folder = config.run.dir / "checkpoints" / "step-00000010"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")


@pytest.mark.parametrize(
    "change",
    [
        {"engines": 4},
        {"engine": {"memory": "1GiB", "recompute": "always", "threads": 1}},
        {"logging": {"every": 1, "tensorboard": True}},
        {"evaluation": {"every": None}},
        {"checkpoint": {"every": 3, "keep_last": 9}},
        {"data": {"path": "elsewhere"}},
        {"store": {"gradients": "fp32"}},
    ],
)
def test_keys_that_do_not_decide_the_result_keep_the_digest(change):
    assert digest(made(**change)) == digest(made())


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"preset": "gpt2", "n_layer": 3}},
        {"batch": {"size": 64}},
        {"batch": {"micro": 2}},
        {"precision": "bf16"},
        {"optimizer": {"learning_rate": 1e-3}},
        {"optimizer": {"schedule": {"name": "constant", "final_ratio": 0.1}}},
        {"freeze": ["*.wte.*"]},
        {"train": ["*.wte.*"]},
        {"lora": {"rank": 8, "targets": ["*.c_attn.weight"]}},
        {"store": {"gradients": "bf16"}},
        {"data": {"seed": 1}},
        {"data": {"sequence_length": 8}},
        {"run": {"seed": 1}},
        {"run": {"steps": 2000}},
    ],
)
def test_keys_that_decide_the_result_change_the_digest(change):
    assert digest(made(**change)) != digest(made())


def test_every_adapter_setting_decides_the_result():
    plain = {"rank": 8, "targets": ["*.c_attn.weight"]}
    changes = ({}, {"rank": 4}, {"alpha": 8}, {"targets": ["*.c_proj.weight"]}, {"dropout": 0.1})
    assert len({digest(made(lora={**plain, **change})) for change in changes}) == len(changes)


def test_more_steps_are_the_same_run_without_decay_to_the_end():
    for optimizer in (
        {"schedule": {"name": "constant"}},
        {"schedule": {"name": "inverse_square_root", "warmup_steps": 10}},
        {"schedule": {"name": "cosine", "decay_steps": 100}},
    ):
        short = made(optimizer=optimizer, run={"steps": 100})
        assert digest(short) == digest(made(optimizer=optimizer, run={"steps": 200}))


def test_the_trajectory_is_json():
    values = trajectory(made())
    assert json.loads(json.dumps(values)) == values
    check_resumable(made(), json.loads(json.dumps(values)))


def test_run_without_a_newer_key_resumes():
    plain, other = made(), made(optimizer={"moments": "8bit"})
    before = {key: value for key, value in trajectory(plain).items() if "moments" not in key}
    assert trajectory(plain) == before
    for recorded in (before, {**before, "optimizer.moments": "fp32"}):
        check_resumable(plain, recorded)
        with pytest.raises(ConfigError, match='moments: "fp32" in the run, "8bit" now'):
            check_resumable(other, recorded)


def test_a_refusal_to_resume_names_the_keys_and_both_values(tmp_path):
    run = {"dir": str(tmp_path), "steps": 100}
    with_checkpoint(made(run=run))
    changed = made(run={**run, "steps": 200}, batch={"size": 16}, engines=2)
    with pytest.raises(ConfigError) as raised:
        check_run(changed, no_store)
    assert str(raised.value) == (
        f"{tmp_path} holds a run whose configuration differs in keys that decide the result:\n  "
        "batch.size: 32 in the run, 16 now\n  optimizer.schedule.decay_steps: 100 in the run, 200 "
        "now (run.steps if unset; set it to 100 to continue at the final rate)\nset these back to "
        "resume it, or choose another run.dir to start a new run"
    )


def test_a_run_resumes_where_the_result_stays_the_same(tmp_path):
    config = made(run={"dir": str(tmp_path)})
    assert check_run(config, no_store) is False
    with_checkpoint(config)
    assert check_run(made(run={"dir": str(tmp_path)}, engines=2), no_store) is True


def test_folder_without_checkpoint_accepts_any_configuration(tmp_path):
    write_record(made(run={"dir": str(tmp_path)}))
    assert check_run(made(run={"dir": str(tmp_path)}, precision="bf16"), no_store) is False


def test_fresh_accepts_a_new_or_empty_folder_and_deletes_nothing(tmp_path):
    config = made(run={"dir": str(tmp_path / "run")})
    assert check_run(config, no_store, fresh=True) is False
    (tmp_path / "run").mkdir()
    assert check_run(config, no_store, fresh=True) is False
    write_record(config)
    with pytest.raises(ConfigError) as raised:
        check_run(config, no_store, fresh=True)
    assert str(raised.value) == (
        f"run.dir: expected a new or empty folder with --fresh, but {tmp_path}/run holds "
        "config.yaml; move it away, or choose another with run.dir=FOLDER"
    )
    assert (tmp_path / "run" / "config.yaml").exists()


def test_moved_run_is_found_with_its_data(tmp_path):
    old = tmp_path / "old"
    config = made(
        run={"dir": str(old)}, data={"path": str(old / "text")}, optimizer={"learning_rate": 1e-5}
    )
    write_record(config)
    old.rename(tmp_path / "new")
    found = load_run(tmp_path / "new")
    assert found.run.dir == tmp_path / "new"
    assert found.data.path == tmp_path / "new" / "text"
    assert digest(found) == digest(config)


@pytest.mark.parametrize("command", ["eval", "generate", "inspect", "export", "scale"])
@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ("model: gpt2\n", "runs/small"),
        ("run: {steps: 3}\n", "runs/small"),
        ("run: {dir: elsewhere}\n", "elsewhere"),
    ],
)
@pytest.mark.parametrize("is_there", [False, True])
def test_configuration_file_given_as_run_names_its_folder(
    tmp_path, monkeypatch, command, text, folder, is_there
):
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(text)
    if is_there:
        Path(folder).mkdir(parents=True)
    more = {"export": ["out"], "scale": ["engines=2"]}.get(command, [])
    result = CliRunner().invoke(app, [command, "small.yaml", *more])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == (
        "small.yaml: expected the folder of a run, got a configuration file; the folder of its run "
        f"is {folder}" + ("" if is_there else ", which does not exist yet")
    )


def test_other_file_given_as_run_is_refused(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"\xff")
    with pytest.raises(
        ConfigError, match="expected the folder of a run, got a file; give the fold"
    ):
        load_run(tmp_path / "weights.bin")


def test_folder_without_run_is_refused(tmp_path):
    with pytest.raises(ConfigError) as raised:
        load_run(tmp_path / "absent")
    assert str(raised.value) == (
        f"{tmp_path}/absent: no such run; expected the folder that run.dir named"
    )
    (tmp_path / "other.txt").write_text("x")
    with pytest.raises(ConfigError) as raised:
        load_run(tmp_path)
    assert str(raised.value) == (
        f"{tmp_path}: expected a run, which has a config.yaml; it holds other.txt"
    )


@pytest.mark.parametrize(
    ("files", "given", "hint"),
    [
        (
            "model.safetensors",
            ".",
            "model.safetensors; this is a model's folder: name the run that it was exported from, "
            "or load it with transformers",
        ),
        (
            "adapter_config.json",
            ".",
            "adapter_config.json; these are exported adapters: name the run that they were "
            "exported from",
        ),
        (
            "dataset.json",
            ".",
            "dataset.json; this is a data set: name a run that was trained on it",
        ),
        ("journal", ".", "journal; name the run whose store.flash.path this is"),
        (
            "stage-00000.safetensors state.json",
            ".",
            "stage-00000.safetensors, state.json; this is a checkpoint: name the run that wrote it",
        ),
        ("b/RECORD a/config.yaml", ".", "a, b; name one of the runs in it, such as HERE/b"),
        ("a/config.yaml a/metrics.jsonl", ".", "a; name one of the runs in it, such as HERE/a"),
        ("a/config.yaml", ".", "a"),
        ("RECORD", "checkpoints", "nothing; name the run: HERE"),
        ("RECORD", "checkpoints/step-00000001", "nothing; name the run: HERE"),
        (
            "RECORD data/dataset.json",
            "data",
            "dataset.json; name the run: HERE",
        ),
        ("RECORD model/x", "model", "x; name the run: HERE"),
        ("RECORD", "workers", "nothing; name the run: HERE"),
        ("RECORD flash/journal", "flash", "journal; name the run: HERE"),
        ("RECORD", "one/two/three", "nothing"),
        ("config.yaml", "other", "nothing"),
    ],
)
def test_folder_that_is_no_run_is_refused_with_what_to_give(tmp_path, files, given, hint):
    (tmp_path / given).mkdir(parents=True, exist_ok=True)
    for file in files.split():
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        if path.name == "RECORD":
            write_record(Config.from_mapping({"run": {"dir": str(path.parent)}}))
        else:
            path.touch()
    with pytest.raises(ConfigError) as caught:
        load_run(tmp_path / given)
    assert str(caught.value) == (
        f"{tmp_path / given}: expected a run, which has a config.yaml; it holds "
        + hint.replace("HERE", str(tmp_path))
    )


def test_link_to_a_folder_of_a_run_is_refused_with_the_run(tmp_path):
    run = tmp_path / "run"
    write_record(Config.from_mapping({"run": {"dir": str(run)}}))
    (run / "checkpoints").mkdir()
    (tmp_path / "link").symlink_to(run / "checkpoints")
    with pytest.raises(ConfigError, match=f"; name the run: {run}$"):
        load_run(tmp_path / "link")


def test_a_run_of_sgd_keeps_the_weight_decay_that_was_recorded(tmp_path):
    """Runs from before sgd's default became 0 recorded the 0.1 that they trained with."""
    run = {"dir": str(tmp_path)}
    with_checkpoint(made(optimizer={"name": "sgd", "weight_decay": 0.1}, run=run))
    assert load_run(tmp_path).optimizer.weight_decay == 0.1
    assert check_run(load_run(tmp_path), no_store)
    with pytest.raises(ConfigError, match=r"optimizer\.weight_decay: 0\.1 in the run, 0\.0 now"):
        check_run(made(optimizer={"name": "sgd"}, run=run), no_store)


def test_store_on_flash_without_a_trained_step_accepts_any_configuration(tmp_path):
    store = {"flash": {"path": str(tmp_path / "flash")}}
    run = {"dir": str(tmp_path / "run")}
    slower = made(store=store, run=run, optimizer={"learning_rate": 1e-5})
    write_record(made(store=store, run=run))
    assert check_run(slower, no_store) is False
    (tmp_path / "flash").mkdir()
    (tmp_path / "flash" / "journal").touch()
    for untrained in (None, {"weights": None, "start": {}}):
        assert check_run(slower, lambda folder, extra=untrained: extra) is False
    with pytest.raises(ConfigError, match=r"learning_rate: 0\.0003 in the run, 1e-05 now"):
        check_run(slower, lambda folder: {"trajectory": {}})

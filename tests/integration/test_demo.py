"""`make demo` at a scale of seconds: the whole of it, stopped and gone on, and the second time."""

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import torch
import warm_start
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.config import Config
from penstock.demo.command import is_complete, run
from penstock.demo.report import figures, training_seconds
from penstock.demo.text import python_files
from penstock.errors import StorageError

STDLIB = Path(sysconfig.get_paths()["stdlib"])
SMALL = [
    f"data.input=['{STDLIB / 'json'}', '{STDLIB / 'logging'}']",
    "data.tokenizer=train-bpe:512",
    "model.vocab_size=512",
    "model.n_positions=64",
    "model.n_layer=3",
    "model.n_embd=32",
    "model.n_head=2",
    "optimizer.schedule.warmup_steps=2",
    "evaluation.every=4",
    "evaluation.batches=2",
    "checkpoint.every=4",
]
DEMO = [sys.executable, "-m", "penstock.demo"]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "COLUMNS": "120",
    "TERM": "xterm-256color",
    "HF_HUB_OFFLINE": "1",
}


def demo(folder, *arguments, **keywords):
    return subprocess.run(
        [*DEMO, *SMALL, *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
        **keywords,
    )


def steps_recorded(folder):
    lines = (folder / "runs/demo/metrics.jsonl").read_text().splitlines()
    return [row["step"] for row in map(json.loads, lines) if row["event"] == "step"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return folder, demo(folder, "run.steps=8")


@pytest.mark.long
def test_demo_trains_generates_exports_and_reports(finished):
    folder, result = finished
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    out = result.stdout
    assert "given 'class Stack: def', the model writes" in out
    before, after = (
        float(re.search(rf"│ {loss} +│ ([\d.]+) nats per token", out)[1])
        for loss in ("loss, step 1", "held-out loss, step 8")
    )
    assert after < before
    assert steps_recorded(folder) == list(range(1, 9))
    for command in ("generate", "inspect", "train", "program", "init"):
        assert f"penstock {command} " in out.split("next:")[1]


@pytest.mark.long
def test_reported_time_counts_each_part_once(finished):
    """The run says at its end how long it took; the table says the same."""
    _, result = finished
    told = re.search(r"finished: .*time ([^,]+),", result.stdout)[1]
    assert re.search(rf"│ time +│ {told} +│", result.stdout), result.stdout


def test_reported_time_of_a_resumed_run_counts_each_step_once():
    step = [{"event": "step", "step": n, "seconds": 1.0} for n in range(1, 9)]
    evaluation = [{"event": "evaluation", "step": n, "seconds": 10.0} for n in (0, 4, 8)]
    report = {"event": "report", "step": 8, "steps": 4, "seconds": 20.0}
    assert training_seconds([*step, *evaluation, report]) == 4 + 10 + 10 + 20
    first = {"event": "report", "step": 4, "steps": 4, "seconds": 15.0}
    assert training_seconds([*step, *evaluation[1:], first, report]) == 35


STEP = {
    "event": "step",
    "loss": 8.4,
    "seconds": 0.5,
    "tokens": 10,
    "streamed_bytes": 4,
    "gradient_bytes": 4,
    "store_bytes": 4,
    "engine_bytes": 4,
}


@pytest.fixture
def past_run(tmp_path):
    """A run of 8 steps: its configuration, and the folder of its exported model."""
    exported = tmp_path / "exported"
    exported.mkdir()
    save_file({"transformer.wte.weight": torch.zeros(4, 2)}, exported / "model.safetensors")
    rows = [{**STEP, "step": step} for step in range(1, 9)]
    evaluated = {"event": "evaluation", "step": 8, "seconds": 0.1, "loss": None}
    write_metrics(tmp_path, [*rows, evaluated])
    run = {"dir": str(tmp_path), "steps": 8}
    return Config.from_mapping({"model": "tiny", "run": run}), exported


def write_metrics(folder, rows):
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def shown(table):
    return dict(zip(*(column._cells for column in table.columns[:2]), strict=True))


def test_losses_of_the_untrained_and_the_trained_model_are_shown(past_run):
    table = shown(figures(*past_run))
    assert table["loss, step 1"] == "8.400 nats per token"
    assert table["held-out loss, step 8"] == "not finite"
    assert table["speed"] == "20 tokens/s"


@pytest.mark.parametrize(
    "damage",
    [{"event": None}, {"evenu": "step"}, {"step": 2, "event": "step"}, {**STEP, "seconds": 0.0}],
)
def test_damaged_metrics_are_left_out(damage, past_run, tmp_path):
    write_metrics(tmp_path, [{"step": 1, **damage}, {**STEP, "step": 3}])
    table = shown(figures(*past_run))
    assert ("loss, step 1" in table) == (damage.get("loss") is not None)
    write_metrics(tmp_path, [])
    assert figures(*past_run) is None


def test_damaged_export_is_an_error_that_says_how_to_make_it_again(past_run):
    (past_run[1] / "model.safetensors").write_bytes(b"half a model")
    with pytest.raises(
        StorageError, match=r"model\.safetensors is damaged .*; delete .*exported: the next"
    ):
        figures(*past_run)


def test_demo_is_complete_with_all_its_steps_and_an_export(past_run):
    config, exported = past_run
    assert is_complete(config, exported)
    further = config.model_copy(update={"run": config.run.model_copy(update={"steps": 16})})
    assert not is_complete(further, exported)
    (config.run.dir / "metrics.jsonl").unlink()  # nothing says that steps are missing
    assert is_complete(further, exported)
    (exported / "model.safetensors").unlink()
    assert not is_complete(config, exported)


@pytest.mark.long
def test_further_steps_are_trained_and_exported(finished, tmp_path):
    folder, _ = finished
    shutil.copytree(folder / "runs", tmp_path / "runs")
    result = demo(tmp_path, "run.steps=10", "optimizer.schedule.decay_steps=8")
    assert result.returncode == 0, result.stderr
    assert steps_recorded(tmp_path) == list(range(1, 11))
    before, after = (
        load_file(place / "runs/demo/exported/model.safetensors") for place in (folder, tmp_path)
    )
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.long
def test_reported_bytes_are_within_the_rule_and_near_it(finished):
    """Twice, the last stage once; a block's second pass may leave its biases at home."""
    folder, result = finished
    exported = AutoModelForCausalLM.from_pretrained(folder / "runs/demo/exported").transformer

    def numbers(*modules):
        return sum(p.numel() for module in modules for p in module.parameters())

    outer, blocks = numbers(exported.wte, exported.wpe), numbers(exported.h)
    last = numbers(exported.wte, exported.ln_f)
    row = json.loads((folder / "runs/demo/metrics.jsonl").read_text().splitlines()[1])
    width = {"bf16": 2, "fp32": 4}[re.search(r"of weights in (\w+),", result.stdout)[1]]
    assert row["gradient_bytes"] == 4 * (outer + blocks + last)
    most = width * (2 * (outer + blocks) + last)
    assert width * (outer + 1.9 * blocks + last) <= row["streamed_bytes"] <= most
    table = " ".join(re.findall(r"│ ([^│]*) │$", result.stdout, re.MULTILINE))
    assert (
        f"{row['streamed_bytes'] / 1024:.0f} KiB of weights are sent to the engine, for the "
        f"forward and again for the backward pass (at most {most / 1024:.0f} KiB), and "
        f"{row['gradient_bytes'] / 1024:.0f} KiB of gradients are returned once, whatever the "
        "number of micro-batches"
    ) in re.sub(" +", " ", table)


@pytest.mark.long
def test_the_export_is_a_model_with_its_tokenizer(finished):
    folder, result = finished
    tokenizer = AutoTokenizer.from_pretrained(folder / "runs/demo/exported")
    model = AutoModelForCausalLM.from_pretrained(folder / "runs/demo/exported")
    ids = torch.tensor([tokenizer.encode("def f(x):\n    return x\n")])
    assert model(input_ids=ids, labels=ids).loss < 6.5  # ln 512 = 6.24 knows nothing
    apart = float(re.search(r"difference ([\d.e+-]+)\.", result.stdout)[1])
    assert apart < 1e-2


@pytest.mark.long
def test_second_run_reports_completion_and_trains_nothing(finished, monkeypatch, capsys):
    folder, _ = finished
    monkeypatch.chdir(folder)
    before = (folder / "runs/demo/metrics.jsonl").read_bytes()
    assert run([*SMALL, "run.steps=8"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("The demo is complete: runs/demo has all its steps.\n")
    assert "mv runs/demo runs/demo.old" in out
    assert (folder / "runs/demo/metrics.jsonl").read_bytes() == before


@pytest.mark.long
def test_other_numbers_for_an_existing_run_are_refused(finished, monkeypatch, capsys):
    folder, _ = finished
    monkeypatch.chdir(folder)
    assert run([*SMALL, "run.steps=8", "optimizer.learning_rate=1"]) == 2
    assert "optimizer.learning_rate: 0.00" in capsys.readouterr().err


@pytest.mark.long
def test_ctrl_c_in_a_terminal_saves_and_the_next_run_resumes(tmp_path):
    """A real terminal: the panel is drawn, and Ctrl-C arrives as it does from a keyboard."""
    arguments = ["run.steps=2000", "evaluation.every=500"]
    seen, code = in_a_terminal(tmp_path, arguments, until=" left", send=b"\x03")
    assert code == 130
    assert "tokens/s" in seen
    assert "stopped after step" in seen
    assert "To resume: " in seen
    stopped_at = max(steps_recorded(tmp_path))
    assert stopped_at < 2000
    assert (tmp_path / f"runs/demo/checkpoints/step-{stopped_at:08d}").is_dir()

    process = warm_start.Popen(
        [*DEMO, *SMALL, *arguments, "logging.every=1"],
        cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step "):
                process.send_signal(signal.SIGTERM)
                break
        lines += process.stdout.readlines()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert any(f"resumed from step {stopped_at}" in line for line in lines)
    assert any("stopped after step" in line and "SIGTERM" in line for line in lines)
    assert steps_recorded(tmp_path) == list(range(1, max(steps_recorded(tmp_path)) + 1))


def in_a_terminal(folder, arguments, until, send):
    """Run the demo in a pseudo-terminal, type `send` once `until` is seen; (output, exit code)."""
    terminal, theirs = pty.openpty()
    process = warm_start.Popen(
        [*DEMO, *SMALL, *arguments],
        cwd=folder, env=ENVIRONMENT, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, is_terminal=True,
    )  # fmt: skip
    os.close(theirs)
    seen, sent, deadline = b"", False, time.monotonic() + 200
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            part = os.read(terminal, 65536)
        except OSError:  # Linux reports the end of a terminal so
            break
        if not part:
            break
        seen += part
        if not sent and until.encode() in seen:
            os.write(terminal, send)
            sent = True
    else:
        process.kill()
    os.close(terminal)
    return seen.decode(errors="replace"), process.wait()


def test_missing_python_source_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert run([*SMALL, "run.steps=8", "data.input=[empty]"]) == 3
    assert capsys.readouterr().err == (
        "error: expected Python source in empty, found none; name another folder with "
        "'data.input=[FOLDER]'\n"
    )


def test_tests_packages_and_other_encodings_are_excluded(tmp_path):
    for name in ("a.py", "test/b.py", "site-packages/c.py", "deep/down/d.py", "e.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes("# -*- coding: latin-1 -*-\n# \xe9\n".encode("latin-1"))
    found = [path.relative_to(tmp_path).as_posix() for path in python_files(tmp_path)]
    assert found == ["a.py", "deep/down/d.py"]

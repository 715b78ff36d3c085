"""The command line starts light, and a mistake is answered without a traceback."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock import __version__
from penstock.cli.app import app
from penstock.config import load

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("torch", "transformers", "numba", "tensorboard", "numpy", "pyarrow", "tokenizers")


def penstock(*arguments, cwd=ROOT):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", "from penstock.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        check=False,
    )


def imported_by(statement, cwd):
    code = f"""
import sys
try:
    {statement}
except BaseException as error:
    assert type(error).__name__ in ("SystemExit", "ConfigError"), error
print("loaded:", *sorted(name for name in {HEAVY!r} if name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, check=True
    )
    return done.stdout.splitlines()[-1]


def test_the_command_line_imports_nothing_heavy():
    assert imported_by("import penstock.cli", ROOT) == "loaded:"


def test_version_is_printed_with_and_without_a_script():
    said = f"penstock {__version__}\n"
    assert penstock("--version").stdout == said
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "--version"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout == said


def test_program_of_dense_weights_loads_no_compiler_of_kernels(tmp_path, monkeypatch):
    """Numba takes a third of a second, of 2 for a program in the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    statement = "from penstock.cli import main; sys.argv[1:] = ['program', 'tiny']; main()"
    assert "transformers" in imported_by(statement, ROOT)  # it is compiled
    for _ in range(2):
        loaded = imported_by(statement, ROOT)
        assert "torch" in loaded
        assert "numba" not in loaded


def test_help_imports_nothing_heavy():
    statement = "from penstock.cli import main; sys.argv[1:] = ['--help']; main()"
    assert imported_by(statement, ROOT) == "loaded:"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "run.yaml"],
        pytest.param(["train", "run.yaml", "optimzer.name=sgd"], marks=pytest.mark.long),
        pytest.param(["train", "absent.yaml"], marks=pytest.mark.long),
        ["program", "gpt22"],
        ["eval", "absent"],
        ["export", "absent", "out"],
        ["generate", "absent"],
        ["inspect", "absent"],
        ["init", "run.yaml"],
    ],
)
def test_user_error_is_reported_before_heavy_imports(tmp_path, arguments):
    (tmp_path / "run.yaml").write_text("model: gpt2\nrun: {stepps: 3}\n")
    statement = f"from penstock.cli import main; sys.argv[1:] = {arguments!r}; main()"
    assert imported_by(statement, tmp_path) == "loaded:"


def test_user_error_prints_one_message_with_its_exit_code(tmp_path):
    (tmp_path / "run.yaml").write_text("model: gpt2\nrun: {stepps: 3}\n")
    done = penstock("train", "run.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: run.yaml:2: run.stepps: unknown key (did you mean 'steps'?); run has dir, steps, "
        "seed\n"
    )


def test_debug_prints_the_traceback_at_any_position(tmp_path):
    for arguments in (["--debug", "train", "x.yaml"], ["train", "x.yaml", "--debug"]):
        done = penstock(*arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert "Traceback" in done.stderr
        assert done.stderr.endswith(
            "error: x.yaml: no such file; `penstock init x.yaml` writes a starter there\n"
        )


def test_help_names_every_command():
    said = penstock("--help").stdout
    for command in ["train", "eval", "generate", "export", "init", "data", "inspect", "program"]:
        assert f"\n  {command} " in said


def test_an_unknown_command_names_the_closest():
    done = penstock("trian")
    assert done.returncode == 2
    assert "Did you mean 'train'?" in done.stderr


@pytest.mark.parametrize(
    ("model", "tokenizer", "note"),
    [
        (
            "gpt2",
            "auto",
            "note: it has a vocabulary of 8,192, which suits some MB of text: model: {preset: "
            "gpt2, vocab_size: 8192} and data.tokenizer: train-bpe:8192. With much more text, set "
            "model: gpt2 and data.tokenizer: train-bpe:50257\n",
        ),
        (
            "gpt2",
            "bytes",
            "Set data.tokenizer to train-bpe:8192, and model to {preset: gpt2, vocab_size: 8192}. "
            "With much text, train-bpe:50257 keeps the model as it is\n",
        ),
        (
            "bert-base",
            "train-bpe:4096",
            "So the file has model: {preset: bert-base, vocab_size: 4097}\n",
        ),
        (
            "tiny",
            "auto",
            "Set data.tokenizer to train-bpe:512, or model to {preset: tiny, vocab_size: 257}\n",
        ),
        ("gpt2", "train-bpe:50257", None),
    ],
)
def test_init_says_that_rows_of_the_embedding_are_unused(tmp_path, model, tokenizer, note):
    done = penstock("init", "--model", model, "--tokenizer", tokenizer, cwd=tmp_path)
    assert done.returncode == 0
    assert ("note: " in done.stdout) == (note is not None)
    assert (note or "") in done.stdout


@pytest.mark.parametrize(
    ("model", "tokenizer", "written"),
    [
        ("gpt2", "auto", ({"preset": "gpt2", "vocab_size": 8192}, "train-bpe:8192")),
        ("bert-base", "auto", ({"preset": "bert-base", "vocab_size": 8193}, "train-bpe:8192")),
        ("gpt2", "bytes", ("gpt2", "bytes")),
        ("gpt2", "train-bpe:4096", ({"preset": "gpt2", "vocab_size": 4096}, "train-bpe:4096")),
        ("gpt2", "train-bpe:50257", ("gpt2", "train-bpe:50257")),
        ("tiny", "auto", ("tiny", "auto")),
    ],
)
def test_init_writes_the_vocabulary_that_its_note_names(
    tmp_path, monkeypatch, model, tokenizer, written
):
    monkeypatch.chdir(tmp_path)
    arguments = ["init", "--model", model, "--tokenizer", tokenizer]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    config = load(tmp_path / "train.yaml")
    assert (config.to_mapping()["model"], config.data.tokenizer) == written


def test_init_writes_a_starter_that_loads_and_never_overwrites(tmp_path):
    done = penstock("init", "my.yaml", "--model", "gpt2-medium", "--input", "a.txt", cwd=tmp_path)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "wrote my.yaml"
    assert lines[1].startswith("note: it has a vocabulary of 8,192, which suits some MB of text: ")
    assert [line.removeprefix("next:").split("#")[0].strip() for line in lines[2:]] == [
        "penstock calibrate",
        "penstock plan my.yaml",
        "penstock train my.yaml",
    ]
    config = load(tmp_path / "my.yaml")
    assert config.model is not None
    assert config.to_mapping()["model"] == {"preset": "gpt2-medium", "vocab_size": 8192}
    assert config.data.input == ("a.txt",)
    assert config.data.tokenizer == "train-bpe:8192"
    assert config.run.dir == Path("runs/my")
    before = (tmp_path / "my.yaml").read_text()
    nowhere = penstock("init", "runs/my.yaml", cwd=tmp_path)
    assert (nowhere.returncode, nowhere.stderr) == (
        2,
        "error: runs/my.yaml: expected a file in a folder that exists, runs does not; create it, "
        "or choose another file\n",
    )
    again = penstock("init", "my.yaml", cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr == (
        "error: my.yaml already exists and was not changed; choose another file\n"
    )
    assert (tmp_path / "my.yaml").read_text() == before


def test_init_names_the_file_whose_name_is_too_long(tmp_path):
    name = "x" * 252 + ".yaml"
    done = penstock("init", name, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        f"error: {name}: expected a file name of at most 255 bytes, got 257; choose a shorter "
        "one\n",
    )

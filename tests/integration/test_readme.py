"""The documentation does what it says: its examples run, its files and tests exist."""

import ast
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from penstock.cli.app import app
from penstock.config import load

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]


def blocks(language, page="README.md"):
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found, f"{page} has no {language} block"
    return found


def commands():
    """Return the `penstock` commands that are shown as lines of their own."""
    lines = re.findall(r"^    \.venv/bin/(penstock .*)$", README, re.MULTILINE)
    assert lines
    return [shlex.split(line, comments=True)[1:] for line in lines]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with texts, as the examples expect one."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "licence.txt").write_text((ROOT / "LICENSE").read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_blocks_run_and_train(number, folder, capsys):
    exec(compile(blocks("python")[number], f"README.md, Python block {number + 1}", "exec"), {})
    losses = [float(x) for x in re.findall(r"'loss': ([\d.]+)", capsys.readouterr().out)]
    if losses:
        assert losses[-1] < 0.7 * losses[0]
    assert list((folder / "runs").glob("*/checkpoints/step-*/state.json"))


def test_the_python_blocks_of_the_reference_run(folder, capsys):
    for number, block in enumerate(blocks("python", "docs/reference.md"), start=1):
        exec(compile(block, f"docs/reference.md, Python block {number}", "exec"), {})
    out = capsys.readouterr().out
    assert "<Trainer of Sequential: 321 parameters, step 0 of 20, in runs/reference, " in out
    assert list((folder / "runs/reference/checkpoints").glob("step-*/state.json"))


def test_the_source_of_the_page_on_own_models_gives_equal_rows_again_and_trains(folder, capsys):
    (block,) = blocks("python", "docs/own_models.md")
    names: dict = {}
    exec(compile(block, "docs/own_models.md, Python block", "exec"), names)
    training, held_out = map(float, capsys.readouterr().out.split())
    assert max(training, held_out) < 0.05  # a third is the variance of the slopes
    source = names["NoisyLines"](seed=1)
    whole = source.batch(3, range(8), 8)
    for field, rows in source.batch(3, [6, 2], 8).items():
        assert np.array_equal(rows, whole[field][[6, 2]])
    sizes = [len(batch["input"]) for batch in source.evaluation_batches(48, 100)]
    assert sizes == [48, 48, 4]


@pytest.mark.parametrize("name", ["Trainer", "ModelSource", "ArraySource", "errors", "events"])
def test_the_reference_documents_what_users_import(name):
    text = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    assert re.search(rf"^::: penstock\.[\w.]*\b{name}$", text, re.MULTILINE)


YAML_PAGES = ["README.md", "docs/getting_started.md", "docs/larger_than_memory.md"]


@pytest.mark.parametrize("block", [b for page in YAML_PAGES for b in blocks("yaml", page)])
def test_yaml_blocks_are_complete_configurations(block, folder):
    name = re.match(r"# (\w+\.yaml)\n", block)
    assert name, "the first line of a block names its file"
    (folder / name[1]).write_text(block)
    config = load(folder / name[1], training=True)
    assert config.run.dir == Path("runs") / Path(name[1]).stem
    from penstock.planning.model_sources import model_source

    assert config.model is not None
    vocabulary = int(config.data.tokenizer.removeprefix("train-bpe:"))
    assert vocabulary <= (model_source(config.model).vocab_size or 0)


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_commands_exist_with_their_options(command):
    import typer

    group = typer.main.get_command(app)
    known = group.commands[command[0]]  # type: ignore[attr-defined]
    options = {name for parameter in known.params for name in parameter.opts}
    assert {word for word in command[1:] if word.startswith("--")} <= options


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page):
    """Links, and paths in backticks, with a function after `::` or a name after it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)]
    assert not [link for link in links if "://" in link and "example" in link]
    base = (ROOT / page).parent
    missing = [link for link in links if link and "://" not in link and not (base / link).exists()]
    paths = re.findall(r"`((?:penstock|tests|recipes|benchmarks|docs)/[\w./-]+)(?:::(\w+))?`", text)
    for path, name in paths:
        if not (ROOT / path).exists():
            missing.append(path)
        elif name:
            content = (ROOT / path).read_text(encoding="utf-8")
            if not re.search(rf"^\s*(?:def|class) {name}\b", content, re.MULTILINE):
                missing.append(f"{path}::{name}")
    assert not missing


def test_the_tour_names_the_functions_it_describes():
    text = (ROOT / "docs/tour.md").read_text(encoding="utf-8")
    assert len(re.findall(r"`penstock/[\w./-]+::\w+`", text)) >= 15


def test_every_guarantee_has_a_condition_and_names_a_test():
    text = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| guaranteed \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [line.strip("|").split(" | ") for table in tables for line in table.splitlines()]
    assert len(rows) >= 80
    assert [row for row in rows if len(row) != 3 or not row[1].strip()] == []
    assert [row for row in rows if not re.search(r"`tests/[\w/]+/test_\w+\.py", row[2])] == []


def texts_of(tree):
    """Yield each text of a module, with `...` for what is put in when it is made."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else "..." for v in node.values)
            yield "".join(map(str, parts))


def test_every_message_of_the_troubleshooting_page_is_in_the_code():
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| message \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    cells = [line.split(" | ")[0] for table in tables for line in table.splitlines()]
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) >= 60
    sources = (ROOT / "penstock").rglob("*.py")
    trees = [ast.parse(source.read_text(encoding="utf-8")) for source in sources]
    texts = "\0".join(text for tree in trees for text in texts_of(tree))

    def is_there(message):
        first, *rest = [part.strip() for part in message.split("...") if part.strip()]
        if not rest or first not in texts:
            return first in texts
        parts = [re.escape(part) for part in (first, *rest)]
        return re.search(r"[^\0]*?".join(parts), texts) is not None

    assert [message for message in messages if not is_there(message)] == []

"""The demo's text: the source of Python's own standard library, as a data set."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from penstock.config import Config
from penstock.data import build_dataset
from penstock.errors import DataError
from penstock.progress import show_bytes, show_count

# Tests, installed packages, and generated files: tables, help texts.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_LEFT_OUT |= {"encodings", "lib2to3", "pydoc_data"}


def build_data(config: Config, console: Console) -> None:
    """Build the data set of a run from the Python files in `data.input`, unless it exists.

    Raises `DataError` if there are no such files.
    """
    if config.data_dir.exists():
        console.print(f"text   {config.data_dir}, already built")
        return
    folders = [Path(folder) for folder in config.data.input]
    where = ", ".join(map(str, folders))
    files = [path for folder in folders for path in python_files(folder)]
    if not files:
        raise DataError(
            f"expected Python source in {where}, found none; name another folder with "
            "'data.input=[FOLDER]'"
        )
    size = show_bytes(sum(path.stat().st_size for path in files))
    console.print(f"text   {len(files)} Python files, {size}, from {where}", soft_wrap=True)
    with _progress_bars(console) as on_progress:
        report = build_dataset(
            files,
            config.tokenizer,
            config.data_dir,
            validation=config.data.validation,
            seed=config.data.seed,
            chosen_from=config.data.input,
            on_progress=on_progress,
        )
    for note in report.notes:
        console.print(f"       note: {note}", soft_wrap=True)
    train, held_out = (report.manifest.splits[name].tokens for name in ("train", "validation"))
    console.print(
        f"       {show_count(train)} training tokens and {show_count(held_out)} held-out tokens, "
        f"vocabulary of {report.manifest.vocab_size}"
    )


def python_files(folder: Path) -> list[Path]:
    """Return the Python files under a folder that are UTF-8 and not left out, sorted."""
    found = []
    for base, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        paths = (Path(base, name) for name in names if name.endswith(".py"))
        found += [path for path in paths if _is_utf8(path)]
    return sorted(found)


def _is_utf8(path: Path) -> bool:
    """Tell whether a file can be read as UTF-8; Python allows other encodings too."""
    try:
        path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True


@contextmanager
def _progress_bars(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function of (phase, done, total) that shows a bar per phase."""
    columns = (TextColumn("       {task.description:<22}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, Any] = {}

        def show(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = progress.add_task(phase, total=total)
            progress.update(tasks[phase], completed=done)

        yield show

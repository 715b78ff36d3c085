"""`penstock data`: make a data set of text, and look at one."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from penstock.progress import show_bytes, show_rate

if TYPE_CHECKING:
    from penstock.data import TokenDataset

app = typer.Typer(help="Make data sets of text, and inspect them.", no_args_is_help=True)


class Content(StrEnum):
    """What the files of a data set hold."""

    text = "text"
    records = "records"


class SeveralInputs(TyperCommand):
    """Lets one `--input` take several values, as in `--input a.txt b.txt`.

    The option parser knows only options with a fixed number of values.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread_inputs(args))


def spread_inputs(args: list[str]) -> list[str]:
    """Repeat `--input` before each of the values that follow one; options end the values."""
    spread: list[str] = []
    collecting = named = False
    for position, arg in enumerate(args):
        if arg == "--":
            return spread + args[position:]
        if arg.startswith("-") and arg != "-":
            collecting = arg in ("--input", "-i") or arg.startswith("--input=")
            named = arg in ("--input", "-i")
        elif collecting:
            if not named:
                spread.append("--input")
            named = False
        spread.append(arg)
    return spread


_Inputs = Annotated[
    list[str],
    typer.Option(
        "--input",
        "-i",
        metavar="FILES...",
        help="Text, .jsonl or .parquet files, or folders of such files; one flag takes several "
        "paths.",
    ),
]
_Tokenizer = Annotated[
    str,
    typer.Option(
        metavar="bytes|train-bpe:SIZE|PATH",
        help="bytes: no merges, 256 byte values; train-bpe: a byte-level BPE trained on the input; "
        "PATH: the tokenizer of a tokenizer.json, a Hugging Face folder or another data set.",
    ),
]
_Content = Annotated[
    Content,
    typer.Option(
        help="text; or records, each a prompt and a completion: only the completion is trained on."
    ),
]
_Exclude = Annotated[
    list[str] | None, typer.Option(help="Pattern of files and subfolders to exclude; repeatable.")
]


def _field(what: str) -> Any:
    return typer.Option(help=f"Field or column with {what}.")


@app.command(cls=SeveralInputs)
def build(
    input: _Inputs,
    tokenizer: _Tokenizer,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to create; a link is followed.")],
    validation: Annotated[
        float, typer.Option(metavar="F", help="Share of held-out documents; 0: none.")
    ] = 0.05,
    seed: Annotated[int, typer.Option(help="Seed that selects the held-out documents.")] = 0,
    content: _Content = Content.text,
    field: Annotated[str, _field("the text in .jsonl and .parquet files")] = "text",
    prompt_field: Annotated[str, _field("the prompt of a record")] = "prompt",
    completion_field: Annotated[str, _field("the completion of a record")] = "completion",
    glob: Annotated[
        str | None, typer.Option(help="Pattern for names of files inside folders, such as '*.py'.")
    ] = None,
    exclude: _Exclude = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing data set.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")] = False,
) -> None:
    """Turn text into a data set: tokens in memory-mapped, checksummed shards.

    With --content records, each line of a .jsonl file is {"prompt": "...", "completion": "..."}.
    """
    from penstock.data import TokenDataset, build_dataset

    started = time.monotonic()
    with _progress(quiet) as on_progress:
        report = build_dataset(
            input,
            tokenizer,
            out,
            validation=validation,
            seed=seed,
            content=content.value,
            field=field,
            prompt_field=prompt_field,
            completion_field=completion_field,
            glob=glob,
            exclude=exclude or (),
            overwrite=overwrite,
            on_progress=on_progress,
        )
    if quiet:
        return
    for note in report.notes:
        typer.echo(f"note: {note}")
    seconds = time.monotonic() - started
    files = "1 file" if report.files == 1 else f"{report.files:,} files"
    typer.echo(f"built {report.path} from {files} in {seconds:.1f} s")
    typer.echo(_table(TokenDataset.open(report.path)))


@app.command()
def inspect(
    dataset: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a data set.")],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")] = False,
) -> None:
    """Print a summary of a data set, and verify the checksum of every byte."""
    from penstock.data import TokenDataset

    opened = TokenDataset.open(dataset)
    if not quiet:
        typer.echo(_table(opened))
    with _progress(quiet) as on_progress:
        checked = opened.verify(lambda done, total: on_progress("checking", done, total))
    if not quiet:
        typer.echo(
            f"all checksums match: {show_bytes(checked)} in {len(opened.manifest.files())} files"
        )


def _table(dataset: "TokenDataset") -> str:
    manifest = dataset.manifest
    by = {"document": "by document", "tail": "the last tokens", "none": "none"}
    lines = [
        f"data set     {dataset.path}",
        f"tokenizer    {manifest.tokenizer.name}, vocabulary {manifest.vocab_size:,}, end of "
        f"document {dataset.end_of_document}",
        f"stored as    {manifest.dtype}, {dataset.bytes_per_token:.2f} bytes of text per token",
    ]
    for name, split in manifest.splits.items():
        documents = _documents(dataset, name)
        shards = "1 shard" if len(split.shards) == 1 else f"{len(split.shards):,} shards"
        lines.append(f"{name:<12} {split.tokens:,} tokens, {documents}, {shards}")
    lines.append(
        f"held out     {by[manifest.validation_by]} (share {manifest.validation_fraction:g}, "
        f"seed {manifest.seed})"
    )
    lines.append(f"fingerprint  {dataset.fingerprint}")
    return "\n".join(lines)


def _documents(dataset: "TokenDataset", split: str) -> str:
    """The number of documents; of records also how long they are and what share is completion."""
    count = dataset.documents(split)
    if dataset.content == "text":
        return "1 document" if count == 1 else f"{count:,} documents"
    index = dataset.records(split)
    labels = sum(int(spans.labels.sum()) for spans in index.blocks())
    share = labels / max(1, dataset.tokens(split))
    records = "1 record" if count == 1 else f"{count:,} records"
    return f"{records} of at most {index.longest() + 1:,} ({share:.0%} completion)"


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on a terminal, one line per phase in a log, nothing when quiet."""
    if quiet:
        yield lambda phase, done, total: None
        return
    if not sys.stderr.isatty():
        started_phases: set[str] = set()

        def line(phase: str, done: int, total: int) -> None:
            if phase not in started_phases:
                started_phases.add(phase)
                typer.echo(f"{phase} {show_bytes(total)}", err=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class SpeedColumn(ProgressColumn):
        """Input per second, in the units of all other sizes."""

        def render(self, task: Task) -> Text:
            return Text(show_rate(task.speed) if task.speed else "", "progress.data.speed")

    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        SpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def show(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total)
            bar.update(tasks[phase], completed=done, total=total)

        yield show

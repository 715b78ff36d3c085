"""`penstock init`: write a starter configuration in which every key is explained."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from penstock.config import Config

_LEARNED_VOCABULARY = 8192  # as in the README: a few MB of text suffice
_LONGEST_NAME_BYTES = 255  # of Linux and its file systems


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")] = Path(
        "train.yaml"
    ),
    model: Annotated[str, typer.Option(help="Preset to start from.")] = "gpt2",
    text: Annotated[
        list[str] | None,
        typer.Option("--input", help="Text file or glob to train on; may be repeated."),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="auto, bytes, train-bpe:SIZE, or the path of a tokenizer.")
    ] = "auto",
) -> None:
    """Write a starter configuration with every key and its meaning."""
    from penstock.config import Config, commented
    from penstock.errors import ConfigError, StorageError

    # `run.dir` follows from the name: a name that is too long would be called a wrong run.dir.
    if (name_bytes := len(os.fsencode(file.name))) > _LONGEST_NAME_BYTES:
        raise ConfigError(
            f"{file}: expected a file name of at most {_LONGEST_NAME_BYTES} bytes, got "
            f"{name_bytes}; choose a shorter one"
        )
    mapping: dict[str, Any] = {
        "model": model,
        "data": {"input": text or ["texts/**/*.txt"], "tokenizer": tokenizer},
        "run": {"dir": f"runs/{file.stem}"},
    }
    config = Config.from_mapping(mapping)
    exists = f"{file} already exists and was not changed; choose another file"
    if file.exists():
        raise ConfigError(exists)
    note = None
    if (unused := _unused_rows(config)) is not None:
        note = unused.note
        if unused.model is not None:
            mapping["model"], mapping["data"]["tokenizer"] = unused.model, unused.tokenizer
            config = Config.from_mapping(mapping)
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(commented(config))
    except FileExistsError:
        raise ConfigError(exists) from None
    except FileNotFoundError:
        raise ConfigError(
            f"{file}: expected a file in a folder that exists, {file.parent} does not; create it, "
            "or choose another file"
        ) from None
    except OSError as error:
        raise StorageError(f"{file}: cannot write this file: {error.strerror}") from None
    typer.echo(f"wrote {file}")
    if note is not None:
        typer.echo(f"note: {note}")
    path = shlex.quote(str(file))
    width = len(f"penstock train {path}")
    typer.echo(
        f"next: {'penstock calibrate':{width}}  # once per machine: measures it for the plan\n"
        f"      {f'penstock plan {path}':{width}}  # does it fit, and how long will it take?\n"
        f"      penstock train {path}"
    )


@dataclass(frozen=True)
class _Unused:
    """A note on unused rows of an embedding, and the keys that avoid them if it is clear which."""

    note: str
    model: dict[str, Any] | None = None
    tokenizer: str = "auto"


def _unused_rows(config: Config) -> _Unused | None:
    """Return what follows for a preset whose vocabulary is far larger than that of its tokenizer.

    A tokenizer that was asked for is kept, and the preset gets its vocabulary. Instead of that of
    bytes, which is the default of presets, one is learned from the text.
    """
    from penstock.config import PresetModel, dump_inline, resolve_preset
    from penstock.data import BYTE_VOCABULARY, train_size, unused_ids

    assert isinstance(config.model, PresetModel)
    name, size = config.model.preset, train_size(config.tokenizer)
    preset = resolve_preset(name)
    rows, mask = preset.config["vocab_size"], int(preset.task == "masked_lm")
    ids = BYTE_VOCABULARY if config.tokenizer == "bytes" else size
    if ids is None or not unused_ids(rows, ids):
        return None
    unused = (
        f"{name} has {rows:,} rows of its embedding, the tokenizer {config.tokenizer} has {ids:,} "
        f"ids: the other rows would be stored and updated, and never used"
    )
    if size is not None:
        fitting = {"preset": name, "vocab_size": size + mask}
        note = f"{unused}. So the file has model: {dump_inline(fitting)}"
        return _Unused(note, fitting, config.tokenizer)
    learned = _LEARNED_VOCABULARY
    if rows <= learned:
        return _Unused(
            f"{unused}. Set data.tokenizer to train-bpe:{rows - mask}, or model to {{preset: "
            f"{name}, vocab_size: {ids + mask}}}"
        )
    fitting, tokenizer = {"preset": name, "vocab_size": learned + mask}, f"train-bpe:{learned}"
    own = f"train-bpe:{rows - mask}"
    if config.data.tokenizer != "auto":
        return _Unused(
            f"{unused}; and a text has several times as many tokens of one byte as learned ones. "
            f"Set data.tokenizer to {tokenizer}, and model to {dump_inline(fitting)}. "
            f"With much text, {own} keeps the model as it is"
        )
    return _Unused(
        f"it has a vocabulary of {learned:,}, which suits some MB of text: model: "
        f"{dump_inline(fitting)} and data.tokenizer: {tokenizer}. With much more text, set model: "
        f"{name} and data.tokenizer: {own}",
        fitting,
        tokenizer,
    )

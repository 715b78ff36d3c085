"""`data`: a data set made by `penstock data build`, or the files to make one from."""

from typing import Literal

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from penstock.config.section import PathText, Place, Places, Section, setting


class DataConfig(Section):
    """Where the training text is, and how sequences are drawn from it."""

    path: PathText | None = setting(
        None,
        "folder of the data set; null with `input` given: RUN.DIR/data",
        example="runs/my-data",
    )
    input: Places = setting(
        (),
        "text, JSONL or Parquet files, globs or folders, from which the data set is built on "
        "first use, when its folder does not exist yet; one alone needs no brackets; a file that "
        "several of them name is read once",
        example=["texts/*.txt"],
    )
    tokenizer: Place = setting(
        "auto",
        "tokenizer of the build: bytes, train-bpe:SIZE, or the path of a tokenizer; auto: the "
        "tokenizer of the folder in model.hf, bytes for other models",
    )
    content: Literal["text", "records"] = setting(
        "text",
        "content of the input files: text, or records of a prompt and a completion; only the "
        "completions of records are trained on",
    )
    text_field: str = setting("text", "field or column of JSONL and Parquet files with the text")
    prompt_field: str = setting("prompt", "field or column of a record with its prompt")
    completion_field: str = setting("completion", "field or column of a record with its completion")
    validation: float = setting(0.05, "share of the text that the build holds out", ge=0, lt=1)
    sequence_length: int | None = setting(
        None,
        "tokens per sequence; null: the model's context, or the length of the longest record if "
        "that is less",
        unit="tokens",
        example=512,
        ge=1,
        le=10**9,
    )
    seed: int = setting(
        0,
        "seed of the order in which sequences are drawn, and of the choice of documents that a "
        "build holds out",
        ge=0,
        le=2**63 - 1,
    )

    @field_validator("tokenizer")
    @classmethod
    def _tokenizer(cls, value: str) -> str:
        kind, colon, size = value.partition(":")
        if kind == "train-bpe" and not (colon and size.isdecimal() and int(size) > 256):
            raise PydanticCustomError(
                "tokenizer",
                "expected train-bpe:SIZE with a vocabulary above 256, got {got}; "
                "for example train-bpe:4096",
                {"got": repr(value)},
            )
        return value

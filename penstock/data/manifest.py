"""`dataset.json`: the files of a data set, and the rules of the format.

A data set is a folder. Its tokens are in shards `train-00000.bin`, `train-00001.bin`, ... as plain
little-endian integers (uint16 if the vocabulary allows it, uint32 otherwise). One end-of-document
token follows every document. Each shard has an `.idx` file: for every document that ends in the
shard, the position in the split just after its last token (uint64, little-endian). `dataset.json`
names all of these files with their sizes and a checksum for every chunk, and contains a checksum of
itself. Nothing else in the folder is ever read, except `tokenizer.json`, which it also names, and
`built_from.json`, which only records the inputs.

In a data set of records every document is a prompt and its completion, and besides its end the
index contains the number of its prompt tokens (uint64, at least 1, less than the document).

Version 3 contains `content` and the text bytes of every split. Versions 1 (plain text, without
`content`) and 2 (records) have only the text bytes of the whole data set. The files of tokens are
the same in all versions, and so is the fingerprint, which leaves the additions of version 3 out: a
run that began on a data set of version 1 also accepts the same data set built again.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock.errors import CorruptionError, DataError
from penstock.io import NotPlainError, read_plain

FORMAT = "penstock-dataset"
MANIFEST_NAME = "dataset.json"
TOKENIZER_NAME = "tokenizer.json"
INDEX_ENTRY_BYTES = {"text": 8, "records": 16}
MAX_BYTES = 1 << 30
"""A longer `dataset.json` is rejected unread: 40 MB describe a data set of a terabyte."""

# A plain name: a manifest must not refer to files outside its folder.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=120)]
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Split = Literal["train", "validation"]
TokenType = Literal["uint16", "uint32"]
Content = Literal["text", "records"]
CONTENTS: tuple[Content, ...] = get_args(Content)
Version = Literal[1, 2, 3]
VERSION: Version = 3
_OLDER_VERSIONS: dict[Content, Version] = {"text": 1, "records": 2}


class _ManifestPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DataFileRecord(_ManifestPart):
    """One file: its name, its size and the xxh3_128 checksum of every chunk of it."""

    file: FileName
    size_bytes: Count
    chunks: list[Checksum]


class ShardRecord(_ManifestPart):
    """One shard: its tokens and the ends of the documents that end in it."""

    tokens: Count
    documents: Count
    data: DataFileRecord
    index: DataFileRecord


class SplitRecord(_ManifestPart):
    """One split: an unbroken sequence of tokens, cut into shards.

    `text_bytes` are the UTF-8 bytes of its text, None in versions 1 and 2.
    """

    tokens: Count
    documents: Count
    text_bytes: Count | None = None
    shards: list[ShardRecord]


class TokenizerRecord(_ManifestPart):
    """The tokenizer that produced the tokens; `data` is its file, absent for bytes."""

    kind: Literal["bytes", "file"]
    name: str
    end_of_document: Count
    data: DataFileRecord | None


class Manifest(_ManifestPart):
    """The whole content of `dataset.json` except its own checksum."""

    format: Literal["penstock-dataset"]
    version: Version
    content: Content = "text"
    vocab_size: Annotated[int, Field(ge=1, le=2**32)]
    dtype: TokenType
    chunk_bytes: Annotated[int, Field(ge=8, le=2**30, multiple_of=8)]
    seed: int
    validation_fraction: Annotated[float, Field(ge=0, lt=1)]
    validation_by: Literal["document", "tail", "none"]
    text_bytes: Count
    tokenizer: TokenizerRecord
    splits: dict[Split, SplitRecord]

    @property
    def token_bytes(self) -> int:
        """Bytes of one stored token."""
        return 2 if self.dtype == "uint16" else 4

    def files(self) -> list[DataFileRecord]:
        """Every file of the data set except `dataset.json`, in a fixed order."""
        found = [self.tokenizer.data] if self.tokenizer.data else []
        for split in self.splits.values():
            for shard in split.shards:
                found += [shard.data, shard.index]
        return found

    @model_validator(mode="after")
    def _consistent(self) -> "Manifest":
        if self.version not in (VERSION, _OLDER_VERSIONS[self.content]):
            raise ValueError(f"a data set of {self.content} cannot have version {self.version}")
        text_bytes = [split.text_bytes for split in self.splits.values()]
        if self.version != VERSION and any(count is not None for count in text_bytes):
            raise ValueError(f"version {self.version} has no text_bytes of a split")
        if self.version == VERSION and None in text_bytes:
            raise ValueError("a split has no text_bytes")
        if self.version == VERSION and sum(filter(None, text_bytes)) != self.text_bytes:
            raise ValueError("the text_bytes of the splits do not add up to those of the data set")
        if self.dtype == "uint16" and self.vocab_size > 2**16:
            raise ValueError("a vocabulary beyond 65536 does not fit uint16")
        if self.tokenizer.end_of_document >= self.vocab_size:
            raise ValueError("the end-of-document token is beyond the vocabulary")
        if (self.tokenizer.kind == "file") != (self.tokenizer.data is not None):
            raise ValueError("a tokenizer of kind 'file' must have a file, other kinds none")
        if "train" not in self.splits:
            raise ValueError("there is no train split")
        for name, split in self.splits.items():
            if split.tokens != sum(shard.tokens for shard in split.shards):
                raise ValueError(f"split {name} and its shards differ in their number of tokens")
            if split.documents != sum(shard.documents for shard in split.shards):
                raise ValueError(f"split {name} and its shards differ in their number of documents")
            for shard in split.shards:
                if shard.data.size_bytes != shard.tokens * self.token_bytes:
                    raise ValueError(f"{shard.data.file} does not have the size of its tokens")
                if shard.index.size_bytes != shard.documents * INDEX_ENTRY_BYTES[self.content]:
                    raise ValueError(f"{shard.index.file} does not have the size of its documents")
        names = [MANIFEST_NAME]
        for record in self.files():
            names.append(record.file)
            if len(record.chunks) != -(-record.size_bytes // self.chunk_bytes):
                raise ValueError(f"{record.file} does not have one checksum per chunk")
        if len(set(names)) != len(names):
            raise ValueError("two files have the same name")
        return self


def checksum_of(content: dict[str, Any]) -> str:
    """Return the checksum that a JSON file of a data set contains of itself."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return xxhash.xxh3_128_hexdigest(canonical.encode())


def advice_for(folder: Path) -> str:
    """Return what to do about a damaged file of the data set in `folder`."""
    return (
        f"restore the file from a copy, or build the data set again: delete {folder}, then run "
        "`penstock data build`, or `penstock train` if data.input names the text"
    )


def dump_manifest(manifest: Manifest) -> str:
    """Return the text of `dataset.json`: the manifest and then its own checksum."""
    content = manifest.model_dump(mode="json")
    return json.dumps(content | {"checksum": checksum_of(content)}, indent=1) + "\n"


def load_manifest(folder: Path) -> tuple[Manifest, str]:
    """Read `dataset.json` in `folder`; return the manifest and the fingerprint of the data set.

    The fingerprint covers the checksums of all files, so it identifies the data set's content.

    Raises:
        DataError: this release does not support the format version, or the file cannot be read.
        CorruptionError: it is not JSON, breaks a rule of the format, or fails its checksum.
    """
    path = folder / MANIFEST_NAME
    advice = advice_for(folder)
    try:
        data = read_plain(path, MAX_BYTES)
    except NotPlainError as error:
        raise CorruptionError(f"{path}: {error.strerror}; {advice}") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{path} is not JSON ({error}); {advice}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CorruptionError(f"{path} does not describe a Penstock data set; {advice}")
    if content.get("version") not in get_args(Version):
        raise DataError(
            f"{path} has format version {content.get('version')}, this release of Penstock reads "
            f"versions 1 to {VERSION}; build the data set again with this release"
        )
    expected = content.pop("checksum", None)
    try:
        actual = checksum_of(content)
    except RecursionError as error:
        raise CorruptionError(f"{path} is nested too deeply ({error}); {advice}") from None
    if actual != expected:
        raise CorruptionError(
            f"{path} does not match its checksum: {actual}, expected {expected}; {advice}"
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        reason = f"{place}: {first['msg']}" if place else first["msg"]
        raise CorruptionError(f"{path} breaks the format ({reason}); {advice}") from None
    return manifest, actual if manifest.version < VERSION else _older_checksum(content, manifest)


def _older_checksum(content: dict[str, Any], manifest: Manifest) -> str:
    """Return the checksum that the data set has in version 1 or 2."""
    version = _OLDER_VERSIONS[manifest.content]
    splits = {
        name: {key: value for key, value in split.items() if key != "text_bytes"}
        for name, split in content["splits"].items()
    }
    older = content | {"version": version, "splits": splits}
    if manifest.content == "text":
        older.pop("content", None)
    return checksum_of(older)

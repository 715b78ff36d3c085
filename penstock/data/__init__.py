"""Text to token shards on disk, and samples from them by (seed, step, index)."""

from penstock.constants import IGNORED_LABEL
from penstock.data.build import BuildReport, build_dataset
from penstock.data.built_from import BuiltFrom, read_built_from
from penstock.data.dataset import TokenDataset, check_vocabulary
from penstock.data.record_sampling import RecordSource
from penstock.data.sampling import (
    ArraySource,
    Batch,
    LanguageModelSource,
    MaskedLanguageModelSource,
    Source,
)
from penstock.data.sources import find_files
from penstock.data.tokenizers import (
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    dataset_tokenizer,
    encodes_as,
    export_tokenizer,
    load_tokenizer,
)

__all__ = [
    "IGNORED_LABEL",
    "ArraySource",
    "Batch",
    "BuildReport",
    "BuiltFrom",
    "ByteTokenizer",
    "FileTokenizer",
    "LanguageModelSource",
    "MaskedLanguageModelSource",
    "RecordSource",
    "Source",
    "TokenDataset",
    "Tokenizer",
    "build_dataset",
    "check_vocabulary",
    "dataset_tokenizer",
    "encodes_as",
    "export_tokenizer",
    "find_files",
    "load_tokenizer",
    "read_built_from",
]

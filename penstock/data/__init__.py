"""Text to token shards on disk, and samples from them by (seed, step, index)."""

from penstock.constants import IGNORED_LABEL as IGNORED_LABEL
from penstock.data.build import build_dataset as build_dataset
from penstock.data.built_from import (
    BuiltFrom as BuiltFrom,
    read_built_from as read_built_from,
    sample_of as sample_of,
)
from penstock.data.dataset import TokenDataset as TokenDataset, check_vocabulary as check_vocabulary
from penstock.data.record_sampling import RecordSource as RecordSource
from penstock.data.sampling import (
    ArraySource as ArraySource,
    LanguageModelSource as LanguageModelSource,
    MaskedLanguageModelSource as MaskedLanguageModelSource,
    Source as Source,
)
from penstock.data.sources import find_files as find_files, repeated_files as repeated_files
from penstock.data.tokenizers import (
    BYTE_VOCABULARY as BYTE_VOCABULARY,
    ByteTokenizer as ByteTokenizer,
    Tokenizer as Tokenizer,
    encodes_as as encodes_as,
    export_tokenizer as export_tokenizer,
    load_tokenizer as load_tokenizer,
    tokenizer_digest as tokenizer_digest,
    train_size as train_size,
    unused_ids as unused_ids,
)

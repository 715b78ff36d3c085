"""Files: durable writes, safe reads, failpoints, safetensors headers."""

from penstock.io.safe_open import NotPlainError, open_own, open_plain, read_plain
from penstock.io.safetensors_header import ITEM_BYTES, Extent, header_length, is_sound, parse_header

__all__ = [
    "ITEM_BYTES",
    "Extent",
    "NotPlainError",
    "durable",
    "failpoints",
    "header_length",
    "is_sound",
    "open_own",
    "open_plain",
    "parse_header",
    "read_plain",
]

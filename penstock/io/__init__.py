"""Files: durable writes, safe reads, failpoints, safetensors headers."""

from penstock.io import durable as durable, failpoints as failpoints
from penstock.io.removal import remove as remove
from penstock.io.safe_open import (
    NotPlainError as NotPlainError,
    file_in_place as file_in_place,
    open_own as open_own,
    open_plain as open_plain,
    read_plain as read_plain,
)
from penstock.io.safetensors_header import (
    ITEM_BYTES as ITEM_BYTES,
    Extent as Extent,
    header_length as header_length,
    is_sound as is_sound,
    parse_header as parse_header,
)
from penstock.io.write_advice import is_full as is_full, write_advice as write_advice

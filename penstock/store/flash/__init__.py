"""The flash tier: a store that is larger than memory, and durable step by step."""

from penstock.store.flash.description import OtherStoreError
from penstock.store.flash.division import least_dram_bytes
from penstock.store.flash.reader import FlashReader, discard_untrained, recorded_extra, repair
from penstock.store.flash.store import FlashStore

__all__ = [
    "FlashReader",
    "FlashStore",
    "OtherStoreError",
    "discard_untrained",
    "least_dram_bytes",
    "recorded_extra",
    "repair",
]

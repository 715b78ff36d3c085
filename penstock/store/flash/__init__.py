"""The flash tier: a store that is larger than memory, and durable step by step."""

from penstock.store.flash.reader import FlashReader, repair
from penstock.store.flash.store import FlashStore, recorded_extra

__all__ = ["FlashReader", "FlashStore", "recorded_extra", "repair"]

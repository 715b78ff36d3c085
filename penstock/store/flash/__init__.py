"""The flash tier: a store that may exceed memory and is durable step by step."""

from penstock.store.flash.description import OtherStoreError
from penstock.store.flash.division import least_dram_bytes
from penstock.store.flash.folder import (
    Repaired,
    discard_untrained,
    holds_store,
    open_reader,
    recorded_bfloat16,
    recorded_extra,
    repair,
)
from penstock.store.flash.forecast import FlashForecast, forecast
from penstock.store.flash.medium import ExtentFile
from penstock.store.flash.reader import FlashReader
from penstock.store.flash.sharded import DurableStore, ShardedFlashStore, SingleFlashShard
from penstock.store.flash.shards import forget, go_back, require_shards, shard_folder
from penstock.store.flash.store import FlashStore
from penstock.store.flash.version import checksum

__all__ = [
    "DurableStore",
    "ExtentFile",
    "FlashForecast",
    "FlashReader",
    "FlashStore",
    "OtherStoreError",
    "Repaired",
    "ShardedFlashStore",
    "SingleFlashShard",
    "checksum",
    "discard_untrained",
    "forecast",
    "forget",
    "go_back",
    "holds_store",
    "least_dram_bytes",
    "medium",
    "open_reader",
    "recorded_bfloat16",
    "recorded_extra",
    "repair",
    "require_shards",
    "shard_folder",
]

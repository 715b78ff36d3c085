"""The flash tier: a store that may exceed memory and is durable step by step."""

from penstock.store.flash import medium as medium
from penstock.store.flash.description import OtherStoreError as OtherStoreError
from penstock.store.flash.division import (
    least_dram_bytes as least_dram_bytes,
    mask_change_bytes as mask_change_bytes,
)
from penstock.store.flash.folder import (
    Repaired as Repaired,
    discard_untrained as discard_untrained,
    holds_store as holds_store,
    open_reader as open_reader,
    recorded_bfloat16 as recorded_bfloat16,
    recorded_extra as recorded_extra,
    repair as repair,
)
from penstock.store.flash.forecast import FlashForecast as FlashForecast, forecast as forecast
from penstock.store.flash.journal import REPAIR as REPAIR
from penstock.store.flash.medium import ExtentFile as ExtentFile
from penstock.store.flash.reader import FlashReader as FlashReader
from penstock.store.flash.sharded import (
    DurableStore as DurableStore,
    ShardedFlashStore as ShardedFlashStore,
    SingleFlashShard as SingleFlashShard,
)
from penstock.store.flash.shards import (
    durable_records as durable_records,
    forget as forget,
    go_back as go_back,
    require_shards as require_shards,
    shard_folder as shard_folder,
)
from penstock.store.flash.store import FlashStore as FlashStore
from penstock.store.flash.version import checksum as checksum

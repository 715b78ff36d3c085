"""RPC between the trainer process and the shards of the store."""

from penstock.distributed.rpc.commit_codec import (
    ShardReport,
    body_of_decision,
    body_of_report,
    decision_of,
)
from penstock.distributed.rpc.mask_codec import (
    bytes_of_histograms,
    bytes_of_masks,
    bytes_of_open_selections,
    histograms_of,
    masks_of_payload,
    open_selections_of,
)
from penstock.distributed.rpc.rpc import (
    WRITE_BYTES,
    FrameAssembler,
    InvalidResponseError,
    PendingCall,
    RpcClient,
    RpcMessage,
    ShardLostError,
    error_class,
    frames,
)
from penstock.distributed.rpc.shard_storage import InProcessShard, OwnedShard, ShardStorage
from penstock.distributed.rpc.store_client import StoreClient

__all__ = [
    "WRITE_BYTES",
    "FrameAssembler",
    "InProcessShard",
    "InvalidResponseError",
    "OwnedShard",
    "PendingCall",
    "RpcClient",
    "RpcMessage",
    "ShardLostError",
    "ShardReport",
    "ShardStorage",
    "StoreClient",
    "body_of_decision",
    "body_of_report",
    "bytes_of_histograms",
    "bytes_of_masks",
    "bytes_of_open_selections",
    "decision_of",
    "error_class",
    "frames",
    "histograms_of",
    "masks_of_payload",
    "open_selections_of",
    "store_server",
]

"""RPC between the trainer process and the shards of the store."""

from penstock.distributed.rpc.commit_codec import (
    ShardReport,
    body_of_decision,
    body_of_report,
    decision_of,
)
from penstock.distributed.rpc.mask_codec import (
    ballots_of,
    bytes_of_ballots,
    bytes_of_masks,
    bytes_of_votes,
    masks_of_payload,
    votes_of,
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
    "ballots_of",
    "body_of_decision",
    "body_of_report",
    "bytes_of_ballots",
    "bytes_of_masks",
    "bytes_of_votes",
    "decision_of",
    "error_class",
    "frames",
    "masks_of_payload",
    "store_server",
    "votes_of",
]

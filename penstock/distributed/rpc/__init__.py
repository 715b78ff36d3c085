"""RPC between the trainer process and the shards of the store."""

from penstock.distributed.rpc import store_server as store_server
from penstock.distributed.rpc.commit_codec import (
    ShardReport as ShardReport,
    body_of_decision as body_of_decision,
    body_of_report as body_of_report,
    decision_of as decision_of,
)
from penstock.distributed.rpc.mask_codec import (
    bytes_of_histograms as bytes_of_histograms,
    bytes_of_masks as bytes_of_masks,
    bytes_of_open_selections as bytes_of_open_selections,
    histograms_of as histograms_of,
    masks_of_payload as masks_of_payload,
    open_selections_of as open_selections_of,
)
from penstock.distributed.rpc.rpc import (
    FrameAssembler as FrameAssembler,
    InvalidResponseError as InvalidResponseError,
    PendingCall as PendingCall,
    RpcClient as RpcClient,
    RpcMessage as RpcMessage,
    ShardLostError as ShardLostError,
    error_class as error_class,
    frames as frames,
)
from penstock.distributed.rpc.shard_storage import (
    InProcessShard as InProcessShard,
    OwnedShard as OwnedShard,
    ShardStorage as ShardStorage,
)
from penstock.distributed.rpc.store_client import StoreClient as StoreClient

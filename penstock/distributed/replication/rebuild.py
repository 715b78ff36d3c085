"""Rebuild of a replica: copies a shard's weights, optimizer state and resume state to a learner.

This module is the trainer's side: it starts the copy and verifies the result. The data goes
directly from one node to the other (`state_transfer.py`). All data comes from one node, which stays
at one step, so the copy is consistent. The learner is promoted only when the checksums of both
nodes' state are equal.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from penstock.distributed.rpc import (
    InvalidResponseError,
    PendingCall,
    RpcClient,
    RpcMessage,
    ShardLostError,
    error_class,
)
from penstock.distributed.transport import Address
from penstock.errors import ClusterError, PenstockError
from penstock.io import failpoints

_Kind = TypeVar("_Kind", int, str)


class ReplicaRejectedError(ClusterError):
    """The learner cannot store the copy."""


class BrokenCopyError(ClusterError):
    """Data was lost or changed in transit; another attempt may succeed."""


def copy_shard(
    calls: RpcClient, source: int, address: Address, target: int, meanwhile: Callable[[], None]
) -> int:
    """Copy the whole state of node `source` to node `target`, while no step runs.

    Args:
        address: the address of `source`.
        meanwhile: called repeatedly until the copy ends; it may raise to cancel the copy.

    Returns:
        The number of bytes that were copied.

    Raises:
        ShardLostError: either node was lost.
        ReplicaRejectedError: `target` cannot store the copy.
        BrokenCopyError: the connection broke, or the checksums differ.
        InvalidResponseError: a reply of `source` is malformed.
        PenstockError: `source` cannot report its state.
    """
    _await(calls, calls.begin(source, "flush", {}, {}), meanwhile)
    status = calls.ask(source, "status", {}, {}).body
    step = _value(status, "step", int, source, InvalidResponseError)
    where = {"source": source, "listens": list(address), "step": step}
    call = calls.begin(target, "take_copy", where, {})
    failpoints.point("copy.begun")
    reply = _await_learner(calls, call, meanwhile).body
    if "failed" in reply:
        raise _failure(reply, source, target)
    copied = _value(reply, "copied", int, target, ReplicaRejectedError)
    source_call, target_call = (calls.begin(node, "checksum", {}, {}) for node in (source, target))
    reply = _await(calls, source_call, meanwhile).body
    wanted = _value(reply, "checksum", str, source, InvalidResponseError)
    reply = _await_learner(calls, target_call, meanwhile).body
    found = _value(reply, "checksum", str, target, ReplicaRejectedError)
    if wanted != found:
        raise BrokenCopyError(
            f"the copy on node {target} has checksum {found}, the original on node {source} has "
            f"{wanted}: the memory or the processor of one of their hosts is faulty"
        )
    # Only after verification: another run would open a durable state on flash.
    extra = {"extra": status.get("extra", {})}
    _await_learner(calls, calls.begin(target, "remember", extra, {}), meanwhile)
    _await_learner(calls, calls.begin(target, "finish_restore", {"step": step}, {}), meanwhile)
    return copied


def _value(
    reply: Mapping[str, Any], key: str, kind: type[_Kind], node: int, refuse: type[PenstockError]
) -> _Kind:
    """Return a value from a node's reply; refuse a value of another type."""
    value = reply.get(key)
    if type(value) is not kind:
        raise refuse(
            f"node {node} replied with {str(value)[:40]!r} as {key!r}; do all nodes run the same "
            "version of Penstock?"
        )
    return value


def _await(calls: RpcClient, call: PendingCall, meanwhile: Callable[[], None]) -> RpcMessage:
    """Wait for a reply; cancel the copy if waiting is interrupted."""
    try:
        return call.answer(meanwhile)
    except BaseException:
        if call.method == "take_copy":
            calls.begin(call.node, "give_up_copy", {}, {})
        raise


def _await_learner(
    calls: RpcClient, call: PendingCall, meanwhile: Callable[[], None]
) -> RpcMessage:
    """Wait for a reply of the learner, whose errors cost no other node its place."""
    try:
        return _await(calls, call, meanwhile)
    except ShardLostError:
        raise
    except PenstockError as error:
        meanwhile()  # raises if the error is that of the run, not of the learner
        raise ReplicaRejectedError(str(error)) from error


def _failure(reply: Mapping[str, Any], source: int, target: int) -> PenstockError:
    """Return the error of a copy that failed on one of its sides."""
    text, side = str(reply.get("text")), reply["failed"]
    if side == "source":
        return error_class(str(reply.get("kind")))(f"node {source}: {text}")
    if side == "target":
        return ReplicaRejectedError(text)
    return BrokenCopyError(f"from node {source} to node {target}: {text}")

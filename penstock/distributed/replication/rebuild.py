"""Rebuild of a replica: copies a shard's weights, optimizer state and resume state to a learner.

This module is the trainer's side: it starts the copy and verifies the result. The data goes
directly from one node to the other (`state_transfer.py`). All data comes from one node, which stays
at one step, so the copy is consistent. The learner is promoted only when the checksums of both
nodes' state are equal.
"""

from __future__ import annotations

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
    calls: RpcClient, source: int, listens: Address, target: int, meanwhile: Callable[[], None]
) -> int:
    """Copy the whole state of node `source` to node `target`, while no step runs.

    Args:
        listens: the address of `source`.
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
    _watched(calls, calls.begin(source, "flush", {}, {}), meanwhile)
    status = calls.ask(source, "status", {}, {}).body
    step = _said(status, "step", int, source, InvalidResponseError)
    where = {"source": source, "listens": list(listens), "step": step}
    asked = calls.begin(target, "take_copy", where, {})
    failpoints.point("copy.begun")
    said = _watched(calls, asked, meanwhile).body
    if "failed" in said:
        raise _failure(said, source, target)
    copied = _said(said, "copied", int, target, ReplicaRejectedError)
    ours, theirs = (calls.begin(node, "checksum", {}, {}) for node in (source, target))
    said = _watched(calls, ours, meanwhile).body
    wanted = _said(said, "checksum", str, source, InvalidResponseError)
    said = _given(calls, theirs, meanwhile).body
    found = _said(said, "checksum", str, target, ReplicaRejectedError)
    if wanted != found:
        raise BrokenCopyError(
            f"the copy on node {target} has checksum {found}, the original on node {source} has "
            f"{wanted}: the memory or the processor of one of their hosts is faulty"
        )
    # Only after verification: another run would open a durable state on flash.
    extra = {"extra": status.get("extra", {})}
    _given(calls, calls.begin(target, "remember", extra, {}), meanwhile)
    _given(calls, calls.begin(target, "finish_restore", {"step": step}, {}), meanwhile)
    return copied


def _said(
    said: Mapping[str, Any], key: str, kind: type[_Kind], node: int, refuse: type[PenstockError]
) -> _Kind:
    """Return a value from a node's reply; refuse a value of another type."""
    value = said.get(key)
    if type(value) is not kind:
        raise refuse(
            f"node {node} replied with {str(value)[:40]!r} as {key!r}; do all nodes run the same "
            "version of Penstock?"
        )
    return value


def _watched(calls: RpcClient, asked: PendingCall, meanwhile: Callable[[], None]) -> RpcMessage:
    """Wait for a reply; cancel the copy if waiting is interrupted."""
    try:
        return asked.answer(meanwhile)
    except BaseException:
        if asked.method == "take_copy":
            calls.begin(asked.node, "give_up_copy", {}, {})
        raise


def _given(calls: RpcClient, asked: PendingCall, meanwhile: Callable[[], None]) -> RpcMessage:
    """Wait for a reply of the learner."""
    try:
        return _watched(calls, asked, meanwhile)
    except ShardLostError:
        raise
    except PenstockError as error:
        raise ReplicaRejectedError(str(error)) from error


def _failure(said: Mapping[str, Any], source: int, target: int) -> PenstockError:
    """Return the error of a copy that failed on one of its sides."""
    text, side = str(said.get("text")), said["failed"]
    if side == "source":
        return error_class(str(said.get("kind")))(f"node {source}: {text}")
    if side == "target":
        return ReplicaRejectedError(text)
    return BrokenCopyError(f"from node {source} to node {target}: {text}")

"""Giving a process what another one holds of a shard: all weights, all state, and what is kept.

Here is the side of the run's process, which has it done and sees whether it was. What is copied
goes straight from the one to the other (`state_transfer.py`). All comes from one node, which stands
at one step the whole time, so that nothing is mixed; and the learner counts only when the
checksums of all that both hold are equal.
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
    """The process that was to be given a copy could not take it."""


class BrokenCopyError(ClusterError):
    """Something was lost or changed on the way; another try may do better."""


def copy_shard(
    calls: RpcClient, source: int, listens: Address, target: int, meanwhile: Callable[[], None]
) -> int:
    """Give node `target` all that node `source` holds, while it stands still.

    Args:
        listens: where `source` does.
        meanwhile: is called again and again until it is done; may raise, to give up.

    Returns:
        The bytes that were copied.

    Raises:
        ShardLostError: either was lost.
        ReplicaRejectedError: `target` cannot hold it.
        BrokenCopyError: the connection broke, or what came is not what was sent.
        InvalidResponseError: `source` says what makes no sense.
        PenstockError: `source` cannot say what it holds.
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
            f"what node {target} was given has checksum {found}, what node {source} holds "
            f"{wanted}: the memory or the processor of one of their hosts is faulty"
        )
    # Only now: on flash, what is durable there is what another run would open.
    extra = {"extra": status.get("extra", {})}
    _given(calls, calls.begin(target, "remember", extra, {}), meanwhile)
    _given(calls, calls.begin(target, "finish_restore", {"step": step}, {}), meanwhile)
    return copied


def _said(
    said: Mapping[str, Any], key: str, kind: type[_Kind], node: int, refuse: type[PenstockError]
) -> _Kind:
    """Return what a node has said of something, or refuse it if it is of another kind."""
    value = said.get(key)
    if type(value) is not kind:
        raise refuse(
            f"node {node} says {str(value)[:40]!r} for {key!r}; do all nodes run the same version "
            "of Penstock?"
        )
    return value


def _watched(calls: RpcClient, asked: PendingCall, meanwhile: Callable[[], None]) -> RpcMessage:
    """Wait for an answer; have a copy given up that nobody waits for any more."""
    try:
        return asked.answer(meanwhile)
    except BaseException:
        if asked.method == "take_copy":
            calls.begin(asked.node, "give_up_copy", {}, {})
        raise


def _given(calls: RpcClient, asked: PendingCall, meanwhile: Callable[[], None]) -> RpcMessage:
    """Wait for an answer of the one that is given a copy."""
    try:
        return _watched(calls, asked, meanwhile)
    except ShardLostError:
        raise
    except PenstockError as error:
        raise ReplicaRejectedError(str(error)) from error


def _failure(said: Mapping[str, Any], source: int, target: int) -> PenstockError:
    """Return the error of a copy that has failed on one of its sides."""
    text, side = str(said.get("text")), said["failed"]
    if side == "source":
        return error_class(str(said.get("kind")))(f"node {source}: {text}")
    if side == "target":
        return ReplicaRejectedError(text)
    return BrokenCopyError(f"from node {source} to node {target}: {text}")

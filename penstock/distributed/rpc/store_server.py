"""The methods of a shard's store that another process may call: one fixed table.

This is the server; the client is `store_client.py`. Arguments are plain data from a peer that has
the run's token. Each argument is converted to its type before the store receives it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from penstock.distributed.rpc.commit_codec import body_of_report, decision_of
from penstock.distributed.rpc.mask_codec import (
    bytes_of_histograms,
    masks_of_payload,
    open_selections_of,
)
from penstock.distributed.rpc.rpc import Arrays, RpcMessage
from penstock.distributed.rpc.shard_storage import OwnedShard
from penstock.errors import ClusterError, PenstockError
from penstock.sparsity import StreamedWeight, compact_bytes
from penstock.store import portions_of, sparse_shard
from penstock.store.flash import FlashStore


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as a flat array of a type that a message can carry; bfloat16 as uint16."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.dtype is torch.bfloat16:
        return flat.view(torch.int16).numpy().view(np.uint16)
    return flat.numpy()


def respond(storage: OwnedShard, content: RpcMessage) -> RpcMessage:
    """Execute a call, and return the response.

    An error is a response, too. Every other response except to `close` has the store's step after
    the call.
    """
    try:
        name = content.body.get("method")
        method = METHODS.get(name) if isinstance(name, str) else None
        if method is None:
            raise ClusterError(f"expected a method of a shard's store, got {str(name)[:40]!r}")
        done = method(storage, dict(content.body.get("with", {})), content.arrays)
        step = {} if name == "close" else {"step": storage.store.step}
        return RpcMessage({**done.body, **step}, done.arrays)
    except PenstockError as error:
        return RpcMessage({"error": type(error).__name__, "text": str(error)})
    except Exception as error:  # a defect, here or in the client; the client raises the error
        return RpcMessage({"error": "ClusterError", "text": f"{type(error).__name__}: {error}"})


def _open(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    store = storage.open()
    rule = store.flash_rule
    return RpcMessage(
        {
            "memory_bytes": dict(store.memory_bytes),
            "flash_bytes": store.flash_bytes,
            "flash_rule": [rule.read_bytes, rule.written_bytes],
            "is_new": not isinstance(store, FlashStore) or store.is_new,
        }
    )


def _close(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    storage.close()
    return RpcMessage()


def _status(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    store = storage.store
    if not isinstance(store, FlashStore):
        return RpcMessage()
    return RpcMessage(
        {"is_new": store.is_new, "durable_step": store.durable_step, "extra": dict(store.extra)}
    )


def _fetch(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    positions = arguments["positions"]
    if positions is not None:
        positions = [int(position) for position in positions]
    return _numbered(storage.store.fetch(int(arguments["stage"]), positions))


def _stream(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    return _numbered(storage.store.stream([str(name) for name in arguments["names"]]))


def _numbered(weights: Sequence[StreamedWeight]) -> RpcMessage:
    body: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for number, weight in enumerate(weights):
        if isinstance(weight, torch.Tensor):
            arrays[str(number)] = bytes_of(weight)
            continue
        body[f"mask {number}"] = [weight.index.kept, weight.version, weight.dense_gradient]
        arrays[str(number)] = bytes_of(weight.values)
        arrays[f"mask {number}"] = np.frombuffer(compact_bytes(weight.index), np.uint8)
    return RpcMessage(body, arrays)


def _mask(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    index = sparse_shard(storage.store).mask(str(arguments["name"]))
    if index is None:
        raise ClusterError(f"{arguments['name']} is dense and has no mask")
    data = np.frombuffer(compact_bytes(index), np.uint8)
    return RpcMessage({"kept": index.kept}, {"mask": data})


def _histograms(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    selections = open_selections_of(arrays.get("selections"))
    histograms = sparse_shard(storage.store).histograms(selections)
    return RpcMessage({}, {"histograms": bytes_of_histograms(histograms)})


def _receive(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    store, gradients = storage.store, []
    for name in arguments["names"]:
        found = arrays.get(str(name))
        spec = store.program.weights[str(name)]
        shape = (-1,) if spec.is_sparse else spec.shape
        gradients.append(None if found is None else torch.from_numpy(found).view(shape))
    store.receive(int(arguments["stage"]), gradients)
    return RpcMessage()


def _prepare(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    return RpcMessage(body_of_report(storage.store.prepare()))


def _decide(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    changes, replaces_update = masks_of_payload(arrays.get("masks"))
    decision = replace(decision_of(arguments), masks=changes, replaces_update=replaces_update)
    storage.store.decide(decision)
    return RpcMessage()


def _discard(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    storage.store.discard()
    return RpcMessage()


def _flush(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    storage.store.flush()
    return RpcMessage()


def _unchanged(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    return RpcMessage({"unchanged": list(storage.store.unchanged())})


def _take_traffic(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    taken = storage.store.take_traffic()
    return RpcMessage(
        {
            "bytes": [taken.streamed_bytes, taken.gradient_bytes],
            "seconds": [taken.update_seconds, taken.snapshot_seconds],
        }
    )


def _take_flash_traffic(
    storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays
) -> RpcMessage:
    taken = storage.store.take_flash_traffic()
    return RpcMessage(
        {
            "moved": [taken.read_bytes, taken.written_bytes],
            "seconds": taken.waited_seconds,
            "speculated": [taken.speculated_bytes, taken.discarded_bytes],
        }
    )


def _roles(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    roles = storage.store.roles(str(arguments["name"]))
    return RpcMessage(
        {
            "roles": {
                role: [str(stored.dtype).removeprefix("torch."), list(stored.shape)]
                for role, stored in roles.items()
            }
        }
    )


def _read(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    begin, end = int(arguments["begin"]), int(arguments["end"])
    values = storage.store.read(str(arguments["name"]), str(arguments["role"]), begin, end)
    return RpcMessage({}, {"values": values})


def _begin_restore(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    storage.store.begin_restore()
    return RpcMessage()


def _write(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    begin = int(arguments["begin"])
    storage.store.write(str(arguments["name"]), str(arguments["role"]), begin, arrays["values"])
    return RpcMessage()


def _clear_state(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    storage.store.clear_state(str(arguments["name"]))
    return RpcMessage()


def _finish_restore(
    storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays
) -> RpcMessage:
    step, updates = int(arguments["step"]), arguments.get("updates")
    if updates is None:
        storage.store.finish_restore(step)
    else:
        sparse_shard(storage.store).finish_restore(step, int(updates))
    return RpcMessage()


def _content_hash(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    return RpcMessage({"hash": storage.store.content_hash()})


def _checksum(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    return RpcMessage({"checksum": portions_of(storage.store).checksum()})


def _remember(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    storage.store.remember(dict(arguments["extra"]))
    return RpcMessage()


def _make_durable(storage: OwnedShard, arguments: Mapping[str, Any], arrays: Arrays) -> RpcMessage:
    store = storage.store
    if not isinstance(store, FlashStore):
        raise ClusterError("a shard in memory was asked to make its step durable")
    store.make_durable()
    return RpcMessage()


METHODS: Mapping[str, Callable[[OwnedShard, Mapping[str, Any], Arrays], RpcMessage]] = {
    "open": _open,
    "close": _close,
    "status": _status,
    "fetch": _fetch,
    "stream": _stream,
    "mask": _mask,
    "histograms": _histograms,
    "receive": _receive,
    "prepare": _prepare,
    "decide": _decide,
    "discard": _discard,
    "flush": _flush,
    "unchanged": _unchanged,
    "take_traffic": _take_traffic,
    "take_flash_traffic": _take_flash_traffic,
    "roles": _roles,
    "read": _read,
    "begin_restore": _begin_restore,
    "write": _write,
    "clear_state": _clear_state,
    "finish_restore": _finish_restore,
    "content_hash": _content_hash,
    "checksum": _checksum,
    "remember": _remember,
    "make_durable": _make_durable,
}

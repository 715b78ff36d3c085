"""The client for the store of a shard in another process; the trainer process uses it.

Every method of the store's interface is a call (`rpc.py`). The shard's process executes the calls
in the order in which they were made, separately from the step protocol (`store_server.py`). The
calls carry the trainer's own use of a store: filling, saving, evaluating and inspecting it. A
step's weights and gradients go between shards and engines and never through this client.

A shard may have two replicas. A write goes to both replicas, and a read comes from one. The loss of
one replica is no error here as long as the other is left. Responses are validated (`responses.py`):
a node with an invalid response is evicted, and counts as lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from penstock.distributed.rpc import responses
from penstock.distributed.rpc.commit_codec import body_of_decision
from penstock.distributed.rpc.mask_codec import (
    MOST_HISTOGRAM_BYTES,
    bytes_of_masks,
    bytes_of_open_selections,
)
from penstock.distributed.rpc.responses import Opened, Response, Status
from penstock.distributed.rpc.rpc import (
    WRITE_BYTES,
    InvalidResponseError,
    PendingCall,
    RpcClient,
    ShardLostError,
)
from penstock.distributed.rpc.store_server import bytes_of
from penstock.program import WeightSpec
from penstock.sparsity import Histogram, PackedIndex, Selection, StreamedWeight, max_compact_bytes
from penstock.store import (
    CHANGES,
    INDEX,
    MASTER,
    VALUES,
    Commit,
    CommitRule,
    Decision,
    FlashTraffic,
    GradientReport,
    Holding,
    OpenSelection,
    Stored,
    Traffic,
    commit_by,
    fill,
    holds_weight,
)

# These methods are called between two steps. They mean the same for the node that replaces a lost
# shard, and the next step finds out at which step that node stands.
_BETWEEN_STEPS = frozenset({"remember", "take_traffic", "take_flash_traffic", "status"})

_RESUME = "give the same command again; the run resumes from the last saved step"

T = TypeVar("T")
Read = Callable[[Response], T]


class StoreClient:
    """One shard's store, on flash or in memory; `DramStore` describes the methods.

    Args:
        program: the weights that the shard holds.
        calls: sends the calls to nodes.
        nodes: returns the current replicas of the shard.
        await_node: returns when the shard has a replica; raises if it can have none.
        refuse: evicts a node after an invalid response.
        copy: copies the whole state of the first node to the second node.
        rule: decides steps that are committed by this shard's gradients alone.
        replicas: how many replicas there are when none is lost.
    """

    def __init__(
        self,
        program: Holding,
        calls: RpcClient,
        *,
        nodes: Callable[[], Sequence[int]],
        await_node: Callable[[], None],
        refuse: Callable[[int, InvalidResponseError], None],
        copy: Callable[[int, int], None],
        rule: CommitRule,
        replicas: int,
    ) -> None:
        self.program = program
        self.step = 0  # of the shard's last response
        self.memory_bytes: Mapping[str, int] = {}
        self.flash_bytes = 0
        self.flash_rule, self.spans = FlashTraffic(), ()  # those of its nodes come by message
        self._calls, self._nodes, self._await_node, self._copy = calls, nodes, await_node, copy
        self._refuse, self._rule, self._replicas = refuse, rule, replicas
        self._roles: dict[str, dict[str, Stored]] = {}
        self._is_open = False

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every weight that the shard holds, by name."""
        return {name: spec.shape for name, spec in self.program.weights.items()}

    def _ask(self, method: str, read: Read[T], most: int = 0, **arguments: Any) -> T:
        """Return the response of one replica; of another if the first is lost during the call."""
        while True:
            lost = None
            for node in self._nodes():
                try:
                    return self._take(
                        method, self._calls.begin(node, method, arguments, {}, most), read
                    )
                except ShardLostError as error:
                    lost = error
            self._require_another(method, lost)

    def _ask_all(
        self,
        method: str,
        read: Read[T],
        arrays: Mapping[str, np.ndarray] | None = None,
        most: int = 0,
        **arguments: Any,
    ) -> dict[int, T]:
        """Return the responses of all replicas, called concurrently, except lost replicas."""
        while True:
            nodes, sent = self._nodes(), arrays or {}
            pending = [self._calls.begin(node, method, arguments, sent, most) for node in nodes]
            results: dict[int, T] = {}
            lost = None
            for each in pending:
                try:
                    results[each.node] = self._take(method, each, read)
                except ShardLostError as error:
                    lost = error
            if results:
                return results
            self._require_another(method, lost)

    def _take(self, method: str, pending: PendingCall, read: Read[T]) -> T:
        """Return the decoded response of a node; an invalid response evicts the node."""
        try:
            answer = Response(pending.node, method, pending.answer())
            step, results = responses.step_of(answer), read(answer)
        except InvalidResponseError as error:
            self._refuse(pending.node, error)
            raise ShardLostError(f"{self.program.name} was lost: {error} {_RESUME}") from error
        if step is not None:
            self.step = step
        return results

    def _require_another(self, method: str, lost: ShardLostError | None) -> None:
        if method not in _BETWEEN_STEPS:
            raise lost or ShardLostError(f"{self.program.name} was lost; {_RESUME}")
        self._await_node()

    def open(self) -> StoreClient:
        """Open the stores in the shard's processes, new or existing.

        An empty replica receives a copy of a replica that has state.
        """
        opened = self._ask_all("open", Opened.read)
        found, times = _first(opened), self._replicas
        self.memory_bytes = {kind: times * size for kind, size in found.memory_bytes.items()}
        self.flash_bytes = times * found.flash_bytes
        rule = found.flash_rule
        self.flash_rule = FlashTraffic(times * rule.read_bytes, times * rule.written_bytes)
        self._is_open = True
        sources = [node for node, each in opened.items() if not each.is_new]
        for node in opened.keys() - {*sources} if sources else ():
            self._copy(sources[0], node)
        return self

    def close(self) -> None:
        """Close the stores; a lost shard's store is closed already."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._ask_all("close", responses.nothing)
        except ShardLostError:
            return

    # On flash

    @property
    def is_new(self) -> bool:
        """Whether the store holds no durable step yet."""
        return self._ask("status", Status.read).is_new

    @property
    def durable_step(self) -> int | None:
        """The step that a restart after a crash would find now; None before the first."""
        return self._ask("status", Status.read).durable_step

    @property
    def extra(self) -> Mapping[str, Any]:
        """The data stored with the current step."""
        return self._ask("status", Status.read).extra

    def make_durable(self) -> None:
        """Return when the current step would survive a crash."""
        self._ask_all("make_durable", responses.nothing)

    def page_lock(self) -> bool:
        """Lock nothing and return True: engines stream to a GPU from buffers of their own."""
        return True

    def remember(self, extra: Mapping[str, Any]) -> None:
        """Store plain data with the current step."""
        self._ask_all("remember", responses.nothing, extra=dict(extra))

    # Weights out, gradients in

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill all masters, one weight at a time (`DramStore.load`)."""
        fill(self, weights)

    def fetch(self, stage: int, positions: Sequence[int] | None = None) -> list[StreamedWeight]:
        """Return the weights of a stage, in memory of their own."""
        names = self.program.stages[stage].weights
        chosen = names if positions is None else [names[position] for position in positions]
        wanted = None if positions is None else list(positions)
        return self._weights("fetch", chosen, {"stage": stage, "positions": wanted})

    def stream(self, names: Sequence[str]) -> list[StreamedWeight]:
        """Return weights by name, in memory of their own."""
        return self._weights("stream", names, {"names": list(names)})

    def _weights(
        self, method: str, names: Sequence[str], arguments: Mapping[str, Any]
    ) -> list[StreamedWeight]:
        specs = [self.program.weights[name] for name in names]
        most = sum(_most_bytes(spec) for spec in specs)
        return self._ask(
            method, lambda response: responses.weights_of(response, specs), most, **arguments
        )

    def receive(self, stage: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Send the gradients of one stage to the store (`DramStore.receive`)."""
        held = self.program.stages[stage].weights
        names = [name for name in held if self.program.weights[name].trainable]
        arrays = {
            name: bytes_of(gradient)
            for name, gradient in zip(names, gradients, strict=True)
            if gradient is not None
        }
        self._ask_all("receive", responses.nothing, arrays, stage=stage, names=names)

    def commit(self) -> Commit:
        """Decide the step by this shard's gradients alone (`DramStore.commit`)."""
        return commit_by(self._rule, self)

    def prepare(self) -> GradientReport:
        """Return the report on the step's gradients; the shard is then ready for the decision."""
        return _first(
            self._ask_all("prepare", lambda response: responses.report(response, self.program))
        )

    def decide(self, decision: Decision) -> None:
        """Commit the step by the decision for all shards (`DramStore.decide`)."""
        masks = bytes_of_masks(decision)
        self._ask_all(
            "decide",
            lambda response: responses.at(response, decision.step),
            {} if masks is None else {"masks": masks},
            **body_of_decision(decision),
        )

    def mask(self, name: str) -> PackedIndex:
        """Return the mask of a sparse weight, after any pending update."""
        spec = self.program.weights[name]

        def read(response: Response) -> PackedIndex:
            kept = response.get("kept", lambda kept: type(kept) is int and kept >= 0)
            return responses.mask(response, "mask", spec, kept)

        return self._ask("mask", read, _most_bytes(spec), name=name)

    def histograms(self, selections: Sequence[OpenSelection]) -> list[Histogram]:
        """Return the histogram of the shard's entries for each undecided selection."""
        arrays = {"selections": bytes_of_open_selections(selections)}
        held = self.program.weights  # a weight may lie in other shards alone
        elements = [held[s.weight].elements if s.weight in held else 0 for s in selections]

        def read(response: Response) -> list[Histogram]:
            return responses.histograms(response, elements)

        most = MOST_HISTOGRAM_BYTES * len(selections)
        return _first(self._ask_all("histograms", read, arrays, most))

    def settle(self, name: str, grow: Selection) -> None:
        """Do nothing: the shard selects the entries that it grows when the step is decided."""

    def discard(self) -> None:
        """Drop the gradients received since the last commit."""
        self._ask_all("discard", responses.nothing)

    def flush(self) -> None:
        """Finish all pending updates now."""
        self._ask_all("flush", responses.nothing)

    def unchanged(self) -> tuple[str, ...]:
        """Return the trainable weights that no update has changed (`DramStore.unchanged`)."""
        return self._ask("unchanged", lambda response: responses.unchanged(response, self.program))

    def take_traffic(self) -> Traffic:
        """Return the bytes streamed and received and the seconds waited, since the last call."""
        results = self._ask_all("take_traffic", responses.traffic).values()
        return Traffic(
            sum(each.streamed_bytes for each in results),
            sum(each.gradient_bytes for each in results),
            max(each.update_seconds for each in results),
            max(each.snapshot_seconds for each in results),
        )

    def take_flash_traffic(self) -> FlashTraffic:
        """Return the bytes moved to and from flash and the seconds waited, since the last call."""
        results = self._ask_all("take_flash_traffic", responses.flash_traffic).values()
        return FlashTraffic(
            sum(each.read_bytes for each in results),
            sum(each.written_bytes for each in results),
            max(each.waited_seconds for each in results),
            sum(each.speculated_bytes for each in results),
            sum(each.discarded_bytes for each in results),
        )

    # Inspecting and restoring the state

    def roles(self, name: str) -> dict[str, Stored]:
        """Return what is stored of a weight: its master, then its state."""
        spec = self.program.weights[name]
        if name not in self._roles or spec.is_sparse:  # those of dense weights never change
            self._roles[name] = self._ask(
                "roles", lambda response: responses.roles(response, spec), name=name
            )
        return dict(self._roles[name])

    def master(self, name: str) -> torch.Tensor:
        """Return a copy of a weight, float32 in its shape."""
        spec = self.program.weights[name]
        return torch.from_numpy(self.read(name, MASTER, 0, spec.elements)).view(spec.shape)

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """Return copies of the optimizer's state of a weight by role, in the saved format."""
        return {
            role: torch.from_numpy(self.read(name, role, 0, math.prod(kind.shape))).view(kind.shape)
            for role, kind in self.roles(name).items()
            if role not in (MASTER, VALUES, INDEX, CHANGES)
        }

    def read(self, name: str, role: str, begin: int, end: int) -> np.ndarray:
        """Return values `begin` to `end` of a weight or of its state, flat."""
        kind = torch.float32 if holds_weight(role) else self.roles(name)[role].dtype
        most = kind.itemsize * max(0, end - begin)
        where = {"name": name, "role": role, "begin": begin, "end": end}
        return self._ask(
            "read", lambda response: responses.values_of(response, kind, end - begin), most, **where
        )

    def begin_restore(self) -> None:
        """Drop all state; the store is unusable until `finish_restore`."""
        self._ask_all("begin_restore", responses.nothing)

    def write(self, name: str, role: str, begin: int, values: np.ndarray) -> None:
        """Overwrite values of a weight or of its state, while restoring."""
        most = max(1, WRITE_BYTES // values.itemsize)
        for first in range(0, values.size, most):  # the server has memory for one part at a time
            part = values[first : first + most]
            where: dict[str, Any] = {"name": name, "role": role, "begin": begin + first}
            self._ask_all("write", responses.nothing, {"values": part}, **where)

    def clear_state(self, name: str) -> None:
        """Set the optimizer's state of a weight to zero, while restoring."""
        self._ask_all("clear_state", responses.nothing, name=name)

    def finish_restore(self, step: int, updates: int | None = None) -> None:
        """Make the store usable: all weights and state are as after `step` commits, of which
        `updates` have updated weights."""
        arguments = {"step": step} if updates is None else {"step": step, "updates": updates}
        self._ask_all(
            "finish_restore", lambda response: responses.at(response, step), {}, **arguments
        )

    def content_hash(self) -> str:
        """Return a hash of the shard's part of all weights."""
        return self._ask("content_hash", responses.content_hash)


def _most_bytes(weight: WeightSpec) -> int:
    """Return the most bytes of a weight that is streamed, whatever its mask."""
    if not weight.is_sparse:
        return weight.stream_bytes
    elements = weight.elements
    return elements * weight.stream_dtype.itemsize + max_compact_bytes(elements, elements)


def _first(results: Mapping[int, T]) -> T:
    """Return the result of the first node; the results of replicas are equal."""
    return next(iter(results.values()))

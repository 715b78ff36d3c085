"""The store of a shard in another process, as the trainer's process sees it.

Every method of the store's interface is a call (`calls.py`) that the shard's process answers, in
the order in which they were made, beside the steps (`store_calls.py`). What goes this way is what
the trainer itself does with a store: filling it, saving, evaluating, looking. A step's weights and
gradients go between shards and engines and never through here.

A shard with a replica is held by two nodes: what changes it goes to both, what is read comes from
one. As long as one is left, the loss of the other is no error here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from penstock.cluster.calls import WRITE_BYTES, Asked, Calls, Said, ShardLostError
from penstock.cluster.shard_work import commit_of, report_of
from penstock.cluster.store_calls import bytes_of
from penstock.errors import ClusterError
from penstock.store import (
    Commit,
    FlashTraffic,
    GradientReport,
    Holding,
    Traffic,
    global_norm,
)
from penstock.store.incoming import fill
from penstock.store.roles import MASTER, Stored

# These are asked between two steps. They have the same sense for whoever comes in a lost shard's
# place, and the next step finds out at which step that stands.
_BETWEEN_STEPS = frozenset({"remember", "take_traffic", "take_flash_traffic", "status"})

_TYPES = {"float32": torch.float32, "uint8": torch.uint8}
_WIDEST = 4  # bytes of a value


class RemoteShard:
    """One shard's store, on flash or in memory; see `DramStore` for what each method does.

    Args:
        program: what the shard holds.
        calls: asks nodes.
        nodes: returns those that hold the shard now.
        await_node: returns when one does; raises if none can.
        copy: gives the second node all that the first holds.
        replicas: how many nodes there are when none is lost.
    """

    def __init__(
        self,
        program: Holding,
        calls: Calls,
        *,
        nodes: Callable[[], Sequence[int]],
        await_node: Callable[[], None],
        copy: Callable[[int, int], None],
        replicas: int,
    ) -> None:
        self.program = program
        self.step = 0  # as the shard has last said
        self.memory_bytes: Mapping[str, int] = {}
        self.flash_bytes = 0
        self.flash_rule = FlashTraffic()
        self._calls, self._nodes, self._await_node, self._copy = calls, nodes, await_node, copy
        self._replicas = replicas
        self._is_open = False

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of what there is of every weight, by name."""
        return {name: spec.shape for name, spec in self.program.weights.items()}

    def _ask(self, method: str, most: int = 0, **arguments: Any) -> Said:
        """Return what one of the nodes answers; another, if that one is lost meanwhile."""
        while True:
            lost = None
            for node in self._nodes():
                try:
                    return self._heard(self._calls.ask(node, method, arguments, {}, most))
                except ShardLostError as error:
                    lost = error
            self._require_another(method, lost)

    def _tell(
        self, method: str, arrays: Mapping[str, np.ndarray] | None = None, **arguments: Any
    ) -> dict[int, Said]:
        """Return what the nodes answer, all at once, but for those that are lost meanwhile."""
        while True:
            nodes = self._nodes()
            asked = [self._calls.begin(node, method, arguments, arrays or {}) for node in nodes]
            answers, lost = _answers(asked)
            if answers:
                for answer in answers.values():
                    self._heard(answer)
                return answers
            self._require_another(method, lost)

    def _require_another(self, method: str, lost: ShardLostError | None) -> None:
        if method not in _BETWEEN_STEPS:
            raise lost or ShardLostError(
                f"{self.program.name} was lost; give the same command again, the run goes on from "
                "the last step that is safe"
            )
        self._await_node()

    def _heard(self, answer: Said) -> Said:
        step = answer.body.get("step")
        if isinstance(step, int):
            self.step = step
        return answer

    def open(self) -> RemoteShard:
        """Have the shard's processes open their stores, new or as they were left.

        A replica that holds nothing of what the other holds is given a copy.
        """
        answers = self._tell("open")
        found = next(iter(answers.values())).body
        self.memory_bytes = {
            str(k): self._replicas * int(v) for k, v in found["memory_bytes"].items()
        }
        self.flash_bytes = self._replicas * int(found["flash_bytes"])
        read, written = found["flash_rule"]
        self.flash_rule = FlashTraffic(self._replicas * int(read), self._replicas * int(written))
        self._is_open = True
        whole = [node for node, said in answers.items() if not said.body["is_new"]]
        for node in answers.keys() - {*whole} if whole else ():
            self._copy(whole[0], node)
        return self

    def close(self) -> None:
        """Have it let go of its files; one that is gone has done so."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._tell("close")
        except ShardLostError:
            return

    # On flash

    @property
    def is_new(self) -> bool:
        """Whether it holds no durable step yet."""
        return bool(self._ask("status").body["is_new"])

    @property
    def durable_step(self) -> int | None:
        """The step that would be found after a crash now; None before the first."""
        step = self._ask("status").body["durable_step"]
        return None if step is None else int(step)

    @property
    def extra(self) -> Mapping[str, Any]:
        """What was kept with the present step."""
        return dict(self._ask("status").body["extra"])

    def make_durable(self) -> None:
        """Return when the present step would be found after a crash."""
        self._tell("make_durable")

    def page_lock(self) -> bool:
        """Nothing streams from here to a GPU: engines have buffers of their own."""
        return True

    def remember(self, extra: Mapping[str, Any]) -> None:
        """Keep plain data with the present step."""
        self._tell("remember", extra=dict(extra))

    # Weights out and in

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill all masters, one weight at a time (`DramStore.load`)."""
        fill(self, weights)

    def fetch(self, stage: int, positions: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Return the weights of a stage, in memory of their own."""
        names = self.program.stages[stage].weights
        chosen = names if positions is None else [names[position] for position in positions]
        wanted, most = None if positions is None else list(positions), self._streams(chosen)
        return self._tensors(chosen, self._ask("fetch", most, stage=stage, positions=wanted))

    def stream(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return weights by name, in memory of their own."""
        most = self._streams(names)
        return self._tensors(names, self._ask("stream", most, names=list(names)))

    def _streams(self, names: Sequence[str]) -> int:
        return sum(self.program.weights[name].stream_bytes for name in names)

    def _tensors(self, names: Sequence[str], answer: Said) -> list[torch.Tensor]:
        tensors = []
        for number, name in enumerate(names):
            spec, array = self.program.weights[name], answer.arrays[str(number)]
            if spec.stream_dtype is torch.bfloat16:
                tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            else:
                tensor = torch.from_numpy(array)
            tensors.append(tensor.view(spec.shape))
        return tensors

    def receive(self, stage: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of one stage (`DramStore.receive`)."""
        held = self.program.stages[stage].weights
        names = [name for name in held if self.program.weights[name].trainable]
        arrays = {
            name: bytes_of(gradient)
            for name, gradient in zip(names, gradients, strict=True)
            if gradient is not None
        }
        self._tell("receive", arrays, stage=stage, names=names)

    def commit(self) -> Commit:
        """Decide the step by this shard's gradients alone (`DramStore.commit`)."""
        return self.decide(global_norm(self.program, self.step + 1, self.prepare()))

    def prepare(self) -> GradientReport:
        """Return what is known of the step's gradients; the shard is then ready to decide."""
        return report_of(_first(self._tell("prepare")))

    def decide(self, norm: float) -> Commit:
        """Commit the step with the global norm of all shards."""
        return commit_of(_first(self._tell("decide", norm=norm.hex())))

    def discard(self) -> None:
        """Throw away the gradients that came since the last commit."""
        self._tell("discard")

    def flush(self) -> None:
        """Make all updates that are still awaited, now."""
        self._tell("flush")

    def unchanged(self) -> dict[str, str]:
        """Return the trainable weights that no update has changed (`DramStore.unchanged`)."""
        return {str(k): str(v) for k, v in self._ask("unchanged").body["unchanged"].items()}

    def take_traffic(self) -> Traffic:
        """Return what was streamed, received and waited for, since the last call."""
        taken = [answer.body for answer in self._tell("take_traffic").values()]
        return Traffic(
            sum(int(said["bytes"][0]) for said in taken),
            sum(int(said["bytes"][1]) for said in taken),
            max(float(said["seconds"][0]) for said in taken),
            max(float(said["seconds"][1]) for said in taken),
        )

    def take_flash_traffic(self) -> FlashTraffic:
        """Return what moved to and from flash, since the last call."""
        taken = [answer.body for answer in self._tell("take_flash_traffic").values()]
        return FlashTraffic(
            sum(int(said["moved"][0]) for said in taken),
            sum(int(said["moved"][1]) for said in taken),
            max(float(said["seconds"]) for said in taken),
        )

    # Looking at the state, and restoring it

    def roles(self, name: str) -> dict[str, Stored]:
        """Return what there is of a weight: its master, then its state."""
        found = self._ask("roles", name=name).body["roles"]
        return {
            str(role): Stored(_type_of(kind), tuple(map(int, shape)))
            for role, (kind, shape) in found.items()
        }

    def master(self, name: str) -> torch.Tensor:
        """Return a copy of a weight, float32 in its shape."""
        spec = self.program.weights[name]
        return torch.from_numpy(self.read(name, MASTER, 0, spec.elements)).view(spec.shape)

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """Return copies of the optimizer's state of a weight by role, as they would be saved."""
        return {
            role: torch.from_numpy(self.read(name, role, 0, math.prod(kind.shape))).view(kind.shape)
            for role, kind in self.roles(name).items()
            if role != MASTER
        }

    def read(self, name: str, role: str, begin: int, end: int) -> np.ndarray:
        """Return values `begin` to `end` of a weight or of its state, flat."""
        most = _WIDEST * max(0, end - begin)
        return self._ask("read", most, name=name, role=role, begin=begin, end=end).arrays["values"]

    def begin_restore(self) -> None:
        """Forget everything; the store is of no use until `finish_restore`."""
        self._tell("begin_restore")

    def write(self, name: str, role: str, begin: int, values: np.ndarray) -> None:
        """Overwrite values of a weight or of its state, while restoring."""
        most = max(1, WRITE_BYTES // values.itemsize)
        for first in range(0, values.size, most):  # the other side has memory for one at a time
            part = values[first : first + most]
            self._tell("write", {"values": part}, name=name, role=role, begin=begin + first)

    def clear_state(self, name: str) -> None:
        """Put the optimizer's state of a weight to zero, while restoring."""
        self._tell("clear_state", name=name)

    def finish_restore(self, step: int) -> None:
        """Make the store usable: all weights and state are those after `step` commits."""
        self._tell("finish_restore", step=step)

    def content_hash(self) -> str:
        """Return a hash of what the shard holds of all weights."""
        return str(self._ask("content_hash").body["hash"])


def _type_of(name: str) -> torch.dtype:
    try:
        return _TYPES[name]
    except KeyError:
        raise ClusterError(f"a shard holds values of type {name!r}, which is not known") from None


def _answers(asked: Sequence[Asked]) -> tuple[dict[int, Said], ShardLostError | None]:
    """Return what was answered, by node, and the loss of one that has not."""
    answers: dict[int, Said] = {}
    lost = None
    for each in asked:
        try:
            answers[each.node] = each.answer()
        except ShardLostError as error:
            lost = error
    return answers, lost


def _first(answers: Mapping[int, Said]) -> Mapping[str, Any]:
    """Return what the first node has said; the others do the same, and say so."""
    return next(iter(answers.values())).body

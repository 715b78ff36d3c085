"""Cut a captured graph into stages.

Natural boundaries come first: the children of repeated containers (`transformer.h.0`, `.1`, ...),
from the module path of every node. If a model has none, or a stage is too large for the engine's
slot, cuts are placed where the fewest bytes of activations are alive. Cuts within a stage that is
too large must also keep the order of gradient sums (`_Sums`), so that the size of slots does not
change any bit.
"""

import functools
import itertools
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from penstock.compiler.tensors import may_need_gradient
from penstock.errors import BudgetError

# Without containers, stages of about an eighth of the model keep the engine's slots small.
_PARTS_WITHOUT_CONTAINERS = 8


@dataclass(frozen=True)
class CutPiece:
    """The nodes of one stage, in order, and a display name."""

    name: str
    nodes: tuple[fx.Node, ...]


def node_bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(v.numel() * v.element_size() for v in value if isinstance(v, torch.Tensor))
    return 0


def weight_free_nodes(graph: fx.Graph, weights: set[fx.Node], key: fx.Node) -> set[fx.Node]:
    """Return the computing nodes that depend on no weight and no dropout: the prelude."""
    bound = {*weights, key}
    free: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if any(n in bound for n in node.all_input_nodes):
            bound.add(node)
        else:
            free.add(node)
    return free


def cut(
    nodes: Sequence[fx.Node],
    module: nn.Module,
    weights: Mapping[fx.Node, int],
    slot_bytes: int | None = None,
) -> list[CutPiece]:
    """Divide `nodes` (prelude and placeholders set aside) into consecutive pieces.

    **Arguments:** `weights` maps weight placeholders to their stream bytes; `slot_bytes` is the
    maximum size of a stage.

    **Raises:** `BudgetError` naming the stage that cannot be cut small enough.
    """
    containers = _containers(module)
    pieces = _by_container(nodes, containers)
    if len(pieces) == 1:
        total = sum(weights.values())
        largest = max((_weight_bytes([n], weights) for n in nodes), default=0)
        limit = max(largest, total // _PARTS_WITHOUT_CONTAINERS)
        pieces = _split(pieces[0], weights, limit)
    if slot_bytes is not None:
        pieces = [part for piece in pieces for part in _fit(piece, weights, slot_bytes)]
    return pieces


def _containers(module: nn.Module) -> list[str]:
    """Return the paths of the outermost modules with numbered children that own parameters."""
    found: list[str] = []
    for path, child in module.named_modules():
        if any(path.startswith(f"{outer}.") for outer in found):
            continue
        numbered = [name for name, _ in child.named_children() if name.isdigit()]
        owning = [n for n in numbered if any(True for _ in child.get_submodule(n).parameters())]
        if len(owning) >= 2 and len(numbered) == len(list(child.children())):
            found.append(path)
    return found


def _by_container(nodes: Sequence[fx.Node], containers: Sequence[str]) -> list[CutPiece]:
    blocks = _block_of(nodes, containers)
    pieces: list[CutPiece] = []
    current: list[fx.Node] = []
    name, block = "embed", None
    last_seen = max((i for i, b in enumerate(blocks) if b is not None), default=-1)
    for position, (node, here) in enumerate(zip(nodes, blocks, strict=True)):
        starts_head = block is not None and here is None and position > last_seen
        starts_block = here is not None and here != block
        if (starts_block or starts_head) and not _belongs_before(node, current):
            if current and not (block is None and not _reads_weight(current)):
                pieces.append(CutPiece(name, tuple(current)))
                current = []
            block = here
            name = here or "head"
        current.append(node)
    if not pieces and block is None:
        name = "model"
    if current:
        pieces.append(CutPiece(name, tuple(current)))
    return pieces


def _block_of(nodes: Sequence[fx.Node], containers: Sequence[str]) -> list[str | None]:
    """Return, per node, the module path of its numbered block, or None."""
    patterns = [
        (re.compile(rf"^{re.escape(path)}\.(\d+)(@\d+)?($|\.)" if path else r"^(\d+)(@\d+)?($|\.)"))
        for path in containers
    ]
    with_weights = {
        match.group(0).rstrip(".")
        for node in nodes
        if any(n.op == "placeholder" for n in node.all_input_nodes)
        for path in _paths(node)
        for pattern in patterns
        if (match := pattern.match(path))
    }
    blocks: list[str | None] = []
    for node in nodes:
        found = None
        for path in _paths(node):
            for pattern in patterns:
                match = pattern.match(path)
                if match and match.group(0).rstrip(".") in with_weights:
                    found = match.group(0).rstrip(".")
        blocks.append(found)
    return blocks


def _paths(node: fx.Node) -> list[str]:
    stack = node.meta.get("nn_module_stack") or {}
    return [str(path) for path, _ in stack.values()]


def _belongs_before(node: fx.Node, current: Sequence[fx.Node]) -> bool:
    """A part of a multi-output operator stays with the operator."""
    return bool(current) and node.target.__name__ == "getitem" and node.args[0] in current  # type: ignore[union-attr]


def _reads_weight(nodes: Sequence[fx.Node]) -> bool:
    return any(n.op == "placeholder" for node in nodes for n in node.all_input_nodes)


def _fit(piece: CutPiece, weights: Mapping[fx.Node, int], slot_bytes: int) -> list[CutPiece]:
    if _weight_bytes(piece.nodes, weights) <= slot_bytes:
        return [piece]
    parts = _split_in_order(piece, weights, slot_bytes) or _split(piece, weights, slot_bytes)
    for part in parts:
        need = _weight_bytes(part.nodes, weights)
        if need > slot_bytes:
            raise BudgetError(
                f"stage {part.name} needs {need:,} bytes of weights at once and cannot be cut "
                f"further; a slot holds {slot_bytes:,}. Raise engine.memory."
            )
    return parts


def _weight_bytes(nodes: Sequence[fx.Node], weights: Mapping[fx.Node, int]) -> int:
    used = {n for node in nodes for n in node.all_input_nodes if n in weights}
    return sum(weights[n] for n in used)


def _split(piece: CutPiece, weights: Mapping[fx.Node, int], limit: int) -> list[CutPiece]:
    """Cut a piece into parts of at most `limit` weight bytes; each cut is where the fewest bytes
    are alive."""
    nodes = _sink_weight_nodes(piece.nodes, weights)
    live = _live_bytes(nodes)
    cuts: list[int] = []
    start = 0
    while _weight_bytes(nodes[start:], weights) > limit:
        end = start + 1
        while _weight_bytes(nodes[start : end + 1], weights) <= limit:
            end += 1
        # After the first use of a weight (an earlier cut gains nothing) and not within a
        # multi-output op.
        first = next((i for i in range(start, end) if _reads_weight([nodes[i]])), start)
        allowed = [
            i
            for i in range(first + 1, end + 1)
            if i < len(nodes) and not _belongs_before(nodes[i], nodes[:i])
        ]
        if not allowed:
            break
        best = min(allowed, key=lambda i: (live[i], -i))
        cuts.append(best)
        start = best
    if not cuts:
        return [piece]
    return _parts(piece.name, nodes, cuts)


def _parts(name: str, nodes: Sequence[fx.Node], cuts: Sequence[int]) -> list[CutPiece]:
    bounds = [0, *cuts, len(nodes)]
    return [
        CutPiece(f"{name}.{number}", tuple(nodes[a:b]))
        for number, (a, b) in enumerate(itertools.pairwise(bounds))
    ]


def _split_in_order(
    piece: CutPiece, weights: Mapping[fx.Node, int], limit: int
) -> list[CutPiece] | None:
    """Cut a piece so that the fewest sums change their order, and among these, the fewest bytes are
    alive.

    Returns None if a part cannot be as small as `limit`.
    """
    nodes = _sink_weight_nodes(piece.nodes, weights)
    live, sums = _live_bytes(nodes), _Sums(nodes, weights)
    within = [_belongs_before(node, nodes[:i]) for i, node in enumerate(nodes)]
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}  # by end: the cuts before it
    for start in range(len(nodes)):
        if start not in best:
            continue
        changed, alive, cuts = best[start]
        held: set[fx.Node] = set()
        for at in range(start + 1, len(nodes) + 1):
            held.update(n for n in nodes[at - 1].all_input_nodes if n in weights)
            if sum(weights[n] for n in held) > limit:
                break
            if not held or (at < len(nodes) and within[at]):
                continue
            cost = (
                changed + sums.changed(start, at),
                alive + (live[at] if at < len(nodes) else 0),
                [*cuts, at],
            )
            best[at] = min(best.get(at, cost), cost)
    if len(nodes) not in best:
        return None
    return _parts(piece.name, nodes, best[len(nodes)][2][:-1])


class _Sums:
    """Counts the sums of gradients whose order would change if a stage were cut.

    Autograd adds the contributions of a value's readers to its gradient one by one, from the last
    reader to the first. For a value from another part, a part returns the sum of its own readers,
    and the parts' sums are added from the last to the first. A part may therefore contain at most
    one such reader, unless the sum begins in that part. A weight's gradients are summed over
    micro-batches per part, so all its readers stay in one part.
    """

    def __init__(self, nodes: Sequence[fx.Node], weights: Mapping[fx.Node, int]) -> None:
        self._weights = weights
        self._made = {node: place for place, node in enumerate(nodes)}
        readers: dict[fx.Node, list[int]] = {}

        def note(place: int, read: fx.Node) -> fx.Node:
            value = read.meta.get("val")
            if not isinstance(value, torch.Tensor) or may_need_gradient(value):
                readers.setdefault(read, []).append(place)
            return read

        for place, node in enumerate(nodes):
            fx.node.map_arg((node.args, node.kwargs), functools.partial(note, place))
        self._readers = {node: places for node, places in readers.items() if len(places) > 1}
        self._read_later = {
            node
            for node in self._readers
            if any(user not in self._made and user.op != "output" for user in node.users)
        }

    def changed(self, start: int, at: int) -> int:
        """Return the number of sums whose order a part from `start` to before `at` changes."""
        return sum(self._changes(node, start, at) for node in self._readers)

    def _changes(self, node: fx.Node, start: int, at: int) -> bool:
        here = sum(start <= place < at for place in self._readers[node])
        after = sum(place >= at for place in self._readers[node])
        later = node in self._read_later
        if node in self._weights:
            return here > 0 and after > 0
        if node in self._made:
            return self._made[node] < start and here > 1 and (later or after > 0)
        return here > 0 and after > 0 if later else here > 1 and after > 0


def _sink_weight_nodes(nodes: Sequence[fx.Node], weights: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Move nodes that depend on weights alone (a transpose) to their first user.

    Otherwise a cut could separate them, and a stage would only pass a weight on as a value.
    """
    of_weights: set[fx.Node] = set()
    for node in nodes:
        sources = node.all_input_nodes
        if sources and all(n in weights or n in of_weights for n in sources):
            of_weights.add(node)
    inside = set(nodes)
    ordered: list[fx.Node] = []
    placed: set[fx.Node] = set()

    def place(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source in of_weights and source not in placed:
                place(source)
        if node in placed:
            return
        placed.add(node)
        ordered.append(node)
        for user in node.users:  # the results of one operator stay together
            if user.target is operator.getitem and user in inside and user not in placed:
                place(user)

    for node in nodes:
        used_here = any(user in inside for user in node.users)
        if node not in placed and not (node in of_weights and used_here):
            place(node)
    return ordered


def _live_bytes(nodes: Sequence[fx.Node]) -> list[int]:
    """Return, per position, the bytes of values made before it and read at or after it.

    A view counts as its base and has no bytes of its own.
    """
    place = {node: i for i, node in enumerate(nodes)}
    base: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        base[node] = base.get(node.all_input_nodes[0], node) if _is_view(node) else node
        end = max((place.get(user, len(nodes) - 1) for user in node.users), default=i)
        last[base[node]] = max(last.get(base[node], 0), end)
    change = [0] * (len(nodes) + 1)
    for node, end in last.items():
        change[place[node] + 1] += node_bytes(node)
        change[end + 1] -= node_bytes(node)
    return list(itertools.accumulate(change[: len(nodes)]))


def _is_view(node: fx.Node) -> bool:
    target = node.target
    if target is operator.getitem:
        return True
    return isinstance(target, torch._ops.OpOverload) and any(
        a.alias_info is not None for a in target._schema.arguments
    )

"""The routes of a view: the nodes to which a node sends weights, credit and gradients.

A view without relays has the trees over engines (`tree_topology.py`); a view with relays has trees
of relays, in which engines are leaves (`relay_topology.py`). The chunks of an operation alternate
between the trees, and begin with another tree than those of the operation before: `Position.lane`.
Credit for a shard takes one tree only.

Sums are fixed by the tree over micro-batches, not by the routes: a node adds whatever nodes of that
tree it has received. So the routes change no bit of a result.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.distributed.protocol.membership_view import MembershipView
from penstock.distributed.protocol.relay_topology import RelayTrees, relay_connections
from penstock.distributed.protocol.tree_topology import (
    children,
    parent,
    root,
    summing,
    tree_connections,
)

_ENGINE_LANES = 2  # trees of a shard without relays: its two halves of engines change roles


@dataclass(frozen=True)
class Position:
    """One node's position in the trees of a view, whose nodes are named by their numbers.

    `child_nodes` are by shard and tree, and have a key for every chunk that the node may receive.
    `credit_children` send credit to this node, and `credit_parents` receive it, both by shard.
    `own_targets` receive an engine's own gradients, by tree, and `target` receives the sums of the
    engines at the positions `adds`; None stands for the shards.
    """

    lanes: int
    child_nodes: Mapping[tuple[int, int], Sequence[int]]
    credit_children: Mapping[int, Sequence[int]]
    credit_parents: Mapping[int, int]
    own_targets: Sequence[int | None]
    adds: range
    target: int | None

    def lane(self, operation: int, chunk: int) -> int:
        """Return the tree of a chunk of weights or gradients."""
        return (operation + chunk) % self.lanes


NOWHERE = Position(1, {}, {}, {}, (), range(0), None)
"""The position of a node that is in no tree."""


def position_of(view: MembershipView, node: int) -> Position:
    """Return the position of an engine or a relay of a view, given its node number."""
    if node in view.relays:
        return _relay_position(view, view.relays.index(node))
    position = view.engines.index(node)
    if view.relays:
        return _leaf_position(view, position)
    return _inner_position(view, position)


def first_node(view: MembershipView, shard: int, operation: int, chunk: int) -> int:
    """Return the node to which a shard sends a chunk of weights."""
    if view.relays:
        trees = RelayTrees.of(len(view.engines), len(view.relays))
        return view.relays[trees.root((operation + chunk) % trees.lanes)]
    lane = (operation + chunk) % _ENGINE_LANES
    return view.engines[root(shard, lane, len(view.shards), len(view.engines))]


def relays_in_trees(view: MembershipView) -> Sequence[int]:
    """Return the relays of a view that carry anything; the others wait for the loss of one."""
    if not view.relays:
        return ()
    return view.relays[: RelayTrees.of(len(view.engines), len(view.relays)).relays]


def connections(engines: int, shards: int, relays: int = 0) -> set[tuple[int, int]]:
    """Return the connections of one view as pairs: engines by position, shard k as -1 - k, and
    relays behind the engines.

    A node with another position in an earlier view may have more connections.
    """
    if relays:
        return relay_connections(RelayTrees.of(engines, relays), shards)
    return tree_connections(engines, shards)


def _inner_position(view: MembershipView, position: int) -> Position:
    """Return the position of an engine in the trees over engines."""
    engines, shards = view.engines, len(view.shards)
    child_nodes, parents = {}, {}
    for shard, lane in itertools.product(range(shards), range(_ENGINE_LANES)):
        begin = root(shard, lane, shards, len(engines))
        nodes = [engines[child] for child in children(position, begin, len(engines))]
        child_nodes[shard, lane] = nodes
    for shard, holders in enumerate(view.shards):
        over = parent(position, root(shard, 0, shards, len(engines)), len(engines))
        parents[shard] = holders[0] if over is None else engines[over]
    part = summing(len(engines))[position]

    def node_at(place: int | None) -> int | None:
        return None if place is None else engines[place]

    return Position(
        _ENGINE_LANES,
        child_nodes,
        {shard: child_nodes[shard, 0] for shard in range(shards)},
        parents,
        [node_at(part.own_target)] * _ENGINE_LANES,
        range(part.begin, part.end),
        node_at(part.target),
    )


def _leaf_position(view: MembershipView, position: int) -> Position:
    """Return the position of an engine in the trees of relays."""
    trees, shards = RelayTrees.of(len(view.engines), len(view.relays)), range(len(view.shards))
    over = [view.relays[trees.relay_of(position, lane)] for lane in range(trees.lanes)]
    return Position(
        trees.lanes,
        dict.fromkeys(itertools.product(shards, range(trees.lanes)), ()),
        dict.fromkeys(shards, ()),
        {shard: over[shard % trees.lanes] for shard in shards},
        over,
        range(0),
        None,
    )


def _relay_position(view: MembershipView, position: int) -> Position:
    """Return the position of a relay; a relay that is not needed is in no tree."""
    trees, shards = RelayTrees.of(len(view.engines), len(view.relays)), range(len(view.shards))
    lane = trees.lane_of(position)
    if lane is None:
        return NOWHERE
    above = trees.parent(position)
    below = [view.relays[child] for child in trees.child_relays(position)]
    below += [view.engines[child] for child in trees.child_engines(position)]
    credited = [shard for shard in shards if shard % trees.lanes == lane]
    target = None if above is None else view.relays[above]
    return Position(
        trees.lanes,
        {(shard, lane): below for shard in shards},
        dict.fromkeys(credited, below),
        {shard: view.shards[shard][0] if target is None else target for shard in credited},
        (),
        trees.engines_of(position),
        target,
    )

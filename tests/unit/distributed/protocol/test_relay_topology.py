"""Trees of relays: who hands what to whom, and how much it carries, for any number of nodes."""

from __future__ import annotations

import pytest

from penstock.distributed.protocol.membership_view import MembershipView
from penstock.distributed.protocol.relay_topology import RelayTrees, enough_relays
from penstock.distributed.protocol.routes import connections, first_node, position_of
from penstock.errors import ProtocolError

ENGINES = [1, 2, 3, 5, 8, 9, 16, 31, 64, 192]
RELAYS = [1, 2, 3, 7, 17, 28, 224, 300]


def all_trees():
    return [(n, r, RelayTrees.of(n, r)) for n in ENGINES for r in RELAYS]


@pytest.mark.parametrize(("engines", "relays", "trees"), all_trees())
def test_every_tree_reaches_every_engine_once(engines, relays, trees):
    assert 1 <= trees.relays <= relays
    for lane in range(trees.lanes):
        assert trees.parent(trees.root(lane)) is None
        waiting, reached = [trees.root(lane)], []
        for relay in waiting:
            assert trees.lane_of(relay) == lane
            below = [*trees.child_relays(relay)]
            for child in below:
                assert trees.parent(child) == relay
            own = [*trees.child_engines(relay)]
            assert 1 <= len(below) + len(own) <= trees.fan_out
            assert all(trees.relay_of(engine, lane) == relay for engine in own)
            under = [*own, *(e for child in below for e in trees.engines_of(child))]
            assert sorted(under) == [*trees.engines_of(relay)]
            waiting += below
            reached += own
        assert sorted(reached) == list(range(engines))
        assert len(waiting) == sum(trees.levels)
    assert all(trees.lane_of(relay) is None for relay in range(trees.relays, relays))


@pytest.mark.parametrize(("engines", "relays", "trees"), all_trees())
def test_sums_of_relays_are_subtrees_of_micro_batches(engines, relays, trees):
    for relay in range(trees.relays):
        summed = trees.engines_of(relay)
        width = 1 << (len(summed) - 1).bit_length()
        assert summed.start % width == 0
        assert summed.stop == min(summed.start + width, engines)


@pytest.mark.parametrize("engines", [*range(2, 66), 128, 192, 500, 1024])
def test_enough_relays_keep_up_with_busy_engines(engines):
    enough = enough_relays(engines)
    trees = RelayTrees.of(engines, enough)
    copies = min(trees.fan_out, engines)
    assert (copies + 1) / trees.lanes < 1  # of an engine's link, in each direction
    assert len(trees.levels) <= 4
    assert enough <= 2.2 * engines + 4


def test_one_engine_needs_no_relay():
    assert [enough_relays(engines) for engines in (1, 2, 3, 4, 192)] == [0, 4, 5, 6, 280]


@pytest.mark.parametrize(("engines", "relays"), [(1, 0), (5, 0), (5, 1), (5, 4), (20, 27)])
def test_routes_of_neighbours_agree(engines, relays):
    """Whoever sends to a node is whom that node expects, in every tree of every shard."""
    view = MembershipView(
        ((1, 3), (2, 4), (5,)),
        tuple(range(100, 100 + engines)),
        tuple(range(1000, 1000 + relays)),
    )
    nodes = {n: position_of(view, n) for n in (*view.engines, *view.relays)}
    for shard in range(3):
        for chunk in range(max(position.lanes for position in nodes.values())):
            reached, waiting = set(), [first_node(view, shard, 0, chunk)]
            for node in waiting:
                assert node not in reached
                reached.add(node)
                waiting += nodes[node].child_nodes[shard, chunk % nodes[node].lanes]
            assert reached & {*view.engines} == {*view.engines}
        over = [n for n, p in nodes.items() if p.credit_parents.get(shard) in view.shards[shard]]
        assert len(over) == 1  # one node gives the shard its credit
        for node, position in nodes.items():
            for child in position.credit_children.get(shard, ()):
                assert nodes[child].credit_parents[shard] == node
        assert all(shard in nodes[engine].credit_parents for engine in view.engines)
    assert len(connections(engines, 3, relays)) > 0


def test_view_with_relays_survives_a_message():
    view = MembershipView(((1,), (2,)), (100, 101), (1000,))
    assert MembershipView.read(view.as_body()) == view
    body = view.as_body()
    del body["relays"]
    assert MembershipView.read(body).relays == ()


@pytest.mark.parametrize("relays", [None, 3, ["a"], [True], [100]])
def test_malformed_relays_of_a_view_are_refused(relays):
    body = {"shards": [[1]], "engines": [100], "relays": relays}
    with pytest.raises(ProtocolError, match="a view"):
        MembershipView.read(body)

"""Masks that change under faults: every run has the bits of one store."""

import functools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from grids import thinned
from sparse_cluster import SparseCluster, alone
from sparse_stores import assert_same_sparse_state

from penstock.distributed.protocol import MessageType, UnrecoverableError
from penstock.distributed.rpc import bytes_of_histograms
from penstock.distributed.simulation import Faults
from penstock.distributed.simulation.faults import Rates
from penstock.errors import ProtocolError
from penstock.sparsity import Histogram
from penstock.store.mask_plan import MOST_OPEN

reference = functools.cache(alone)


def require_same(cluster, losses, policy, dtype=torch.float32):
    store, expected = reference(policy, stream_dtype=dtype, clip_norm=1.0)
    assert losses == expected
    assert_same_sparse_state(cluster.store, store)


@pytest.mark.parametrize(
    ("policy", "nodes"),
    thinned(
        ["static", "gmp", "set", "rigl", "densify"],
        [(1, 1), (2, 1), (4, 3)],
        others=pytest.mark.long,
    ),
)
def test_number_of_engines_and_shards_does_not_change_bits(policy, nodes):
    engines, shards = nodes
    cluster = SparseCluster(policy, engines, shards, clip_norm=1.0)
    require_same(cluster, cluster.train(), policy)
    requests = [m for _, _, m in cluster.sent if m.kind is MessageType.HISTOGRAM_REQUEST]
    assert bool(requests) == (policy != "static")


@pytest.mark.parametrize(
    ("policy", "engines", "shards", "relays"),
    thinned(
        ["gmp", "set", "rigl"],
        [2, 4, 3],
        [1, 2],
        [1, 3, 5],
        others=pytest.mark.long,
    ),
)
def test_relays_add_gradients_of_entries_to_the_bits_of_one_store(policy, engines, shards, relays):
    cluster = SparseCluster(policy, engines, shards, relays=relays, clip_norm=1.0)
    require_same(cluster, cluster.train(), policy)
    senders = {m.sender for _, to, m in cluster.sent if m.kind is MessageType.GRADIENT and to < 100}
    assert senders
    assert min(senders) >= 1000  # the shards receive sums of relays only


def test_relay_lost_in_a_step_that_changes_masks_changes_no_bit():
    cluster, gone = SparseCluster("rigl", 2, 2, relays=2, clip_norm=1.0), []

    def lose(sender, to, message):
        if message.kind is MessageType.GRADIENT and message.step == 3 and not gone:
            gone.append(1000)
            cluster.network.kill(1000)

    cluster.on_send = lose
    require_same(cluster, cluster.train(), "rigl")
    assert [event.kind for event in cluster.events if "lost" in event.kind] == ["relay lost"]


def test_bfloat16_run_has_the_bits_of_one_store():
    cluster = SparseCluster("rigl", 3, 2, torch.bfloat16, clip_norm=1.0)
    require_same(cluster, cluster.train(), "rigl", torch.bfloat16)


@pytest.mark.parametrize(("policy", "engines", "shards"), [("rigl", 2, 1), ("set", 3, 3)])
def test_shards_on_flash_have_the_bits_of_one_store(policy, engines, shards, tmp_path):
    """A single shard has the files of a store without shards; it is opened as such in between."""
    cluster = SparseCluster(policy, engines, shards, folder=tmp_path / "flash", clip_norm=1.0)
    losses = cluster.train(3)
    cluster.store.make_durable()
    cluster.store.close()
    cluster = SparseCluster(policy, engines, shards, folder=tmp_path / "flash", clip_norm=1.0)
    assert cluster.store.step == 3
    require_same(cluster, losses + cluster.train(), policy)
    cluster.store.close()


def test_shards_that_go_back_a_step_repeat_its_change_of_masks(tmp_path):
    """One shard has lost the step in which masks changed: both repeat it, by the masks before."""
    cluster = SparseCluster("set", 2, 2, folder=tmp_path / "flash", clip_norm=1.0)
    losses = cluster.train(2)
    cluster.store.make_durable()
    losses += cluster.train(3)
    cluster.store.make_durable()
    changed = cluster.store.mask("2.weight")
    cluster.storage[1].roll_back(2)
    cluster.coordinator._epochs.is_agreed = False  # as after the loss of a shard's node
    again = cluster.train()
    assert [event.kind for event in cluster.events if event.kind == "went back"] == ["went back"]
    assert again[0] == losses[2]
    require_same(cluster, losses + again[1:], "set")
    assert not cluster.store.mask("2.weight").same_mask(changed)
    for shard in cluster.store.shards:
        shard.close()
    cluster.store.close()


@pytest.mark.parametrize(
    "kind", [MessageType.HISTOGRAM_REQUEST, MessageType.GRADIENT, MessageType.COMMIT]
)
def test_engine_lost_in_a_step_that_changes_masks_changes_no_bit(kind):
    cluster, gone = SparseCluster("rigl", 2, 2, clip_norm=1.0), []

    def lose(sender, to, message):
        if message.kind is kind and message.step == 3 and not gone:
            gone.append(101)
            cluster.network.kill(101)
            cluster.network.after(0.05, cluster.join)

    cluster.on_send = lose
    require_same(cluster, cluster.train(), "rigl")
    assert gone
    # The replacement got every mask, although most have not changed since the others got them.
    assert {name for name, _ in cluster.engines[102].seen} == {
        name for name, spec in cluster.program.weights.items() if spec.is_sparse
    }


@pytest.mark.parametrize("policy", ["rigl", "set"])
@pytest.mark.parametrize("kind", [MessageType.HISTOGRAM_REQUEST, MessageType.HISTOGRAM_REPLY])
def test_lost_histogram_message_replays_the_step(kind, policy):
    cluster, lost = SparseCluster(policy, 2, 3, clip_norm=1.0), []

    def loses(message):
        if message.kind is kind and message.step == 3 and len(lost) < 1:
            lost.append(message)
            return True
        return False

    cluster.loses = loses
    require_same(cluster, cluster.train(), policy)
    assert lost
    assert [event.kind for event in cluster.events if event.kind == "retry"] == ["retry"]


def test_lost_histograms_of_a_shard_evict_the_shard_and_no_engine():
    """The last node of a shard is a suspect after the sixth stall."""
    cluster = SparseCluster("set", 2, 3, clip_norm=1.0)
    cluster.loses = lambda m: m.kind is MessageType.HISTOGRAM_REPLY and m.sender == 2
    with pytest.raises(UnrecoverableError, match="not answered") as raised:
        cluster.train(1)
    assert raised.value.node == 2
    assert [event.node for event in cluster.events if "lost" in event.kind] == [2]
    assert [event.kind for event in cluster.events].count("retry") == 6


@pytest.mark.parametrize("seed", range(3))
def test_lost_repeated_and_delayed_messages_change_no_bit(seed):
    faults = Faults(seed, Rates(lost=0.002, repeated=0.01, delayed=0.01), {}, until=1.0)
    cluster = SparseCluster("rigl", 3, 2, faults=faults, clip_norm=1.0)
    cluster.network.after(20.0, cluster.join)
    require_same(cluster, cluster.train(), "rigl")


def test_masks_travel_only_when_they_have_changed():
    cluster = SparseCluster("set", 1, 2, clip_norm=1.0)
    cluster.train()
    masks = sum(cluster.store.mask(n).codes.size for n in cluster.store.masks.plan.kept)
    first, still, changed = (cluster.bytes_of_weights(step) for step in (0, 2, 3))
    # Masks change at the commits of steps 1, 3 and 5, after 0, 2 and 4 commits.
    assert first - still > masks / 3
    assert changed - still > masks / 3
    assert cluster.bytes_of_weights(4) == still


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_gradients_are_those_of_the_schedule_of_the_step(dtype):
    """Masks grow by dense gradients at the commits of steps 1, 3 and 5."""
    cluster = SparseCluster("rigl", 1, 2, dtype, clip_norm=1.0)
    cluster.train()
    kept = sum(cluster.program.capacities.values())
    absent = sum(w.elements for w in cluster.program.weights.values() if w.is_sparse) - kept
    for step in range(1, 7):
        planned = sum(each.gradient_bytes for each in cluster.schedules(step).operations)
        sent = cluster.bytes_of_gradients(step - 1)
        if step in (1, 3, 5):
            assert sent == planned == cluster.plan(step).gradient_bytes
            assert planned > 4 * absent
        else:
            # A chunk without an entry has one number.
            chunks = sum(len(each.gradients) for each in cluster.plan(step).operations)
            assert planned <= sent <= planned + 4 * chunks


def test_invalid_reports_and_histograms_are_refused_when_they_arrive():
    """So that they are blamed on their sender: at the decision they would end the step."""
    cluster, refused = SparseCluster("set", 1, 2, clip_norm=1.0), Counter()
    two = Histogram(np.array([0, 1], np.uint16), np.array([2**62, 2**62], np.int64))

    def tampered(message):
        if message.kind is MessageType.PREPARED:
            kept = message.body["kept"]
            for bad in ([], [*kept, 1], [2**63, *kept[1:]], [-1, *kept[1:]], {"1.weight": 1}, 3):
                yield replace(message, body={**message.body, "kept": bad})
        if message.kind is MessageType.HISTOGRAM_REPLY:
            for count in range(1, MOST_OPEN + 1):
                yield replace(message, payload=bytes_of_histograms([two] * count))
            yield replace(message, payload=None)
            yield replace(message, payload=np.zeros(20_000_000, np.uint8))

    def refuses(sender, to, message):
        transaction = cluster.coordinator._transaction
        if sum(refused.values()) < 1000:
            for bad in tampered(message):
                is_report = bad.kind is MessageType.PREPARED
                with pytest.raises(ProtocolError):
                    (transaction.record_report if is_report else transaction.record_histograms)(bad)
                refused[bad.kind] += 1

    cluster.on_send = refuses
    require_same(cluster, cluster.train(), "set")
    assert refused.keys() == {MessageType.PREPARED, MessageType.HISTOGRAM_REPLY}


def test_numbers_of_entries_after_a_rollback_are_those_of_the_shards(tmp_path):
    cluster = SparseCluster("gmp", 1, 2, folder=tmp_path / "flash", clip_norm=1.0)
    store, kept = cluster.store, []
    for steps in (2, 3):
        cluster.train(steps)
        store.make_durable()
        kept.append(store.mask("2.weight").kept)
    assert kept[0] != kept[1]
    for storage in cluster.storage:
        storage.roll_back(2)
    store.masks.forget()
    assert store.mask("2.weight").kept == kept[0]
    for shard in store.shards:
        shard.close()
    store.close()

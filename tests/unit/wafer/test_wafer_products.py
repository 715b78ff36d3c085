"""Streamed products in closed form: limits by hand, and an event-by-event account of one column."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from penstock.errors import ConfigError
from penstock.wafer import SILICON, SIM, CoreParameters, Mesh
from penstock.wafer.closed_form import (
    HIDDEN,
    PAID,
    ActivationLayout,
    ColumnWords,
    MaskCounts,
    RowLoad,
    StreamedProduct,
    StreamingOptions,
    SumSteps,
    assign_rows,
    binomial_extremes,
    broadcast_finish,
    count_mask,
    data_gradient,
    expected_load_factor,
    forward,
    forward_finish,
    forward_skew,
    step_cycles,
    weight_gradient,
    whole_counts,
)

PLAIN = CoreParameters("plain")  # 2 cycles per entry besides its elements, 4 per output feature


def events(counts, mesh: Mesh, tokens: int, core: CoreParameters, fifo: int = 512) -> float:
    """Return when the last core of a column has ended its last output feature, word by word.

    Entries and one control word per output feature enter a row of cores at one word per cycle, wait
    for a place in the queue, and are used in order. A control word waits for the sum of the core
    above, which takes one hop.
    """
    here = -(-tokens // mesh.columns)
    entry = core.trigger_cycles + math.ceil(here / core.simd_half)
    end = core.partial_sum_cycles + math.ceil(here / core.simd_half)
    sent = [0.0] * len(counts)
    for row in range(mesh.rows):
        free = entered = 0.0
        started: list[float] = []
        for output, count in enumerate(counts[:, row]):
            for word in range(count + 1):
                place = started[-fifo] if len(started) >= fifo else 0.0
                entered = max(entered + core.word_cycles, place)
                start = max(entered + core.hop_cycles * mesh.columns, free)
                if word == count:
                    start = max(start, sent[output])
                    # The sum streams on while it is added.
                    sent[output] = start + core.partial_sum_cycles + core.hop_cycles
                started.append(start)
                free = start + (entry if word < count else end)
    return free


def random_mask(outputs: int, inputs: int, density: float, seed: int = 0):
    return np.random.default_rng(seed).random((outputs, inputs)) < density


AT_ONCE = ColumnWords(100, 1, word_cycles=0.0, ramp_cycles=0.0, hop_cycles=0.0)

# --- by hand --------------------------------------------------------------------------------------


def test_dense_product_on_one_column_is_that_of_the_events():
    mesh, tokens = Mesh(8, 1), 8
    product = StreamedProduct(48, 64, tokens)
    closed = forward(product, ActivationLayout(mesh), PLAIN, PAID)
    # 8 features x 48 outputs of 2 + 2 cycles, 48 sums of 4 + 2, the crossing of 9 and 8 sums of 4.
    assert closed.total == 8 * 48 * 4 + 48 * 6 + 9 + 8 * 4
    found = events(whole_counts(48, 64, 8).counts, mesh, tokens, PLAIN)
    assert found == pytest.approx(closed.total, rel=0.01)


def test_dense_product_on_one_row_has_no_skew_and_one_sum():
    layout = ActivationLayout(Mesh(1, 16))
    closed = forward(StreamedProduct(32, 20, 160), layout, PLAIN, PAID)
    assert closed.total == 32 * 20 * (2 + 3) + 32 * (4 + 3) + 17 + 4
    assert closed.skew == 0


def test_sparse_product_on_one_row_counts_every_entry():
    mesh, tokens = Mesh(1, 4), 64
    mask = random_mask(96, 80, 0.2)
    counts = count_mask(mask, 1)
    product = StreamedProduct(96, 80, tokens)
    closed = forward(product, ActivationLayout(mesh), PLAIN, PAID, counts)
    assert closed.cores == mask.sum() * (2 + 4) + 96 * (4 + 4)
    assert events(counts.counts, mesh, tokens, PLAIN) == pytest.approx(closed.total, rel=0.01)


def test_one_entry_takes_one_set_up_and_its_elements():
    product = StreamedProduct(1, 1, 4)
    closed = forward(product, ActivationLayout(Mesh(1, 1)), SIM)
    assert (closed.set_up, closed.arithmetic, closed.partial_sums) == (9, 1, 4)


def test_host_link_binds_where_few_tokens_meet_many_weights():
    product = StreamedProduct(4096, 4096, 1024, is_indexed=False)
    closed = forward(product, ActivationLayout(Mesh(750, 994)), PLAIN)
    assert closed.binding == "host link"
    # Two 16-bit values per word and a control word per output, at 1.2 Tb/s and 1.1 GHz.
    words = 4096 * 4096 / 2 + 4096
    assert closed.limits["host link"] == pytest.approx(words * 32 / 1.2e12 * 1.1e9)


def test_words_of_partial_sums_bind_where_nothing_is_left_to_compute():
    product = StreamedProduct(1024, 1024, 8 * 100, density=0.001)
    closed = forward(product, ActivationLayout(Mesh(8, 8)), SIM)
    assert closed.binding == closed.largest_part == "words into cores"
    sums = closed.limits["partial sums on links"]
    assert sums == 1024 * 50  # two 16-bit sums per word
    # A control word for each output feature, and a word for each entry of the fullest row of cores.
    assert sums + 1024 < closed.limits["words into cores"] < sums + 1024 + 1024


def test_weights_of_four_bytes_travel_as_two_words_with_their_index():
    small = StreamedProduct(64, 64, 64, density=0.5)
    assert (small.words_per_entry, dataclasses.replace(small, element_bytes=4).words_per_entry) == (
        1,
        2,
    )
    assert StreamedProduct(64, 64, 64, is_indexed=False).words_per_entry == 0.5


def test_weight_gradient_sums_into_one_number_slowly_on_machines():
    product, layout = StreamedProduct(256, 256, 256), ActivationLayout(Mesh(8, 8))
    gradient = weight_gradient(product, layout, SILICON)
    ahead = forward(product, layout, SILICON)
    # 2 cycles per element against 1.37 per four.
    assert gradient.arithmetic / ahead.arithmetic == pytest.approx(8 / 1.37)


def test_data_gradient_has_no_partial_sums():
    product, layout = StreamedProduct(256, 128, 64), ActivationLayout(Mesh(8, 8))
    gradient = data_gradient(product, layout, SIM)
    assert gradient.partial_sums == 0
    assert gradient.limits["gradients down columns"] == 256 * 4
    assert gradient.arithmetic == forward(product, layout, SIM).arithmetic


def test_ring_needs_lead_for_a_turn():
    product, layout = StreamedProduct(64, 64, 64, density=0.1), ActivationLayout(Mesh(64, 8))
    ring = forward(product, layout, PLAIN, StreamingOptions(reduction="ring", accumulators=4))
    assert ring.limits["turns of the ring"] == 64 * 64 * (4 + 1) / 4


def test_features_that_do_not_divide_leave_cores_idle():
    even = forward(StreamedProduct(64, 64, 64), ActivationLayout(Mesh(8, 8)), PLAIN)
    odd = forward(StreamedProduct(64, 65, 64), ActivationLayout(Mesh(8, 8)), PLAIN)
    assert odd.arithmetic == even.arithmetic * 9 / 8


# --- against the events ---------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.5, 0.1, 0.05, 0.01])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_masks_own_counts_give_the_time_of_the_events_within_5_percent(density, seed):
    mesh, tokens = Mesh(16, 8), 64
    counts = count_mask(random_mask(128, 512, density, seed), 16)
    product = StreamedProduct(128, 512, tokens)
    core = dataclasses.replace(PLAIN, ramp_cycles=0)  # the events know no way into a core
    closed = forward(product, ActivationLayout(mesh), core, PAID, counts)
    assert closed.binding == "cores"
    assert events(counts.counts, mesh, tokens, core) == pytest.approx(closed.total, rel=0.05)


# The event column of the table in facts 3.3, made by another program: mesh, M, K, T, sparsity.
@pytest.mark.parametrize(
    ("rows", "inputs", "tokens", "sparsity", "cycles"),
    [
        (8, 512, 64, 0.9, 17_218),
        (8, 512, 64, 0.95, 10_263),
        (8, 512, 64, 0.99, 4_778),
        (64, 2048, 256, 0.5, 96_672),
        (64, 2048, 256, 0.9, 28_262),
        (64, 2048, 256, 0.95, 18_852),
    ],
)
def test_expectation_is_within_5_percent_of_recorded_events(rows, inputs, tokens, sparsity, cycles):
    product = StreamedProduct(512, inputs, tokens, density=1 - sparsity)
    closed = forward(product, ActivationLayout(Mesh(rows, 8)), PLAIN, PAID)
    assert closed.total == pytest.approx(cycles, rel=0.05)


@pytest.mark.parametrize(
    "options",
    [PAID, HIDDEN, StreamingOptions(inbox_rows=2), StreamingOptions(sums="paid", accumulators=3)],
)
@pytest.mark.parametrize("density", [0.5, 0.1, 0.03])
def test_expectation_is_that_of_random_masks_within_5_percent(options, density):
    layout = ActivationLayout(Mesh(32, 8))
    product = StreamedProduct(512, 1024, 256, density=density)
    for form in (forward, data_gradient, weight_gradient):
        expected = form(product, layout, SIM, options).total
        found = [
            form(
                product,
                layout,
                SIM,
                options,
                count_mask(random_mask(512, 1024, density, seed), 32),
            ).total
            for seed in range(3)
        ]
        assert expected == pytest.approx(np.mean(found), rel=0.05), form.__name__


def test_broadcast_without_lead_is_a_barrier_at_every_output_feature():
    work = np.random.default_rng(0).integers(0, 9, (50, 12)).astype(float)
    # Of words that take no time and queues that hold a part of one word there is nothing else.
    assert broadcast_finish(work, 1, AT_ONCE) == work.max(axis=1).sum()
    assert broadcast_finish(work, 50, AT_ONCE) == work.sum(axis=0).max()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("held", [1, 3])
def test_last_row_of_cores_is_done_when_events_of_single_words_say_so(seed, held):
    """The same by words: a queue before each core, one before each router, room freed in order."""
    generator = np.random.default_rng(seed)
    outputs, rows, of_row, depth = 12, 5, 4, int(generator.integers(1, 10))
    work = generator.integers(0, 30, (outputs, rows)).astype(float)
    moved = np.zeros((rows, outputs * of_row + 1))  # word out of a router; the first is none
    stored, done = np.zeros_like(moved), np.zeros((outputs + 1, rows))
    for word in range(1, outputs * of_row + 1):
        for row in range(rows):
            room = [moved[row, word - 1] + 1, moved[row - 1, word] if row else 0.0]
            if word > depth:
                room.append(stored[row, word - depth])
                room.extend(moved[row + 1 : row + 2, word - depth])
            moved[row, word] = max(room)
            freed = math.ceil(word / of_row) - held
            free = done[freed, row] if freed > 0 else 0.0
            stored[row, word] = max(moved[row, word], stored[row, word - 1] + 1, free)
        if word % of_row == 0:
            output = word // of_row
            done[output] = np.maximum(done[output - 1], stored[:, word]) + work[output - 1]
    words = ColumnWords(of_row, depth, word_cycles=1.0, ramp_cycles=1.0, hop_cycles=1.0)
    assert broadcast_finish(work, held, words) == pytest.approx(done[-1].max(), rel=0.05)


def test_last_passage_is_the_greatest_sum_over_sequences_that_never_go_back():
    work = np.random.default_rng(1).integers(0, 9, (6, 4)).astype(float)
    paths = itertools.combinations_with_replacement(range(4), 6)
    greatest = max(sum(work[step, row] for step, row in enumerate(path)) for path in paths)
    assert forward_finish(work, SumSteps(), AT_ONCE) == greatest


def test_rows_of_equal_entries_may_be_exchanged():
    counts = np.tile(np.random.default_rng(0).integers(0, 9, (30, 1)), (1, 8))
    mixed = counts[np.random.default_rng(1).permutation(30)]
    for options in (PAID, StreamingOptions(accumulators=3, inbox_rows=1)):
        steps = SumSteps(4.0, 0.0, options.accumulators, options.inbox_rows)
        times = [forward_finish(one * 6.0, steps, AT_ONCE) for one in (counts, mixed)]
        assert times[0] == times[1]


# --- properties -----------------------------------------------------------------------------------

PRODUCTS_DRAWN = st.builds(
    StreamedProduct,
    outputs=st.integers(1, 2000),
    inputs=st.integers(1, 2000),
    tokens=st.integers(1, 5000),
    density=st.floats(0.01, 1.0),
    is_indexed=st.booleans(),
    element_bytes=st.sampled_from([2, 4]),
)
MESHES = st.builds(Mesh, st.integers(1, 64), st.integers(1, 64))


@settings(max_examples=60, deadline=None)
@given(product=PRODUCTS_DRAWN, mesh=MESHES, core=st.sampled_from([SIM, SILICON]))
def test_cycles_are_never_fewer_than_arithmetic_or_any_link_needs(product, mesh, core):
    for part in step_cycles(product, ActivationLayout(mesh), core):
        assert part.total >= part.useful
        assert part.total >= max(part.limits.values())
        assert part.total >= part.cores
        assert 0 <= part.utilization <= 1
        assert part.binding == "cores" or part.binding in part.limits


@settings(max_examples=40, deadline=None)
@given(product=PRODUCTS_DRAWN, mesh=MESHES, factor=st.floats(0.2, 0.95))
@example(product=StreamedProduct(1, 37, 4913), mesh=Mesh(48, 2), factor=0.64)
def test_fewer_entries_never_take_longer(product, mesh, factor):
    fewer = dataclasses.replace(product, density=max(0.005, product.density * factor))
    for part, less in zip(
        step_cycles(product, ActivationLayout(mesh), SIM),
        step_cycles(fewer, ActivationLayout(mesh), SIM),
        strict=True,
    ):
        # A dense weight has no skew; a little sparsity may bring more than it saves.
        assert less.total - less.skew <= part.total + 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_more_room_never_takes_longer(seed):
    work = np.random.default_rng(seed).integers(0, 20, (60, 10)).astype(float)
    rooms = [(1, 1), (1, 2), (1, None), (2, None), (5, None), (60, None)]
    times = [forward_finish(work, SumSteps(4.0, 0.0, *room), AT_ONCE) for room in rooms]
    assert times == sorted(times, reverse=True)
    assert forward_finish(work, SumSteps(accumulators=60), AT_ONCE) == work.sum(axis=0).max()
    times = [broadcast_finish(work, rows, AT_ONCE) for rows in (1, 2, 4, 60)]
    assert times == sorted(times, reverse=True)
    queues = [ColumnWords(6, depth, 1.0, 2.0, 1.0) for depth in (1, 2, 4, 16)]
    for rows in (1, 2, 4, 60):
        times = [broadcast_finish(work, rows, words) for words in queues]
        assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("accumulators", [1, 2, 8])
def test_skew_never_exceeds_a_barrier(accumulators):
    load = RowLoad(mean=10.0, deviation=3.0, worst=6.0)
    for outputs, rows in ((4, 64), (1000, 8), (1, 2)):
        skew = forward_skew(load, outputs, rows, accumulators, 1)
        assert 0 <= skew <= outputs * load.worst


# --- placement ------------------------------------------------------------------------------------


def test_features_are_dealt_forwards_and_backwards_by_their_entries():
    entries = np.array([1, 9, 8, 7, 3, 2])
    rows = assign_rows(entries, 3)
    # Sorted: 9 8 7 | 3 2 1, dealt to rows 0 1 2 | 2 1 0.
    assert rows.tolist() == [0, 0, 1, 2, 2, 1]
    assert np.bincount(rows, weights=entries).tolist() == [10, 10, 10]


def test_counts_of_a_mask_are_its_sums():
    mask = random_mask(20, 50, 0.3)
    counts = count_mask(mask, 7)
    rows = assign_rows(mask.sum(axis=0), 7)
    for row in range(7):
        assert counts.counts[:, row].tolist() == mask[:, rows == row].sum(axis=1).tolist()
    assert counts.entries == mask.sum()
    unsorted = count_mask(mask, 7, is_sorted=False)
    assert unsorted.counts[:, 0].tolist() == mask[:, :8].sum(axis=1).tolist()


def test_more_rows_than_features_leave_rows_empty():
    counts = count_mask(random_mask(4, 3, 1.0), 5)
    assert sorted(counts.counts.sum(axis=0).tolist()) == [0, 0, 4, 4, 4]


@pytest.mark.parametrize("density", [0.5, 0.1, 0.02])
@pytest.mark.parametrize("rows", [8, 64])
def test_load_factor_is_that_of_random_masks(density, rows):
    for is_sorted, tolerance in ((True, 0.02), (False, 0.04)):
        found = [
            count_mask(random_mask(512, 2048, density, seed), rows, is_sorted=is_sorted).load_factor
            for seed in range(3)
        ]
        expected = expected_load_factor(2048, 512, density, rows, is_sorted=is_sorted)
        assert expected == pytest.approx(np.mean(found), rel=tolerance)


def test_sorting_makes_rows_more_even():
    assert expected_load_factor(2048, 512, 0.05, 64) < 1.01
    assert expected_load_factor(2048, 512, 0.05, 64, is_sorted=False) > 1.05


@pytest.mark.parametrize(("rows", "features", "times"), [(64, 32, 2.4), (256, 8, 4.8)])
def test_barrier_at_every_output_feature_costs_what_the_facts_say(rows, features, times):
    # facts 3.2: the sum of the fullest rows over the mean at 90 %, of 1,024 x 2,048 entries.
    _, most = binomial_extremes(features, 0.1, rows)
    assert most / (features * 0.1) == pytest.approx(times, rel=0.03)


@pytest.mark.parametrize(("trials", "share", "draws"), [(40, 0.1, 64), (500, 0.3, 8)])
def test_extremes_of_binomial_numbers(trials, share, draws):
    drawn = np.random.default_rng(0).binomial(trials, share, (4000, draws))
    least, most = binomial_extremes(trials, share, draws)
    assert least == pytest.approx(drawn.min(axis=1).mean(), abs=0.15)
    assert most == pytest.approx(drawn.max(axis=1).mean(), abs=0.15)


# --- refusals -------------------------------------------------------------------------------------


def _text(call, *arguments, **keywords) -> str:
    with pytest.raises(ConfigError) as error:
        call(*arguments, **keywords)
    return str(error.value)


def test_impossible_products_are_refused():
    assert _text(StreamedProduct, 0, 8, 8) == "product: expected outputs from 1 up, got 0"
    assert _text(StreamedProduct, 8, 8, 8, density=0.0) == (
        "product: expected a density above 0 and up to 1, got 0; 90 % sparsity is a density of 0.1"
    )
    assert _text(StreamedProduct, 8, 8, 8, element_bytes=1) == (
        "product: expected element_bytes of 2 or 4, got 1"
    )


def test_impossible_options_are_refused():
    assert _text(StreamingOptions, inbox_rows=0) == (
        "streaming: expected inbox_rows from 1 up, got 0"
    )
    assert _text(StreamingOptions, accumulators=-1) == (
        "streaming: expected accumulators from 1 up, got -1"
    )


def test_masks_that_do_not_fit_are_refused():
    product, layout = StreamedProduct(20, 50, 8), ActivationLayout(Mesh(4, 4))
    mask = random_mask(20, 50, 0.3)
    assert _text(forward, product, layout, SIM, PAID, count_mask(mask, 5)) == (
        "mask: expected counts for 4 rows of cores, as many as the layout has, got 5; count the "
        "mask again with count_mask"
    )
    assert _text(forward, product, layout, SIM, PAID, count_mask(mask.T.copy(), 4)) == (
        "mask: expected one of 20 x 50 features, got 50 x 20"
    )
    assert _text(count_mask, mask.astype(float), 4) == (
        "mask: expected booleans with the shape [outputs, inputs], got an array of float64 with "
        "shape [20, 50]"
    )
    assert _text(MaskCounts, np.array([[3, 4]]), 6) == (
        "mask: expected 0 to 6 entries per output feature, as many as there are input features; "
        "got 7 to 7"
    )
    empty = MaskCounts(np.zeros((20, 4), np.int64), 50)
    assert _text(forward, product, layout, SIM, PAID, empty) == (
        "mask: expected at least one kept entry, got none"
    )


def test_parts_of_a_masks_time_are_those_of_its_fullest_row_of_cores():
    mask = np.zeros((6, 8), bool)
    mask[:, 0] = mask[:2, 4] = True  # features stay where they are: 6 and 2 entries
    product, layout = StreamedProduct(6, 8, 64), ActivationLayout(Mesh(2, 1))
    counts = count_mask(mask, 2, is_sorted=False)
    for form in (forward, data_gradient):
        found = form(product, layout, PLAIN, StreamingOptions(is_sorted=False), counts)
        assert found.arithmetic == 6 * PLAIN.elements_cycles(64), form.__name__

"""The forecast of a flash store's traffic against a store that runs."""

import numpy as np
import pytest
import torch
from grids import thinned
from store_programs import (
    SMALL_BLOCK,
    flash_store,
    forward_sweep,
    make_program,
    random_gradients,
    random_weights,
    send,
)

from penstock.errors import BudgetError
from penstock.store import AdamW
from penstock.store.flash import forecast

DEEP = [{f"w{n}": (98, 65)} for n in range(9)]
TIED = [{"e": (200, 65)}, *DEEP, {"norm": (65,), "e": (200, 65)}]
STEPS = 3
DRAM = [330_000, 700_000, 1_000_000, 1_500_000, 6_000_000]


def step(store):
    """One step whose backward sweep fetches all stages but the last again."""
    forward_sweep(store)
    gradients = random_gradients(store.program, np.random.default_rng([1, store.step]))
    for stage in reversed(store.program.stages):
        if stage is not store.program.stages[-1]:
            store.fetch(stage.index)
        send(store, {stage.index: gradients[stage.index]})
    store.commit()


def settled(store):
    """Wait for the updates and writes of the last step; return the traffic since the last call.

    Nothing is read ahead after it, until the next step begins.
    """
    pipeline = store._pipeline
    with pipeline._changed:
        pipeline._reads_ahead = False
    store.make_durable()
    return store.take_flash_traffic()


def traffic_of(store, steps):
    """Traffic of some steps, their updates included."""
    for _ in range(steps):
        step(store)
    return settled(store)


def predicted(program, dram, half=False, moments="fp32"):
    return forecast(
        program,
        AdamW(0.9, 0.95, 1e-8, moments=moments),
        dram,
        half_gradients=half,
        keep_steps=2,
        block_elements=SMALL_BLOCK,
    )


@pytest.mark.parametrize(
    ("dram", "layers", "half"),
    thinned(DRAM, [DEEP, TIED], [False, True], others=pytest.mark.long),
)
def test_traffic_memory_and_size_are_those_of_a_store_that_runs(tmp_path, dram, layers, half):
    program = make_program(layers)
    expected = predicted(program, dram, half)
    dtype = torch.bfloat16 if half else torch.float32
    store = flash_store(program, tmp_path / "flash", dram_bytes=dram, gradient_dtype=dtype)
    store.load(random_weights(program, 1).items())
    for _ in range(2):
        step(store)
    settled(store)
    # What is in memory when all updates are waited for differs from the middle of a run: that is
    # so in both of these periods, and not in their difference.
    few, many = traffic_of(store, 1), traffic_of(store, 1 + STEPS)
    assert many.written_bytes - few.written_bytes == STEPS * expected.written_bytes
    assert store.memory_bytes == expected.memory
    assert store.flash_bytes == expected.flash_bytes
    assert many.read_bytes - few.read_bytes == STEPS * expected.read_bytes
    store.close()


def test_traffic_of_several_stores_is_added():
    one = predicted(make_program(DEEP), DRAM[0])
    three = one.times(3)
    assert three.read_bytes == 3 * one.read_bytes
    assert three.written_bytes == 3 * one.written_bytes
    assert three.flash_bytes == 3 * one.flash_bytes
    assert three.window_bytes == 3 * one.window_bytes


@pytest.mark.long  # compiles and lays out a large model
def test_store_that_no_memory_could_hold_is_forecast():
    program = make_program([{f"w{n}": (1 << 20, 1 << 16)} for n in range(16)])  # 4 TiB of weights
    expected = forecast(
        program, AdamW(0.9, 0.95, 1e-8), 3 << 40, half_gradients=False, keep_steps=2
    )
    elements = 16 << 36
    # Weights and moments go out every step, and the gradients that do not fit in memory.
    assert elements * (4 + 8) < expected.written_bytes <= elements * (4 + 8 + 4)
    assert sum(expected.memory.values()) <= 3 << 40


def test_memory_below_the_minimum_is_refused_as_by_the_store():
    with pytest.raises(
        BudgetError,
        match=r"store\.dram: a store on flash needs at least .*: the weights of two stages need",
    ):
        predicted(make_program(DEEP), 1000)


def test_memory_that_holds_all_state_has_no_buffers_and_reads_nothing():
    program = make_program(DEEP)
    whole = predicted(program, 1 << 30)
    assert whole.read_bytes == whole.memory["blocks"] == 0
    assert whole.window_bytes == whole.memory["state"] > 0
    assert sum(whole.memory.values()) < 1 << 24
    just = predicted(program, sum(whole.memory.values()))
    assert just == whole
    less = predicted(program, sum(whole.memory.values()) - 1)
    assert less.read_bytes > 0


def test_gradients_wait_for_the_update_of_a_stage_that_was_not_fetched_again(tmp_path):
    program = make_program(DEEP)
    store = flash_store(program, tmp_path / "flash", dram_bytes=DRAM[0])
    store.load(random_weights(program, 1).items())
    forward_sweep(store)
    send(store, random_gradients(program, np.random.default_rng(1)))
    store.commit()
    # The weights of this stage are not in memory, and nobody asks for those of earlier ones.
    stage = len(DEEP) - 2
    gradients = random_gradients(program, np.random.default_rng(2))
    send(store, {stage: gradients[stage]})
    assert stage not in store._pipeline._updater.awaiting
    store.close()

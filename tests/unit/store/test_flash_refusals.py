"""What a store on flash is not opened with: another model, too little memory, too little room."""

import re
import shutil

import pytest
import torch
from process_files import open_files
from store_programs import LAYERS, make_program, random_weights, train
from test_flash import DEEP, LEAST

from penstock.config import ByteSize
from penstock.errors import BudgetError, ConfigError, StorageError
from penstock.store import AdamW, Lion
from penstock.store.flash import least_dram_bytes
from penstock.store.flash.layout import BLOCK_ELEMENTS


def test_another_model_or_optimizer_is_refused(flash, tmp_path):
    before = open_files(tmp_path)
    flash(make_program(LAYERS)).close()
    with pytest.raises(ConfigError, match="holds the state of another model or optimizer"):
        flash(make_program(DEEP))
    state = r": optimizer state exp_avg \(float32\), .* there, exp_avg \(float32\) now"
    with pytest.raises(ConfigError, match=f"another model or optimizer: .*{state}"):
        flash(make_program(LAYERS), optimizer=Lion())
    assert open_files(tmp_path) == before
    flash(make_program(LAYERS))


@pytest.mark.parametrize("away", [shutil.rmtree, lambda folder: folder.rename(folder / "../away")])
def test_removed_folder_ends_the_run_at_the_next_durable_step(flash, tmp_path, away):
    program = make_program(LAYERS)
    store = flash(program, "store")
    store.load(random_weights(program, 0).items())
    train(store, 2, seed=0)
    away(tmp_path / "store")
    with pytest.raises(StorageError, match=r"journal: was deleted, moved or replaced while"):
        train(store, 2, seed=0)


def test_closed_store_refuses_a_step(flash):
    program = make_program(LAYERS)
    store = flash(program)
    store.load(random_weights(program, 0).items())
    train(store, 1, seed=0)
    store.close()
    with pytest.raises(StorageError, match=r"the store is closed; open the run again"):
        train(store, 1, seed=0)


def test_other_keep_steps_is_refused_by_its_key(flash):
    flash(make_program(LAYERS), keep_steps=2).close()
    with pytest.raises(ConfigError, match=r"created to keep 2 durable steps.*keep_steps to 2"):
        flash(make_program(LAYERS), keep_steps=3)


def test_too_small_budget_names_the_required_bytes(flash):
    program = make_program(DEEP)
    with pytest.raises(BudgetError, match=r"raise store\.dram to [\d,]+ or more") as caught:
        flash(program, dram=150_000)
    need = int(str(caught.value).split("raise store.dram to ")[1].split()[0].replace(",", ""))
    assert need == LEAST
    with pytest.raises(BudgetError, match="the weights of two stages need 65,536 bytes"):
        flash(program, dram=need - 1)
    flash(program, dram=need)


@pytest.mark.parametrize(
    ("layers", "settings", "is_whole_store"),
    [(LAYERS, {"block_elements": BLOCK_ELEMENTS}, True), (DEEP, {}, False)],
)
def test_too_small_budget_shows_a_size_to_paste(flash, layers, settings, is_whole_store):
    program = make_program(layers)
    with pytest.raises(BudgetError) as caught:
        flash(program, dram=70_000, **settings)
    text = str(caught.value)
    begin = "store.dram: a store on flash needs at least "
    assert text.startswith(begin)
    shown, pasted = text[len(begin) :].split(" of memory")[0], text.split("(store.dram=")[1]
    assert pasted.split(")")[0] == shown.replace(" ", "")
    assert "for this model, got 68.36 KiB" in text
    assert ("; the model is so small that this is the whole store: all weights" in text) == (
        is_whole_store
    )
    assert text.endswith("; with that much the store needs no flash") == is_whole_store
    flash(program, dram=ByteSize.parse(pasted.split(")")[0]), **settings)


MANY_BLOCKS = [{f"{i}.weight": (500, 400)} for i in range(24)]  # 98 blocks a stage


ONE_LARGE = [{"0.weight": (500, 400)}, {"1.weight": (8, 8)}]


@pytest.mark.parametrize("layers", [LAYERS, DEEP, MANY_BLOCKS, ONE_LARGE])
def test_parts_of_a_too_small_budget_add_up_to_the_minimum(flash, layers):
    with pytest.raises(BudgetError) as caught:
        flash(make_program(layers), dram=1)
    parts, least = str(caught.value).split("; the budget is 1; raise store.dram to ")
    numbers = [int(n.replace(",", "")) for n in re.findall(r" ([\d,]*\d)(?= bytes|,|$)", parts)]
    assert sum(numbers) == int(least.split()[0].replace(",", ""))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("half", [False, True])
def test_minimum_memory_suffices_for_stages_of_many_blocks(flash, dtype, half):
    program = make_program(MANY_BLOCKS, stream_dtype=dtype)
    settings = {"gradient_dtype": torch.bfloat16 if half else torch.float32}
    with pytest.raises(BudgetError) as caught:
        flash(program, dram=1, **settings)
    least = int(re.search(r"raise store\.dram to ([\d,]+) ", str(caught.value))[1].replace(",", ""))
    store = flash(program, dram=least, **settings)
    assert sum(store.memory_bytes.values()) <= least
    with pytest.raises(BudgetError, match=rf"to {least:,} or more"):
        flash(program, "other", dram=least - 1, **settings)


def test_the_limit_on_flash_counts_gradients_too(flash):
    store = flash(make_program(DEEP), dram=LEAST)
    assert store.flash_bytes == 9 * 8192 * (3 * 12 + 4)  # three versions, and gradients
    limit = store.flash_bytes
    flash(make_program(DEEP), "enough", dram=LEAST, flash_bytes=limit)
    with pytest.raises(
        BudgetError, match=rf"and {9 * 8192 * 4:,} for gradients, the limit is {limit - 1:,}"
    ):
        flash(make_program(DEEP), "short", dram=LEAST, flash_bytes=limit - 1)


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
@pytest.mark.parametrize("layers", [LAYERS, DEEP, DEEP[:1], [*DEEP, {"head": (900, 300)}]])
def test_minimum_memory_suffices_and_less_does_not(flash, layers, moments):
    program = make_program(layers, stream_dtype=torch.bfloat16)
    optimizer = AdamW(0.9, 0.95, 1e-8, moments=moments)
    least = least_dram_bytes(program, optimizer, half_gradients=False)
    settings = {"optimizer": optimizer, "block_elements": BLOCK_ELEMENTS}
    with pytest.raises(BudgetError, match=rf"raise store\.dram to {least:,} or more"):
        flash(program, dram=least - 1, **settings)
    flash(program, dram=least, **settings)

"""Sparse weights on flash have the bits of those in memory, after every step and every reopen."""

import pytest
from sparse_training import (
    CLIP,
    METHODS,
    OPTIMIZERS,
    assert_same_contents,
    contents,
    empty_store,
    rule_of,
    sparse_program,
    train_sparse,
)
from store_programs import random_weights

DRAM = 900_000


@pytest.fixture
def sparse_flash(flash):
    """Return a maker of stores on flash for a method of sparse training."""

    def make(method, optimizer="adamw", precision="fp32", folder="flash", **settings):
        return flash(
            sparse_program(method, precision),
            folder,
            optimizer=OPTIMIZERS[optimizer],
            clip_norm=CLIP,
            masks=rule_of(method),
            **{"dram": DRAM, **settings},
        )

    return make


def loaded(store):
    store.load(random_weights(store.program, 5).items())
    return store


def in_memory(method, optimizer="adamw", precision="fp32", **settings):
    return loaded(
        empty_store(sparse_program(method, precision), method, optimizer, precision, **settings)
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw 8bit"])
@pytest.mark.parametrize("method", METHODS)
def test_flash_store_equals_store_in_memory(sparse_flash, method, optimizer, precision):
    ours = loaded(sparse_flash(method, optimizer, precision))
    theirs = in_memory(method, optimizer, precision)
    assert_same_contents(contents(ours), contents(theirs))
    for _ in range(4):
        assert train_sparse(ours, 4) == train_sparse(theirs, 4)
        assert_same_contents(contents(ours), contents(theirs))
    assert ours.content_hash() == theirs.content_hash()
    assert ours.unchanged() == theirs.unchanged()

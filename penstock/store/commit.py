"""The commit of a step by one store that holds, or can ask for, all of its gradients."""

from __future__ import annotations

from dataclasses import replace

from penstock.store.interface import Commit, Store
from penstock.store.norm import global_norm, zero_gradients


def prepare_and_decide(store: Store) -> Commit:
    """Commit a step in its two phases, and say which gradients were zero.

    Raises:
        NoTrainingError: a trainable weight has got no gradient. Nothing is committed.
        NonFiniteError: a gradient is NaN or infinite. Nothing is committed.
    """
    report = store.prepare()
    commit = store.decide(global_norm(store.program, store.step + 1, report))
    return replace(commit, zero_gradients=zero_gradients(store.program, report))

"""What the store's and the engine's cases really do, and which bytes or calls they count."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.calibration import store_cases
from penstock.calibration.overhead_cases import empty_program, overhead_cases
from penstock.calibration.store_cases import prepare_receive, prepare_update
from penstock.program import verify
from penstock.store import AdamW, Gradients

GROUP = 256  # elements that share the scale of an 8-bit moment
ELEMENTS = 10 * GROUP


@pytest.mark.parametrize(
    ("kind", "bytes_per_element"),
    [
        ("float32", 2 * (4 + 4 + 4) + 4),
        ("bfloat16", 2 * (2 + 2 + 4 + 4) + 2),
        ("8bit", 2 * (4 + 2 * (1 + 4 / GROUP)) + 4),
    ],
)
def test_bytes_of_an_update_are_those_of_weight_moments_and_gradient(kind, bytes_per_element):
    prepared = prepare_update(kind, ELEMENTS)
    assert prepared.amount == prepared.size == ELEMENTS * bytes_per_element


@pytest.mark.parametrize("kind", store_cases.KINDS)
def test_an_update_is_the_optimizers_own(kind, monkeypatch):
    seen = []
    update = AdamW.update

    def watching(self, weight, gradient, state, **settings):
        update(self, weight, gradient, state, **settings)
        seen.append((self.moments, [part.dtype.name for part in weight], gradient.dtype.name))
        assert all(np.any(array) for array in state.values())  # it had gradients to average

    monkeypatch.setattr(AdamW, "update", watching)
    prepare_update(kind, ELEMENTS).run()
    assert (
        seen
        == {
            "float32": [("fp32", ["float32"], "float32")],
            "bfloat16": [("fp32", ["uint16", "uint16"], "uint16")],
            "8bit": [("8bit", ["float32"], "float32")],
        }[kind]
    )


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4 + 4), (torch.bfloat16, 4 + 2)])
def test_a_gradient_arrives_and_its_norm_is_reported(dtype, width, monkeypatch):
    norms = []
    report = Gradients.report

    def watching(self):
        found = report(self)
        norms.append(float(np.sum(found.squares)))
        return found

    monkeypatch.setattr(Gradients, "report", watching)
    prepared = prepare_receive(dtype, ELEMENTS)
    assert prepared.amount == prepared.size == ELEMENTS * width
    prepared.run()
    prepared.run()  # may arrive again
    assert norms == [pytest.approx(ELEMENTS / 128**2)] * 2


def test_checksum_is_that_of_a_block_on_flash(monkeypatch):
    sizes = []
    monkeypatch.setattr(store_cases, "checksum", lambda data: sizes.append(data.nbytes))
    prepared = store_cases.prepare_checksum(1 << 16)
    prepared.run()
    assert sizes == [prepared.amount] == [prepared.size] == [1 << 16]


def test_the_program_without_work_obeys_the_rules_of_programs():
    program = verify(empty_program())
    assert program.trainable_parameters == program.parameters > 0


def test_calls_are_counted_per_operator_and_per_stage_and_micro_batch():
    operators, stages = (case.prepare() for case in overhead_cases())
    stages_of_a_program = len(empty_program().stages)
    sweeps = 2 * stages_of_a_program - 1  # the last stage turns
    assert stages.amount % sweeps == 0
    stages.run()
    stages.run()  # a second step begins as the first one
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Counting.count += 1
            return function(*args, **(kwargs or {}))

    with Counting():
        operators.run()
    assert Counting.count == operators.amount

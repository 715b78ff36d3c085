"""The operands of the measured operators are numbers like those of a run."""

import torch

from penstock.calibration.operator_cases import Operand, Operands

TOKENS, HIDDEN, VOCABULARY = 64, 512, 8192


def test_no_probability_of_a_head_is_a_denormal_number():
    hidden, weight = Operands().take(
        (
            Operand((TOKENS, HIDDEN), torch.float32),
            Operand((VOCABULARY, HIDDEN), torch.float32),
        )
    )
    probabilities = torch.softmax(hidden @ weight.t(), dim=1)
    assert probabilities.min() > 1e6 * torch.finfo(torch.float32).tiny

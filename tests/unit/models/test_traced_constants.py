"""Which tensors of a forward have one value for all batches."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from penstock.models.traced_constants import constant_value

Make = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Asks(nn.Module):
    """Asks for the value of a tensor that `make` makes of an input, a buffer or nothing."""

    table: torch.Tensor

    def __init__(self, ask: Make) -> None:
        super().__init__()
        self.ask = ask
        self.register_buffer("table", torch.arange(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ask(x, self.table).sum() + x.sum()


def exported(ask: Make) -> torch.export.ExportedProgram:
    return torch.export.export(Asks(ask), (torch.zeros(6, dtype=torch.int64),), strict=False)


def found(make: Make) -> np.ndarray | None:
    values = []

    def ask(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        made = make(x, table)
        values.append(constant_value(made))
        return made

    exported(ask)
    return values[0]


def test_tensor_determined_by_the_graph_has_its_value() -> None:
    value = found(lambda x, table: (torch.arange(x.shape[0]) % 3).unsqueeze(0).expand(2, -1))
    assert value is not None
    assert value.tolist() == [[0, 1, 2, 0, 1, 2]] * 2


def written_through_a_view(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    made = torch.arange(6)
    made.unsqueeze(0)[:, 3:].fill_(0)
    return made


@pytest.mark.parametrize(
    "make",
    [
        lambda x, table: x + 1,
        lambda x, table: table * 2,
        lambda x, table: torch.randint(0, 9, (6,)),
        written_through_a_view,
    ],
    ids=["input", "buffer", "random", "written"],
)
def test_other_tensors_are_not_known(make) -> None:
    assert found(make) is None


def test_tensors_outside_of_a_graph_are_not_known() -> None:
    assert constant_value(torch.arange(3)) is None


def test_question_adds_nothing_to_the_graph() -> None:
    def ask(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        made = torch.arange(6) * 2
        assert constant_value(made) is not None
        return made

    plain = exported(lambda x, table: torch.arange(6) * 2)
    assert str(exported(ask).graph) == str(plain.graph)


def test_question_enters_no_gradient_mode(monkeypatch) -> None:
    """An export divides the whole graph where the forward changes the mode."""
    from torch._export.passes import replace_with_hop_pass_util as regions

    divided = []
    divide = regions._sequential_split_and_maybe_inline_subgraphs_helper
    monkeypatch.setattr(
        regions,
        "_sequential_split_and_maybe_inline_subgraphs_helper",
        lambda *arguments: divided.append(1) or divide(*arguments),
    )
    assert found(lambda x, table: torch.arange(6)) is not None
    assert not divided

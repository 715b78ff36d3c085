"""The table of a program: every figure against sums done by hand."""

import dataclasses
import io

import pytest
import torch
from rich.console import Console

from penstock.cli.program import live_values, render, title
from penstock.program import (
    Kind,
    Program,
    SavedTensor,
    Stage,
    TensorSpec,
    ValueSpec,
    WeightSpec,
    verify,
)
from penstock.weight_formats import DENSE

F32 = torch.float32
TOKENS = TensorSpec((2, 8), torch.int64)
HIDDEN = TensorSpec((2, 8, 16), F32)  # 1 KiB
LOSS = TensorSpec((), F32)


def refuse(*tensors):
    raise AssertionError("a table runs nothing")


def kind(name, weights, inputs, output, saved=()):
    known = {
        "name": name,
        "digest": name,
        "weights": weights,
        "trainable": (True,) * len(weights),
        "inputs": inputs,
        "inputs_grad": (True,) * len(inputs),
        "outputs": (output,),
        "outputs_grad": (True,),
        "saved": saved,
        "forward_flops": 1_000_000,
        "backward_flops": 2_000_000,
    }
    # The rest is what a table does not look at.
    rest = {
        field.name: {"Executable": refuse, "int": 0, "bool": False}.get(str(field.type), ())
        for field in dataclasses.fields(Kind)
        if field.name not in known and field.default_factory is dataclasses.MISSING
    }
    return Kind(**known, **rest)


def small_program(blocks=4):
    """Embedding, equal blocks, and a head tied to the embedding."""
    table = TensorSpec((32, 16), F32)
    square = TensorSpec((16, 16), F32)
    embed = kind("embedding", (table,), (TOKENS,), HIDDEN)
    block = kind(
        "block",
        (square,),
        (HIDDEN,),
        HIDDEN,
        (SavedTensor(HIDDEN, bytes=1024), SavedTensor(HIDDEN, input=0)),
    )
    head = kind("head", (table,), (HIDDEN, TOKENS), LOSS)
    stages = [Stage(0, "wte", embed, ("wte.weight",), ("ids",), ("x0",))]
    for number in range(blocks):
        stages.append(
            Stage(
                number + 1,
                f"h.{number}",
                block,
                (f"h.{number}.weight",),
                (f"x{number}",),
                (f"x{number + 1}",),
            )
        )
    last = len(stages)
    stages.append(Stage(last, "head", head, ("wte.weight",), (f"x{blocks}", "ids"), ("loss",)))
    names = ["wte.weight", *(f"h.{number}.weight" for number in range(blocks))]
    values = {f"x{n}": ValueSpec(f"x{n}", HIDDEN, "stage", True) for n in range(blocks + 1)}
    values["ids"] = ValueSpec("ids", TOKENS, "input", False)
    values["loss"] = ValueSpec("loss", LOSS, "stage", True)
    return verify(
        Program(
            name="small",
            stages=tuple(stages),
            weights={
                name: WeightSpec(name, (32, 16) if name == "wte.weight" else (16, 16), DENSE, True)
                for name in names
            },
            values=values,
            inputs=("ids",),
            constants={},
            prelude=None,
            prelude_inputs=(),
            prelude_outputs=(),
            results=("loss",),
        )
    )


def rows_of(program, fold):
    """Return the cells of the table's rows, the sums last."""
    columns = render(program, fold=fold).columns
    return [list(row) for row in zip(*(column.cells for column in columns), strict=True)]


def text_of(program, width):
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(render(program))
    return console.export_text()


def test_equal_neighbours_share_a_line_and_sums_count_all():
    assert rows_of(small_program(), fold=True) == [
        ["0", "wte", "embedding", "512", "2.00 KiB", "1.00 M", "2.00 M", "1.00 KiB", "0 B"],
        ["1-4", "h.0 ... 3", "block x4", "256", "1.00 KiB", "1.00 M", "2.00 M", "1.00 KiB",
         "1.00 KiB"],
        ["5", "head", "head", "512", "2.00 KiB", "1.00 M", "2.00 M", "4 B", "0 B"],
        ["", "6 stages in all", "3 kinds", "1.54k", "8.00 KiB", "6.00 M", "12.0 M",
         "1.00 KiB", "4.00 KiB"],
    ]  # fmt: skip


def test_all_prints_one_line_per_stage():
    rows = rows_of(small_program(), fold=False)
    assert [row[1] for row in rows[:-1]] == ["wte", "h.0", "h.1", "h.2", "h.3", "head"]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_narrow_terminal_truncates_no_figure(width):
    text = text_of(small_program(), width)
    assert text.splitlines()[0].rstrip() == "small: one micro-batch is ids [2, 8]"
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for cell in ("block x4", "12.0 M", "1.00 KiB", "4.00 KiB"):
        assert cell in text


def test_a_value_is_live_until_its_last_reader():
    program = small_program(blocks=3)
    assert live_values(program) == [(1, 1024)] * 4 + [(1, 4)]
    assert title(program) == "small: one micro-batch is ids [2, 8]"


def test_equal_blocks_are_one_line_for_96_blocks():
    rows = rows_of(small_program(96), fold=True)
    assert len(rows) == 4
    assert rows[1][:3] == ["1-96", "h.0 ... 95", "block x96"]

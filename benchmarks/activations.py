"""Is GELU faster than PyTorch's, in both types?

GELU in its tanh form, forward and backward, on the activations of a block of GPT-2: the functions
that executables call on a CPU (`penstock/compiler/activation_calls.py`) in turns with PyTorch's.
A copy of as many bytes, in the same turns, is the machine's limit.

    python benchmarks/activations.py [--quick]

`value` is the least ratio of PyTorch's time to ours, over types and passes.
"""

from __future__ import annotations

import penstock  # isort: skip  # noqa: F401 (first: PyTorch reads how its threads wait at import)

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from contract import describe_machine, print_result
from side_by_side import print_table

from penstock.compiler import gelu_tanh, gelu_tanh_backward
from penstock.engine import set_threads

TARGET = 1.0
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOKENS, WIDTH = 2048, 3072
aten = torch.ops.aten


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 5 if parser.parse_args().quick else 31
    machine = describe_machine()
    set_threads(None)
    rows = [row for name in TYPES for row in measured(name, rounds)]
    print_table(
        {"type": 5, "pass": 9, "PyTorch": 10, "ours": 10, "copy": 10, "ratio": 7},
        (
            (
                row["type"],
                row["pass"],
                *(f"{1e3 * row[key]:.2f} ms" for key in ("torch_seconds", "seconds")),
                f"{1e3 * row['copy_seconds']:.2f} ms",
                f"{row['ratio']:.3f}",
            )
            for row in rows
        ),
    )
    print_result(
        "activations",
        value=round(min(row["ratio"] for row in rows), 3),
        target=TARGET,
        unit="least ratio of the time of PyTorch's GELU (tanh) to ours",
        rows=rows,
        machine=machine,
    )


def measured(name: str, rounds: int) -> list[dict[str, Any]]:
    """Return the times of both passes in a type, medians of rounds in turns."""
    generator = torch.Generator().manual_seed(0)
    x, gradient = (
        torch.randn(TOKENS, WIDTH, generator=generator).to(TYPES[name]) for _ in range(2)
    )
    copied = torch.empty_like(x)
    forms = {
        "forward": (
            lambda: aten.gelu.default(x, approximate="tanh"),
            lambda: gelu_tanh(x),
        ),
        "backward": (
            lambda: aten.gelu_backward.default(gradient, x, approximate="tanh"),
            lambda: gelu_tanh_backward(gradient, x),
        ),
    }
    rows = []
    for part, calls in forms.items():
        turns: list[tuple[float, ...]] = []
        for round_ in range(rounds + 1):
            took = tuple(timed(call) for call in (*calls, lambda: copied.copy_(x)))
            if round_:
                turns.append(took)
        torch_seconds, seconds, copy = (
            statistics.median(column) for column in zip(*turns, strict=True)
        )
        ratio = statistics.median(a / b for a, b, _ in turns)
        rows.append(
            {
                "type": name,
                "pass": part,
                "torch_seconds": torch_seconds,
                "seconds": seconds,
                "copy_seconds": copy,
                "ratio": ratio,
            }
        )
    return rows


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    begin = time.perf_counter()
    with torch.no_grad():
        call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()

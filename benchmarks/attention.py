"""Is attention at least as fast as PyTorch's own, in both types?

Causal attention, forward and backward, 12 heads of 64, each with keys of its own or four sharing
them, in the form that the compiler chooses on this processor
(`penstock/compiler/attention_calls.py`), in turns with PyTorch's fused kernel on the same tensors.
Beside the times stands the share of the rate of dense products in float32, measured in the same
run, that the products of half of all pairs of tokens reach.

    python benchmarks/attention.py [--quick]

`value` is the least ratio of PyTorch's time to ours over types, lengths of the sequence and heads
of keys: 1 where both are the same kernel. Beside it is the time in bfloat16 over that in float32,
in our form.
"""

from __future__ import annotations

import penstock  # isort: skip  # noqa: F401 (first: PyTorch reads how its threads wait at import)

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from contract import describe_machine, limits_of_this_machine, print_limits, print_result
from side_by_side import print_table
from torch import fx

from penstock.calibration.operator_cases import Operand, traced
from penstock.compiler import lower_attention
from penstock.engine import set_threads, target_of
from penstock.kernels.processor import Processor

TARGET = 0.9
HEADS, SHARED, SIZE = 12, 3, 64  # heads, those of keys where they are shared, size of a head
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
aten = torch.ops.aten


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two short lengths, few rounds")
    quick = parser.parse_args().quick
    machine = describe_machine()
    set_threads(None)
    lengths, tokens, rounds = ((128, 512), 1024, 3) if quick else ((512, 1024, 2048, 4096), 4096, 7)
    cases = [(length, HEADS) for length in lengths] + [(lengths[1], SHARED)]
    products = target_of("cpu").choose_products(Processor.here())
    limits = limits_of_this_machine(products=["fp32"])
    print_limits(limits)
    limit = 1e9 * limits["products_gflop_per_second"]["fp32"]
    rows = [
        measured(name, length, key_heads, tokens, rounds, products)
        for name in TYPES
        for length, key_heads in cases
    ]
    print_table(
        {
            "type": 5,
            "length": 7,
            "keys": 8,
            "PyTorch": 10,
            "ours": 10,
            "ratio": 7,
            "of products": 12,
        },
        (
            (
                row["type"],
                str(row["length"]),
                f"{row['key_heads']} heads",
                f"{1e3 * row['torch_seconds']:.1f} ms",
                f"{1e3 * row['seconds']:.1f} ms",
                f"{row['ratio']:.3f}",
                f"{row['flops'] / row['seconds'] / limit:.0%}",
            )
            for row in rows
        ),
    )
    seconds = {(row["type"], row["length"], row["key_heads"]): row["seconds"] for row in rows}
    print_result(
        "attention",
        value=round(min(row["ratio"] for row in rows), 3),
        target=TARGET,
        unit="least ratio of the time of PyTorch's fused attention to ours, forward and backward",
        products=products,
        bf16_over_fp32=[round(seconds["bf16", *n] / seconds["fp32", *n], 3) for n in cases],
        rows=rows,
        machine={**machine, "limits": limits},
    )


def attention(*given: Any) -> Any:
    """Return the output of causal attention over `[rows, tokens, heads, size]`, and gradients."""
    query, key, value, gradient = (tensor.transpose(1, 2) for tensor in given)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    out, sums = forward(query, key, value, 0.0, True)
    return out, *backward(gradient, query, key, value, out, sums, 0.0, True)


def measured(
    name: str, length: int, key_heads: int, tokens: int, rounds: int, products: Any
) -> dict[str, Any]:
    """Return the times of both forms at one length of the sequence, medians of rounds in turns."""
    shape = (max(1, tokens // length), length)
    heads = (HEADS, key_heads, key_heads, HEADS)
    operands = tuple(Operand((*shape, count, SIZE), TYPES[name]) for count in heads)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in operands]
    graph = traced(attention, operands, products)
    lower_attention(graph, products)
    ours = fx.GraphModule(torch.nn.Module(), graph)
    times: dict[str, list[float]] = {"torch": [], "ours": []}
    with torch.no_grad():
        for round_ in range(rounds + 1):
            for form, call in (("torch", attention), ("ours", ours)):
                seconds = timed(lambda call=call: call(*tensors))
                if round_:
                    times[form].append(seconds)
    torch_seconds, seconds = (statistics.median(times[form]) for form in ("torch", "ours"))
    ratios = [a / b for a, b in zip(times["torch"], times["ours"], strict=True)]
    pairs = HEADS * operands[0].shape[0] * length * (length + 1) // 2
    return {
        "type": name,
        "length": length,
        "key_heads": key_heads,
        "flops": 7 * 2 * SIZE * pairs,  # two products forward, five backward
        "torch_seconds": torch_seconds,
        "seconds": seconds,
        "ratio": statistics.median(ratios),
    }


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()

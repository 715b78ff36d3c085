"""Are float32 products of dense weights as fast as the faster library makes them?

The three products of a layer's weight (forward, gradient of the inputs, gradient of the weight) for
weights `[inputs, outputs]` as in GPT-2 and `[outputs, inputs]` as in most other models (marked
`^T`), and those of GPT-2's head, in the form that the compiler chooses on this processor
(`penstock/compiler/matmul_backend.py`, `onednn_products.py`). They take turns with PyTorch's
product of the same tensors and with a plain call of oneDNN. Beside the rates stands the share of
the rate of dense products, measured in the same run, and the time of a transposed copy.

    python benchmarks/dense_products.py [--quick]

`value` is the least ratio of the time of the fastest other form to ours.
"""

from __future__ import annotations

import penstock  # isort: skip  # noqa: F401 (first: PyTorch reads how its threads wait at import)

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from contract import describe_machine, limits_of_this_machine, print_limits, print_result
from side_by_side import print_table
from torch import Tensor

from penstock.compiler import Products, has_onednn
from penstock.compiler.matmul_backend import product
from penstock.engine import keep_freed_pages, set_threads, target_of
from penstock.kernels.processor import Processor
from penstock.kernels.transposed_copy import copy_transposed

TARGET = 0.95
TOKENS, WIDTH, VOCABULARY = 2048, 768, 50257
COPIED = 3072  # columns of a matrix of which a transposed copy is timed
CHUNK, BAND = 512, 4096  # tokens, and labels of a head that are multiplied together
LAYERS = {  # inputs and outputs
    "attention": (768, 2304),
    "up": (768, 3072),
    "down": (3072, 768),
    "wide": (2048, 4096),
}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one layer, a small head, few rounds")
    quick = parser.parse_args().quick
    machine = describe_machine()
    set_threads(None)
    keep_freed_pages()
    products = target_of("cpu").choose_products(Processor.here())
    limits = limits_of_this_machine(products=["fp32"])
    print_limits(limits)
    layers = {"down": LAYERS["down"]} if quick else LAYERS
    tokens, vocabulary, rounds = (1280, 10_007, 3) if quick else (TOKENS, VOCABULARY, 7)
    cases = [*layer_products(layers, tokens), *head_products(CHUNK, vocabulary)]
    limit = 1e9 * limits["products_gflop_per_second"]["fp32"]
    rows = [measured(case, rounds, products, limit) for case in cases]
    print_table(
        {
            "weight": 12,
            "product": 18,
            "PyTorch": 9,
            "oneDNN": 9,
            "ours": 9,
            "ratio": 6,
            "of products": 12,
        },
        (
            (
                row["weight"],
                row["product"],
                f"{row['torch']:.0f}",
                "" if row["onednn"] is None else f"{row['onednn']:.0f}",
                f"{row['ours']:.0f}",
                f"{row['ratio']:.3f}",
                f"{row['share']:.0%}",
            )
            for row in rows
        ),
    )
    print("rates in GFLOP/s")
    copies = measured_copies(tokens, rounds)
    print(
        f"transposed copy of {tokens} x {COPIED}: PyTorch {copies['torch']:.2f} ms, "
        f"ours {copies['ours']:.2f} ms"
    )
    print_result(
        "dense_products",
        value=round(min(row["ratio"] for row in rows), 3),
        target=TARGET,
        unit="least ratio of the time of the faster of PyTorch's and oneDNN's product to ours",
        products=products,
        rows=rows,
        transposed_copy_milliseconds=copies,
        machine={**machine, "limits": limits},
    )


class Case(NamedTuple):
    """A product: the name of its weight, its own, and its two factors."""

    weight: str
    product: str
    left: Tensor
    right: Tensor


def layer_products(layers: dict[str, tuple[int, int]], tokens: int) -> Iterator[Case]:
    """Yield the products of weights in both orientations."""
    for label, (inputs, outputs) in layers.items():
        x, dy = torch.randn(tokens, inputs), torch.randn(tokens, outputs)
        for stored in ((inputs, outputs), (outputs, inputs)):
            weight = torch.randn(stored)
            is_stored_by_inputs = stored == (inputs, outputs)
            matrix = weight if is_stored_by_inputs else weight.t()
            name = f"{label}{'' if is_stored_by_inputs else '^T'}"
            yield Case(name, "forward", x, matrix)
            yield Case(name, "inputs' gradient", dy, matrix.t())
            left, right = (x, dy) if is_stored_by_inputs else (dy, x)
            yield Case(name, "weight's gradient", left.t(), right)


def head_products(rows: int, vocabulary: int) -> Iterator[Case]:
    """Yield the products of a chunk of a head, of which the gradient of the weight is one band."""
    hidden, weight = torch.randn(rows, WIDTH), torch.randn(vocabulary, WIDTH)
    logits = torch.randn(rows, vocabulary)
    yield Case("head", "forward", hidden, weight.t())
    yield Case("head", "inputs' gradient", logits, weight)
    yield Case("head", "weight's gradient", logits[:, :BAND].t(), hidden)


def measured(case: Case, rounds: int, products: Products, limit: float) -> dict[str, Any]:
    """Return the rates of one product in turns, medians, in GFLOP/s."""
    left, right = case.left, case.right
    forms: dict[str, Callable[[], object]] = {
        "torch": lambda: torch.mm(left, right),
        "ours": lambda: product(left, right, products),
    }
    if has_onednn():
        linear = torch.ops.mkldnn._linear_pointwise.default
        forms["onednn"] = lambda: linear(left, right.t(), None, "none", [], "")
    times = timed_in_turns(forms, rounds)
    flops = 2 * left.shape[0] * left.shape[1] * right.shape[1]
    rates = {each: flops / statistics.median(own) / 1e9 for each, own in times.items()}
    others = [times[each] for each in forms if each != "ours"]
    ratios = [
        statistics.median(a / b for a, b in zip(own, times["ours"], strict=True)) for own in others
    ]
    return {
        "weight": case.weight,
        "product": case.product,
        "torch": round(rates["torch"], 1),
        "onednn": round(rates["onednn"], 1) if "onednn" in rates else None,
        "ours": round(rates["ours"], 1),
        "ratio": round(min(ratios), 3),
        "share": round(1e9 * rates["ours"] / limit, 3),
    }


def measured_copies(tokens: int, rounds: int) -> dict[str, float]:
    """Return the milliseconds of a transposed copy in turns, medians."""
    source = torch.randn(tokens, COPIED)
    target = torch.empty(COPIED, tokens)
    forms: dict[str, Callable[[], object]] = {
        "torch": lambda: target.copy_(source.t()),
        "ours": lambda: copy_transposed(source.numpy(), target.view(-1).numpy()),
    }
    times = timed_in_turns(forms, rounds)
    return {each: round(1e3 * statistics.median(own), 3) for each, own in times.items()}


def timed_in_turns(forms: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each form in each round; the first one of a round changes."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    order = list(forms)
    for round_ in range(rounds + 1):
        order.append(order.pop(0))
        for each in order:
            begin = time.perf_counter()
            forms[each]()
            if round_:
                times[each].append(time.perf_counter() - begin)
    return times


if __name__ == "__main__":
    main()

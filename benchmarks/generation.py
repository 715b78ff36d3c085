"""How fast is a token generated, beside `transformers` and with sparse weights?

GPT-2 with random weights of 124 M parameters writes greedily after a prompt that leaves a window of
256 or 1,024 tokens almost full. Four processes take turns, some tokens each: `transformers` (eager,
its own cache of keys and values), Penstock dense, Penstock with blocks that keep a tenth of their
weights, and one that does nothing but read memory. Both dense loops have the same weights, and in
float32 tokens that differ are an error. What is measured is a token, not the prompt.

A token needs every weight once, and memory decides: beside the times stands the share of the
memory's read rate, which the bytes of weights, keys and values make at that time (for a sparse
weight: its values and columns).

    python benchmarks/generation.py [--quick] [--rounds N]

`value` is the least ratio of the time of `transformers` to ours, dense weights. Where the processor
has no products of bfloat16, both compute in float32 only.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from contract import READ_BYTES, describe_machine, plain_precisions, print_result, start_reads
from side_by_side import Worker, median_ratio, peak_rss_bytes, print_table, serve, take_turns
from side_by_side.resident import gpt2_config, initial_gpt2

TARGET, SPARSITY, SEED, VOCABULARY = 1.0, 0.9, 0, 50257
OTHER, DENSE, SPARSE, READS = "transformers", "dense", "sparse", "reads"
WARM_UP = 2


@dataclasses.dataclass(frozen=True)
class Job:
    """What one worker writes.

    Attributes:
        loop: `OTHER`, `DENSE` or `SPARSE`.
        prompt: tokens before the first that is written.
        tokens: of a step.
    """

    loop: str
    precision: str
    layers: int
    window: int
    prompt: int
    tokens: int


def main() -> None:
    """Run the benchmark, or one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one layer, window of 128")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--worker", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        job = Job(**json.loads(options.worker))
        loop = Other(job) if job.loop == OTHER else Ours(job)
        serve(loop.step, describe=loop.describe)
        return
    layers, windows, tokens = (1, (128,), 4) if options.quick else (12, (256, 1024), 8)
    rounds = options.rounds or (3 if options.quick else 9)
    machine = describe_machine()
    rows = []
    for precision in ["fp32"] if options.quick else plain_precisions():
        for window in windows:
            prompt = window - (WARM_UP + rounds) * tokens
            job = Job("", precision, layers, window, prompt, tokens)
            rows.append(compare(job, rounds))
    print_rows(rows)
    products = {name: products_alone(name, options.quick) for name in plain_precisions()}
    for name, ratios in products.items():
        shown = ", ".join(f"{shape} {ratio:.2f}" for shape, ratio in ratios.items())
        print(f"products of one token, {name}, PyTorch's time over ours: {shown}")
    print_result(
        "generation",
        value=round(min(row["ratio"][OTHER] for row in rows), 3),
        target=TARGET,
        unit="least ratio of transformers' time per token to Penstock's, dense weights",
        sparsity=SPARSITY,
        rounds=rounds,
        rows=rows,
        products=products,
        machine=machine,
    )


def compare(job: Job, rounds: int) -> dict[str, Any]:
    """Let the loops take turns; return the figures of one precision and window."""
    jobs = {name: dataclasses.replace(job, loop=name) for name in (OTHER, DENSE, SPARSE)}
    workers = {name: Worker(one, __file__) for name, one in jobs.items()}
    workers[READS] = start_reads()
    seconds = take_turns(workers, rounds, WARM_UP)
    found = {name: workers[name].finish() for name in jobs}
    workers[READS].finish()
    written = {name: workers[name].losses for name in jobs}
    if job.precision == "fp32" and written[OTHER] != written[DENSE]:
        raise SystemExit(
            f"the tokens of dense and {OTHER} were expected to be equal in fp32, got "
            f"{written[DENSE]} and {written[OTHER]}"
        )
    rates = [READ_BYTES / s for s in seconds[READS]]
    bytes_per_second = {
        name: [job.tokens * found[name]["bytes_per_token"] / s for s in seconds[name]]
        for name in (DENSE, SPARSE)
    }
    return {
        "precision": job.precision,
        "window": job.window,
        "seconds_per_token": {n: statistics.median(seconds[n]) / job.tokens for n in jobs},
        "ratio": {n: round(median_ratio(seconds[n], seconds[DENSE]), 3) for n in (OTHER, SPARSE)},
        "share_of_reads": {
            name: round(median_ratio(own, rates), 3) for name, own in bytes_per_second.items()
        },
        "read_gb_per_second": round(statistics.median(rates) / 1e9, 1),
        "runs": found,
    }


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print a row for each precision and window."""
    names = (OTHER, DENSE, SPARSE)
    columns = {"type": 5, "window": 7, **dict.fromkeys(names, 13), "over transformers": 18}
    columns |= {"sparse over dense": 18, "of reads": 12}
    print_table(
        columns,
        (
            (
                row["precision"],
                str(row["window"]),
                *(f"{1e3 * row['seconds_per_token'][name]:.2f} ms" for name in names),
                f"{row['ratio'][OTHER]:.2f}x",
                f"{1 / row['ratio'][SPARSE]:.2f}x",
                " ".join(f"{row['share_of_reads'][name]:.0%}" for name in (DENSE, SPARSE)),
            )
            for row in rows
        ),
    )


def products_alone(precision: str, quick: bool) -> dict[str, float]:
    """Return PyTorch's time over ours of GPT-2's products with one token, by shape.

    Weights are `[inputs, outputs]` in memory, that of the head `[outputs, inputs]`. Each product
    reads another weight, so that none is in a cache.
    """
    import torch

    from penstock.compiler import token_products
    from penstock.engine import set_threads

    set_threads(None)
    dtype, most = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision], 1 << (26 - 2 * quick)
    found = {}
    for inputs, outputs in ((768, 2304), (768, 768), (768, 3072), (3072, 768), (768, VOCABULARY)):
        count = max(2, most // (inputs * outputs))
        weights = [torch.randn(inputs, outputs).to(dtype) for _ in range(count)]
        if outputs == VOCABULARY:
            weights = [weight.t().contiguous().t() for weight in weights]
        x = torch.randn(1, inputs).to(dtype)
        forms: dict[str, Callable[[Any], Any]] = {
            "torch": lambda weight, x=x: torch.mm(x, weight),
            "ours": lambda weight, x=x: token_products.linear(x, weight.t()),
        }
        seconds: dict[str, list[float]] = {name: [] for name in forms}
        for number in range(6):
            for name in sorted(forms, reverse=bool(number % 2)):
                began = time.perf_counter()
                for weight in weights:
                    forms[name](weight)
                seconds[name].append(time.perf_counter() - began)
        found[f"{inputs}x{outputs}"] = round(median_ratio(seconds["torch"], seconds["ours"]), 2)
    return found


class Loop:
    """Writes tokens after a prompt."""

    def __init__(self, job: Job, tokens: Iterator[int]) -> None:
        self._job, self._tokens = job, tokens
        self.bytes_per_token = 0

    def step(self) -> float:
        """Write some tokens; return the number of the last."""
        written = [next(self._tokens) for _ in range(self._job.tokens)]
        return float(written[-1])

    def describe(self) -> dict[str, Any]:
        """Return what a token reads, and the peak memory."""
        return {"bytes_per_token": self.bytes_per_token, "peak_rss_bytes": peak_rss_bytes()}


class Ours(Loop):
    """Penstock's loop."""

    def __init__(self, job: Job) -> None:
        from penstock.data import ArraySource
        from penstock.training import Trainer

        ids = prompt_of(8)
        is_sparse = job.loop == SPARSE
        trainer = Trainer(
            {
                "model": {"preset": "gpt2", "n_layer": job.layers},
                "precision": job.precision,
                "data": {"sequence_length": job.window},
                "batch": {"size": 1},
                "sparsity": {"method": "static", "sparsity": SPARSITY} if is_sparse else {},
                "engine": {"device": "cpu"},
                "run": {"dir": tempfile.mkdtemp(), "seed": SEED},
            },
            source=ArraySource({"input_ids": [ids], "labels": [ids]}),
            quiet=True,
        )
        generator = trainer.token_generator()
        count = job.window - job.prompt
        super().__init__(
            job, generator.generate(prompt_of(job.prompt), max_new_tokens=count, temperature=0)
        )
        width = trainer.program.weights["transformer.wte.weight"].shape[1]
        element = 2 if job.precision == "bf16" else 4
        self.bytes_per_token = 2 * job.layers * job.prompt * width * element
        for weight in trainer.program.weights.values():
            if weight.name == "transformer.wpe.weight":
                continue  # a token reads one row
            of_column = 4 if weight.is_sparse else 0
            self.bytes_per_token += weight.entries * (element + of_column)


class Other(Loop):
    """The loop of `transformers`."""

    def __init__(self, job: Job) -> None:
        import torch

        model = initial_gpt2(gpt2_config(n_layer=job.layers), SEED).eval()
        if job.precision == "bf16":
            model = model.bfloat16()
        super().__init__(job, greedy(model, torch.tensor([prompt_of(job.prompt)])))


def greedy(model: Any, ids: Any) -> Iterator[int]:
    """Yield the most likely tokens after `ids` [1, tokens], with keys and values of all before."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    while True:
        with torch.no_grad():
            logits = model(ids, cache=cache, use_cache=True, logits_to_keep=1).logits
        ids = logits[:, -1].argmax(-1, keepdim=True)
        yield int(ids)


def prompt_of(tokens: int) -> list[int]:
    """Return a prompt of so many tokens."""
    import numpy as np

    found: list[int] = np.random.default_rng(SEED).integers(0, VOCABULARY, tokens).tolist()
    return found


if __name__ == "__main__":
    main()

"""What sparse training costs in quality: held-out loss at equal steps and at equal FLOPs.

A GPT is trained byte by byte on the source of Python's standard library: dense, with the four
methods at two sparsities, with sparse pre-training and dense fine-tuning (masks are lifted after
80 % of the steps), and as a narrower dense model with as many parameters in its blocks as the
sparse one keeps. At equal FLOPs a sparse run gets more steps, until its products, forward and
backward, have cost as many operations as those of the dense run. All runs of a seed see the same
text in the same order.

    python benchmarks/sparse_quality.py [--quick] [--seeds N] [--steps N] [--changes N] [--jobs N]
        [--results FILE] [--plot FILE]

Finished runs are kept in the results file, so that a run that was stopped goes on. `value` is the
greater of two differences, SET's and RigL's held-out loss less that of static masks, at 90 % and
equal steps, means over seeds: below 0 if both are better.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from contract import describe_machine, print_result

LENGTH, SEQUENCES, WIDTH, LAYERS, HEAD = 128, 16, 192, 3, 32
VALIDATION_ROWS, QUICK_VALIDATION_ROWS = 512, 128
METHODS = ("static", "gmp", "set", "rigl")
SPARSITIES = (0.75, 0.9)


@dataclasses.dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        name: of the method, as in the table.
        sparsity: of the blocks; of `narrow`, the share of parameters that it lacks.
        budget: "steps" or "flops", what it has as much of as the dense run.
        steps: of the dense run.
        changes: of the masks that would fit into the run.
    """

    name: str
    sparsity: float
    budget: str
    seed: int
    steps: int
    changes: int

    @property
    def key(self) -> str:
        """What identifies the run in the results."""
        return json.dumps(dataclasses.astuple(self))


def main() -> None:
    """Run the benchmark, or one of its runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, few steps, 90 %% alone")
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--steps", type=int, default=None, help="of the dense run")
    parser.add_argument(
        "--changes", type=int, default=30, help="of the masks, if a run had them to its end"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, of one thread each")
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None)
    parser.add_argument("--run", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(train(Case(**json.loads(options.run)), options.quick)))
        return
    seeds = options.seeds or (1 if options.quick else 3)
    steps = options.steps or (8 if options.quick else 600)
    machine = describe_machine()
    cases = [
        case
        for seed in range(seeds)
        for case in cases_of(seed, steps, options.changes, options.quick)
    ]
    results = run_all(cases, options.results, options.jobs, options.quick)
    rows = table(cases, results)
    print_rows(rows)
    if options.plot:
        plot(rows, options.plot)
    losses = {(r["name"], r["sparsity"], r["budget"]): r["loss"] for r in rows}
    static = losses["static", 0.9, "steps"]
    differences = [losses[name, 0.9, "steps"] - static for name in ("set", "rigl")]
    print_result(
        "sparse_quality",
        round(max(differences), 4),
        target=0.0,
        unit="nats per byte, held-out loss less that of static masks",
        machine=machine,
        steps=steps,
        changes=options.changes,
        seeds=seeds,
        rows=rows,
    )


def cases_of(seed: int, steps: int, changes: int, quick: bool) -> list[Case]:
    """Return the runs of a seed."""

    def case(name: str, sparsity: float, budget: str = "steps") -> Case:
        return Case(name, sparsity, budget, seed, steps, changes)

    if quick:
        return [case(name, 0.9) for name in ("static", "set", "rigl")]
    found = [case("dense", 0.0)]
    for sparsity in SPARSITIES:
        found += [case(name, sparsity) for name in (*METHODS, "narrow", "lifted")]
        found += [case(name, sparsity, "flops") for name in (*METHODS, "narrow")]
    return found


def run_all(cases: list[Case], path: Path | None, jobs: int, quick: bool) -> dict[str, dict]:
    """Run what the results file lacks, in processes of one thread; return the result of each."""
    results: dict[str, dict] = {}
    if path is not None and path.exists():
        results = {line["key"]: line for line in map(json.loads, path.read_text().splitlines())}
    missing = [case for case in cases if case.key not in results]

    def run(case: Case) -> dict:
        command = [sys.executable, __file__, "--run", json.dumps(dataclasses.asdict(case))]
        command += ["--quick"] if quick else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return {"key": case.key, **json.loads(done.stdout.splitlines()[-1])}

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for future in concurrent.futures.as_completed([pool.submit(run, c) for c in missing]):
            result = future.result()
            results[result["key"]] = result
            print(result["key"], f"{result['loss']:.4f}", flush=True)
            if path is not None:
                with path.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    return results


def table(cases: list[Case], results: dict[str, dict]) -> list[dict]:
    """Return a row per method, sparsity and budget: mean and deviation over seeds."""
    groups: dict[tuple[str, float, str], list[dict]] = {}
    for case in cases:
        key = (case.name, case.sparsity, case.budget)
        groups.setdefault(key, []).append(results[case.key])
    return [
        {
            "name": name,
            "sparsity": sparsity,
            "budget": budget,
            "steps": found[0]["steps"],
            "flops": statistics.mean(one["flops"] for one in found),
            "loss": round(statistics.mean(one["loss"] for one in found), 4),
            "deviation": round(statistics.stdev(one["loss"] for one in found), 4)
            if len(found) > 1
            else None,
        }
        for (name, sparsity, budget), found in groups.items()
    ]


def print_rows(rows: list[dict]) -> None:
    """Print the table."""
    print(
        f"\n{'run':8} {'sparsity':>8} {'equal':>6} {'steps':>6} {'TFLOP':>8} {'held-out loss':>20}"
    )
    for row in rows:
        spread = "" if row["deviation"] is None else f" ± {row['deviation']:.4f}"
        print(
            f"{row['name']:8} {row['sparsity']:8.0%} {row['budget']:>6} {row['steps']:6} "
            f"{row['flops'] / 1e12:8.2f} {row['loss']:12.4f}{spread}"
        )


def plot(rows: list[dict], path: Path) -> None:
    """Draw the losses with error bars, equal steps on the left, equal FLOPs on the right."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axes, budget in zip(panels, ("steps", "flops"), strict=True):
        for number, sparsity in enumerate(SPARSITIES):
            chosen = [r for r in rows if (r["sparsity"], r["budget"]) == (sparsity, budget)]
            places = [place + 0.2 * (number - 0.5) for place in range(len(chosen))]
            axes.errorbar(
                places,
                [r["loss"] for r in chosen],
                yerr=[r["deviation"] or 0 for r in chosen],
                fmt="o",
                capsize=3,
                label=f"{sparsity:.0%} sparse",
            )
            axes.set_xticks(range(len(chosen)), [r["name"] for r in chosen])
        for row in rows:
            if row["name"] == "dense":
                axes.axhline(row["loss"], color="gray", linestyle="--", label="dense")
        axes.set_title(f"equal {'steps' if budget == 'steps' else 'FLOPs'}")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("held-out loss, nats per byte")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


# --- one run --------------------------------------------------------------------------------------


def train(case: Case, quick: bool) -> dict:
    """Train, and return the held-out loss, the steps and the operations."""
    steps = case.steps if case.budget == "steps" else steps_of_equal_flops(case)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, steps, folder)
        flops = sum(trainer.run_step().flops for _ in range(steps))
        rows = QUICK_VALIDATION_ROWS if quick else VALIDATION_ROWS
        loss = trainer.evaluate(rows // SEQUENCES)["loss"]
        trainer.close()
    return {"loss": loss, "steps": steps, "flops": flops}


def make_trainer(case: Case, steps: int, folder: str):  # type: ignore[no-untyped-def]
    """Return the trainer of a run, on one thread."""
    from penstock.data import ArraySource
    from penstock.training import Trainer

    training, held_out = rows_of_text(case.seed)
    return Trainer(
        settings(case, steps, folder),
        source=ArraySource(training),
        held_out=ArraySource(held_out),
        quiet=True,
    )


def rows_of_text(seed: int) -> tuple[dict, dict]:
    """Return rows of Python source for training, in an order by seed, and others held out."""
    import numpy as np

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = np.frombuffer(b"\n".join(path.read_bytes() for path in files), np.uint8)
    rows = text[: text.size // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    rows = np.random.default_rng(0).permutation(rows).astype(np.int64)
    held_out, training = rows[:VALIDATION_ROWS], rows[VALIDATION_ROWS:]
    training = np.random.default_rng(seed).permutation(training)
    return tuple({"input_ids": r[:, :-1], "labels": r[:, 1:]} for r in (training, held_out))


def settings(case: Case, steps: int, folder: str) -> dict:
    """Return the configuration of a run."""
    width = WIDTH
    if case.name == "narrow":
        width = max(1, round(WIDTH * math.sqrt(1 - case.sparsity) / HEAD)) * HEAD
    method = {"lifted": "static"}.get(case.name, case.name)
    sparsity: dict = {}
    if method in METHODS:
        sparsity = {"method": method, "sparsity": case.sparsity}
        if method != "static":
            sparsity["update_every"] = max(2, steps // max(1, case.changes))
        if case.name == "lifted":
            sparsity["densify_at"] = 0.8
    return {
        "model": {
            "preset": "gpt2",
            "n_layer": LAYERS,
            "n_embd": width,
            "n_head": width // HEAD,
            "vocab_size": 256,
            "n_positions": LENGTH,
        },
        "data": {"sequence_length": LENGTH},
        "batch": {"size": SEQUENCES, "micro": SEQUENCES},
        "optimizer": {
            "learning_rate": 2e-3,
            "schedule": {"name": "cosine", "warmup_steps": max(1, steps // 20)},
        },
        "sparsity": sparsity,
        "engine": {"device": "cpu", "threads": 1},
        "run": {"dir": folder, "seed": case.seed, "steps": steps},
    }


def steps_of_equal_flops(case: Case) -> int:
    """Return the steps after which a run has cost as many operations as the dense one.

    A step of `gmp` costs, on average over the run, what a step at its average density does.
    """
    dense = step_flops(dataclasses.replace(case, name="dense", sparsity=0.0))
    if case.name == "narrow":
        return round(case.steps * dense / step_flops(case))
    sparse = step_flops(dataclasses.replace(case, name="static"))
    if case.name == "gmp":
        # Dense for a quarter of the run, sparse for a quarter, and between them a cubic fall from
        # 1 to 1 - s, whose mean is 1 - 3/4 s.
        s = case.sparsity
        density = 0.25 + 0.5 * (1 - 0.75 * s) + 0.25 * (1 - s)
        sparse = dense - (dense - sparse) * (1 - density) / s
    return round(case.steps * dense / sparse)


def step_flops(case: Case) -> int:
    """Return the operations of the first step of a run."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, case.steps, folder)
        flops: int = trainer.run_step().flops
        trainer.close()
    return flops


if __name__ == "__main__":
    main()

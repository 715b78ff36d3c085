"""How fast is the simulated mesh, and how does its time grow with the mesh and with the work?

Forward products of a sparse weight are simulated on larger and larger meshes, with as much work for
each core, and with more and more work on one mesh. A message is a word that passes a link. Then one
small product is simulated by a plain event-queue simulator written with SimPy too: the same rules,
one process per router and thread. Both must find the same numbers and the same cycles. Rounds of
both alternate; the median of the ratios counts.

    python benchmarks/wafer_speed.py [--quick]

`value` is how many times as fast the compiled simulator is as the one in SimPy, on that product.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from contract import describe_machine, print_result

DENSITY = 0.1


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    quick = parser.parse_args().quick
    simulate(4, 4, 8)  # compiles
    sides = (8, 16, 32, 64)
    heads = ("mesh", "outputs", "cycles", "messages", "seconds", "per second")
    titles = zip(heads, (8, 8, 9, 12, 8, 12), strict=True)
    print(" ".join(f"{head:>{size}}" for head, size in titles))
    by_mesh = [measured(side, 4 * side, 64) for side in sides]
    by_work = [measured(16, 64, outputs) for outputs in (32, 128, 512)]
    rounds = beside_simpy(2 if quick else 5)
    ratio = statistics.median(row["ratio"] for row in rounds)
    print(
        f"SimPy: {rounds[0]['simpy_seconds']:.2f} s for {rounds[0]['messages']:,} messages in "
        f"{rounds[0]['cycles']:,.0f} cycles; compiled {rounds[0]['seconds'] * 1000:.1f} ms: "
        f"{ratio:.0f} times as fast"
    )
    print_result(
        "wafer_speed",
        value=round(ratio, 1),
        target=100.0,
        unit="times as fast as SimPy",
        machine=describe_machine(),
        quick=quick,
        messages_per_second=max(row["messages_per_second"] for row in by_mesh + by_work),
        by_mesh=by_mesh,
        by_work=by_work,
        rounds=rounds,
    )


def product(side: int, inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a weight, its mask and activations of 8 tokens per column of cores."""
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((outputs, inputs)).astype(np.float32)
    activations = generator.standard_normal((8 * side, inputs)).astype(np.float32)
    return weight, generator.random(weight.shape) < DENSITY, activations


def prepared(side: int, inputs: int, outputs: int) -> Any:
    """Return the forward product as a program that has not run."""
    from penstock.wafer import SIM, Mesh
    from penstock.wafer.closed_form import StreamingOptions
    from penstock.wafer.programs import Run, Spread
    from penstock.wafer.programs.sparse_forward import Forward

    weight, mask, activations = product(side, inputs, outputs)
    run = Run(Mesh(side, side), SIM, StreamingOptions(inbox_rows=8), rounds=False)
    spread = Spread(mask, len(activations), run)
    return Forward(spread, run, weight, activations, is_indexed=True)


def simulate(side: int, inputs: int, outputs: int) -> tuple[Any, np.ndarray, float]:
    """Return the report, the numbers and the seconds of a product, its tables made as well."""
    made = prepared(side, inputs, outputs)
    began = time.perf_counter()
    done = made.program.run()
    seconds = time.perf_counter() - began
    return done.report, made.result(done), seconds


def measured(side: int, inputs: int, outputs: int) -> dict[str, Any]:
    """Simulate a product, print and return its figures."""
    report, _, seconds = simulate(side, inputs, outputs)
    row = {
        "mesh": f"{side}x{side}",
        "outputs": outputs,
        "cycles": report.cycles,
        "messages": report.hops,
        "seconds": round(seconds, 4),
        "messages_per_second": round(report.hops / seconds),
    }
    print(
        f"{row['mesh']:>8} {outputs:>8} {report.cycles:>9,.0f} {report.hops:>12,} {seconds:>8.3f} "
        f"{row['messages_per_second']:>12,}"
    )
    return row


def beside_simpy(rounds: int) -> list[dict[str, Any]]:
    """Simulate one small product with both simulators in turns; return what each round took."""
    from side_by_side.mesh_in_simpy import forward_in_simpy

    from penstock.wafer import SIM, Mesh
    from penstock.wafer.closed_form import StreamingOptions
    from penstock.wafer.programs import Run

    side, inputs, outputs = 8, 32, 96
    weight, mask, activations = product(side, inputs, outputs)
    run = Run(Mesh(side, side), SIM, StreamingOptions(inbox_rows=8), rounds=False)
    found = []
    for _ in range(rounds):
        # The compiled one takes milliseconds: the median of several runs.
        runs = [simulate(side, inputs, outputs) for _ in range(7)]
        report, numbers, _ = runs[0]
        seconds = statistics.median(one[2] for one in runs)
        began = time.perf_counter()
        others, cycles, hops = forward_in_simpy(weight, mask, activations, run, 8)
        simpy_seconds = time.perf_counter() - began
        if not (numbers == others).all() or cycles != report.cycles:
            raise RuntimeError(
                f"the simulators differ: {report.cycles} and {cycles} cycles, numbers by at most "
                f"{np.abs(numbers - others).max()}"
            )
        found.append(
            {
                "ratio": round(simpy_seconds / seconds, 1),
                "seconds": round(seconds, 5),
                "simpy_seconds": round(simpy_seconds, 3),
                "cycles": cycles,
                "messages": hops,
            }
        )
    return found


if __name__ == "__main__":
    main()

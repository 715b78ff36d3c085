"""Does the closed form of the wafer say what was published of other programs on its cores?

Prints every published cycle count that has a model as published, ours and the ratio, with what
each row was used for, and for relays and forms of loops the cycles on the simulated mesh; then how
well each sparse product is met by constants fitted to the other four; and then the acceleration of
two layers of GPT-3 175B by sparsity on a CS-2, with what binds.
Nothing is measured: the machine that runs it changes no figure.

    python benchmarks/wafer_published.py [--quick]

`value` is the share of published rows that are met within 15 %. --quick leaves out the larger
layer.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import numpy as np
from contract import describe_machine, print_result

TOLERANCE = 0.15
WIDTH, TOKENS = 12288, 131072  # 64 sequences of 2048 tokens
ENGINES = 16
SPARSITIES = (0.5, 0.75, 0.9, 0.95, 0.975, 0.99, 0.995, 0.999)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="without the larger layer")
    options = parser.parse_args()
    rows = print_published()
    left_out = print_left_out()
    curves = [
        curve
        for outputs in ((WIDTH,) if options.quick else (WIDTH, 4 * WIDTH))
        for curve in print_curves(outputs)
    ]
    met = [abs(row["ratio"] - 1) <= TOLERANCE for row in rows]
    free = [row["ratio"] for row in rows if row["use"] == "not fitted"]
    print_result(
        "wafer_published",
        value=round(sum(met) / len(met), 3),
        target=1.0,
        unit="share of published cycle counts met within 15 %",
        rows=rows,
        worst_not_fitted=round(max(free, key=lambda ratio: abs(ratio - 1)), 3),
        left_out=left_out,
        acceleration=curves,
        machine=describe_machine(),
    )


def print_published() -> list[dict[str, Any]]:
    """Print and return the published rows."""
    from penstock.wafer import NOT_MODELLED, published_rows

    print(
        f"{'program':58} {'published':>10} {'ours':>10} {'ratio':>6} {'simulated':>10} {'ratio':>6}"
        "  constants"
    )
    found = []
    for row in published_rows():
        what = f"{row.group}: {row.what}"
        cycles = simulated_cycles(row.group, row.what)
        shown = f"{'-':>10} {'-':>6}"
        if cycles is not None:
            shown = f"{cycles:>10,.6g} {cycles / row.published:>6.3f}"
        print(
            f"{what:58} {row.published:>10,.6g} {row.modelled:>10,.6g} {row.ratio:>6.3f} {shown}"
            f"  {row.use}"
        )
        found.append({**dataclasses.asdict(row), "ratio": round(row.ratio, 4), "simulated": cycles})
    for what, why in NOT_MODELLED:
        print(f"no model: {what}: {why}")
    return found


def simulated_cycles(group: str, what: str) -> float | None:
    """Return the cycles of a row's program on the simulated mesh; None if there is none for it."""
    from penstock.wafer import SIM
    from penstock.wafer.programs import LOOP_FORMS, simulate_loop_form, simulate_relay

    if group == "loop form" and what in LOOP_FORMS:
        return simulate_loop_form(what, SIM)[1].cycles
    if group == "relay" and "words over" in what:
        words, cores = (int(part) for part in what.split() if part.isdecimal())
        return simulate_relay(np.ones(words), cores, SIM)[1].cycles
    return None


def print_left_out() -> list[float]:
    """Print and return the ratio of each sparse product to what a fit to the other four says."""
    from penstock.wafer import SPARSE_ROWS, fit_sparse_kernel

    ratios = []
    for number, row in enumerate(SPARSE_ROWS):
        index, element = fit_sparse_kernel(SPARSE_ROWS[:number] + SPARSE_ROWS[number + 1 :])
        ours = (row.entries + row.columns) * index + row.entries * row.m * element
        ratios.append(round(ours / row.mean, 3))
        print(
            f"left out {row.width}x{row.height}, {row.n}x{row.k}x{row.m}: the others give "
            f"{index:.1f} cycles per index and {element:.3f} per element; ratio {ratios[-1]:.3f}"
        )
    return ratios


def print_curves(outputs: int) -> list[dict[str, Any]]:
    """Print and return the acceleration of a layer, forward and in all three products."""
    from penstock.wafer import CS2_MESH, SILICON, SIM
    from penstock.wafer.closed_form import HIDDEN, PAID, PRODUCTS, acceleration_curve

    found = []
    for core, engines, rule, products, options in (
        (SIM, 1, "plain", ("forward",), HIDDEN),
        (SIM, 1, "best", ("forward",), HIDDEN),
        (SIM, 1, "dense", ("forward",), HIDDEN),
        (SIM, 1, "plain", ("forward",), PAID),
        (SIM, 1, "best", ("forward",), PAID),
        (SIM, ENGINES, "best", ("forward",), HIDDEN),
        (SIM, 1, "best", PRODUCTS, HIDDEN),
        (SIM, ENGINES, "best", PRODUCTS, HIDDEN),
        (SILICON, 1, "best", PRODUCTS, HIDDEN),
    ):
        curve = acceleration_curve(
            outputs,
            WIDTH,
            TOKENS,
            CS2_MESH,
            core,
            sparsities=SPARSITIES,
            products=products,
            layout=rule,
            engines=engines,
            options=options,
        )
        what = (
            f"{outputs} x {WIDTH}, {TOKENS} tokens, {engines} engines, {core.name}, sums "
            f"{options.sums}"
        )
        dense = curve[0].dense
        print(
            f"{what}, {' + '.join(products)}, {rule} layout: dense {curve[0].dense_cycles:,.0f} "
            f"cycles, {dense[0].utilization:.1%} of peak, bound by {dense[0].largest_part}"
        )
        for point in curve:
            print(
                f"  {point.sparsity:6.1%} {point.acceleration:7.2f} of {point.ideal:6.0f}  "
                f"{point.products[0].utilization:5.1%} of peak  {point.binding:22} "
                f"{point.layout}"
            )
        points = [
            {
                "sparsity": point.sparsity,
                "acceleration": round(point.acceleration, 3),
                "cycles": round(point.cycles),
                "binding": point.binding,
                "layout": str(point.layout),
            }
            for point in curve
        ]
        found.append(
            {
                "layer": what,
                "products": list(products),
                "layout": rule,
                "dense_cycles": round(curve[0].dense_cycles),
                "points": points,
            }
        )
    return found


if __name__ == "__main__":
    main()

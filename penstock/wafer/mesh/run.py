"""Run the tables of a program and report what happened."""

from __future__ import annotations

from penstock.kernels import mesh_tables as tables
from penstock.kernels.mesh_tables import MeshTables
from penstock.wafer.mesh.faults import check_run
from penstock.wafer.mesh.labels import Labels
from penstock.wafer.mesh.report import MeshReport, make_report
from penstock.wafer.mesh.ticks import Ticks


def run_tables(t: MeshTables, labels: Labels, ticks: Ticks) -> MeshReport:
    """Simulate a program to its end; the tables then hold its memory and what left the mesh.

    Raises:
        MeshError: a fault of the program or a deadlock, with core, colour and cycle.
    """
    from penstock.kernels.mesh_simulation import simulate

    # Threads and streams begin; routers have no word yet.
    first, after = int(t.clock[tables.CORES]), len(t.events)
    t.work[: after - first] = range(first, after)
    t.events[first:, tables.IN_WORK] = 1
    t.clock[tables.WORK_COUNT] = after - first
    simulate(t.integers, t.floats)
    check_run(t, labels, ticks)
    return make_report(t, labels, ticks)

"""Run the tables of a program and report what happened."""

import numpy as np

from penstock.kernels import mesh_tables as tables
from penstock.kernels.mesh_tables import MeshTables
from penstock.wafer.mesh.faults import check_run
from penstock.wafer.mesh.labels import Labels
from penstock.wafer.mesh.report import MeshReport, make_report
from penstock.wafer.mesh.ticks import Ticks

_EVENTS_OF_A_CALL = 1 << 24  # a second or two


def run_tables(t: MeshTables, labels: Labels, ticks: Ticks) -> MeshReport:
    """Simulate a program to its end; the tables then hold its memory and what left the mesh.

    Raises:
        MeshError: a fault of the program or a deadlock, with core, colour and cycle.
    """
    from penstock.kernels.mesh_simulation import simulate

    # Threads and streams begin; routers have no word yet.
    entities = np.arange(len(t.events))
    cores = int(t.clock[tables.CORES])
    is_router = (entities % tables.CORE_ENTITIES == 0) & (entities < cores * tables.CORE_ENTITIES)
    begin = entities[~is_router]
    t.events[begin, tables.STATUS] = tables.IN_WORK
    t.work[: len(begin)] = int(t.integers[tables.EVENT_ROWS]) + begin * tables.EVENT_FIELDS
    t.clock[tables.WORK_COUNT] = len(begin)
    while not simulate(t.integers, t.floats, _EVENTS_OF_A_CALL):
        pass  # between calls a keyboard interrupt is seen
    check_run(t, labels, ticks)
    return make_report(t, labels, ticks)

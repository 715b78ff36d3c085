"""The cycle-level simulator of a mesh of cores: routers, links, threads, word by word."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.wafer.mesh.labels import KINDS, SIDES, THREAD_NAMES, Labels
    from penstock.wafer.mesh.report import MeshReport, MeshTrace, QueueDepth, TraceOptions
    from penstock.wafer.mesh.run import run_tables
    from penstock.wafer.mesh.ticks import Ticks

__all__ = [
    "KINDS",
    "SIDES",
    "THREAD_NAMES",
    "Labels",
    "MeshReport",
    "MeshTrace",
    "QueueDepth",
    "Ticks",
    "TraceOptions",
    "run_tables",
]

__getattr__ = lazily(
    __name__,
    {
        "KINDS": "labels",
        "SIDES": "labels",
        "THREAD_NAMES": "labels",
        "Labels": "labels",
        "MeshReport": "report",
        "MeshTrace": "report",
        "QueueDepth": "report",
        "TraceOptions": "report",
        "run_tables": "run",
        "Ticks": "ticks",
    },
)

"""The cycle-level simulator of a mesh of cores: routers, links, threads, word by word."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.wafer.mesh.labels import (
        KINDS as KINDS,
        SIDES as SIDES,
        THREAD_NAMES as THREAD_NAMES,
        Labels as Labels,
    )
    from penstock.wafer.mesh.report import (
        MeshReport as MeshReport,
        MeshTrace as MeshTrace,
        TraceOptions as TraceOptions,
    )
    from penstock.wafer.mesh.run import run_tables as run_tables
    from penstock.wafer.mesh.ticks import Ticks as Ticks

__getattr__ = lazily(__name__, __file__)

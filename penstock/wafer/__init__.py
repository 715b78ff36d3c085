"""The wafer-scale engine in simulation: a mesh of cores, in closed form and cycle by cycle."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.wafer.load import dump_parameters, known_parameters, load_parameters
    from penstock.wafer.options import CycleSource, WaferOptions
    from penstock.wafer.parameters import CS2_MESH, SILICON, SIM, CoreParameters, Mesh
    from penstock.wafer.published import (
        NOT_MODELLED,
        SPARSE_ROWS,
        CompressedColumnsKernel,
        PublishedRow,
        fit_sparse_kernel,
        published_rows,
        worst_ratio,
    )

__all__ = [
    "CS2_MESH",
    "NOT_MODELLED",
    "SILICON",
    "SIM",
    "SPARSE_ROWS",
    "CompressedColumnsKernel",
    "CoreParameters",
    "CycleSource",
    "Mesh",
    "PublishedRow",
    "WaferOptions",
    "dump_parameters",
    "fit_sparse_kernel",
    "known_parameters",
    "load_parameters",
    "published_rows",
    "worst_ratio",
]

__getattr__ = lazily(
    __name__,
    {
        "CS2_MESH": "parameters",
        "CoreParameters": "parameters",
        "Mesh": "parameters",
        "SILICON": "parameters",
        "SIM": "parameters",
        "dump_parameters": "load",
        "known_parameters": "load",
        "load_parameters": "load",
        "CycleSource": "options",
        "WaferOptions": "options",
        "CompressedColumnsKernel": "published",
        "NOT_MODELLED": "published",
        "PublishedRow": "published",
        "SPARSE_ROWS": "published",
        "fit_sparse_kernel": "published",
        "published_rows": "published",
        "worst_ratio": "published",
    },
)

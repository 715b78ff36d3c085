"""The wafer-scale engine in simulation: a mesh of cores, in closed form and cycle by cycle."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.wafer.load import (
        dump_parameters as dump_parameters,
        known_parameters as known_parameters,
        load_parameters as load_parameters,
    )
    from penstock.wafer.options import WaferOptions as WaferOptions
    from penstock.wafer.parameters import (
        CS2_MESH as CS2_MESH,
        SILICON as SILICON,
        SIM as SIM,
        CoreParameters as CoreParameters,
        Mesh as Mesh,
    )
    from penstock.wafer.published import (
        NOT_MODELLED as NOT_MODELLED,
        SPARSE_ROWS as SPARSE_ROWS,
        CompressedColumnsKernel as CompressedColumnsKernel,
        fit_sparse_kernel as fit_sparse_kernel,
        published_rows as published_rows,
        worst_ratio as worst_ratio,
    )

__getattr__ = lazily(__name__, __file__)

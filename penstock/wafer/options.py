"""The wafer that a run computes on, from the keys of its `engine` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.wafer.load import load_parameters
from penstock.wafer.parameters import CoreParameters, Mesh

CycleSource = Literal["closed_form", "simulated"]


@dataclass(frozen=True)
class WaferOptions:
    """A mesh, its cores, and where the cycles of weight products come from.

    Attributes:
        cycles: `closed_form` for formulas alone; `simulated` if the products of weights are
            computed by the simulator of the mesh, which then also gives their numbers.
    """

    mesh: Mesh
    core: CoreParameters
    cycles: CycleSource = "closed_form"

    @classmethod
    def of(cls, config: EngineConfig) -> WaferOptions:
        """Return the options of a run.

        Raises:
            ConfigError: a mesh without cores, or a file of parameters that cannot be used.
        """
        try:
            mesh = Mesh.parse(config.mesh)
        except ConfigError as error:
            raise ConfigError(f"engine.{error}") from None
        try:
            core = load_parameters(config.cores)
        except ConfigError as error:
            raise ConfigError(f"engine.cores: {error}") from None
        return cls(mesh, core, config.cycles)

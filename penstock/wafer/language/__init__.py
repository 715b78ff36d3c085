"""A small language for programs of the mesh: place data, route colours, give tasks to words."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.wafer.language.arrays import (
        Array as Array,
        Counter as Counter,
        Part as Part,
        Register as Register,
    )
    from penstock.wafer.language.code import RECEIVE as RECEIVE, SEND as SEND, Code as Code
    from penstock.wafer.language.colours import Colour as Colour, neighbour as neighbour
    from penstock.wafer.language.program import MeshProgram as MeshProgram, MeshRun as MeshRun

__getattr__ = lazily(__name__, __file__)

"""A small language for programs of the mesh: place data, route colours, give tasks to words."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.wafer.language.arrays import Array, Counter, Part, Register
    from penstock.wafer.language.code import COMPUTE, RECEIVE, SEND, Code
    from penstock.wafer.language.colours import Colour
    from penstock.wafer.language.program import Drain, MeshProgram, MeshRun

__all__ = [
    "COMPUTE",
    "RECEIVE",
    "SEND",
    "Array",
    "Code",
    "Colour",
    "Counter",
    "Drain",
    "MeshProgram",
    "MeshRun",
    "Part",
    "Register",
]

__getattr__ = lazily(
    __name__,
    {
        "Array": "arrays",
        "Counter": "arrays",
        "Part": "arrays",
        "Register": "arrays",
        "COMPUTE": "code",
        "Code": "code",
        "RECEIVE": "code",
        "SEND": "code",
        "Colour": "colours",
        "Drain": "program",
        "MeshProgram": "program",
        "MeshRun": "program",
    },
)

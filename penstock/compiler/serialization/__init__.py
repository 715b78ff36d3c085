"""Programs as bytes, without pickle: JSON for everything but the values of constants.

What is read is checked completely: only registered operators and a fixed table of functions are
called, and no name from the bytes is imported or looked up elsewhere. An outline is a program
without its graphs.
"""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.compiler.serialization.fields import MalformedError, NotSerializableError
    from penstock.compiler.serialization.outlines import read_outline, write_outline
    from penstock.compiler.serialization.programs import deserialize, serialize

__all__ = [
    "MalformedError",
    "NotSerializableError",
    "deserialize",
    "read_outline",
    "serialize",
    "write_outline",
]

__getattr__ = lazily(
    __name__,
    {
        "MalformedError": "fields",
        "NotSerializableError": "fields",
        "deserialize": "programs",
        "read_outline": "outlines",
        "serialize": "programs",
        "write_outline": "outlines",
    },
)

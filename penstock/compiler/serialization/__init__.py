"""Programs as bytes, without pickle: JSON for everything but the values of constants.

What is read is checked completely: only registered operators and a fixed table of functions are
called, and no name from the bytes is imported or looked up elsewhere.
"""

from penstock.compiler.serialization.fields import MalformedError
from penstock.compiler.serialization.programs import deserialize, serialize
from penstock.compiler.serialization.targets import NotSerializableError

__all__ = ["MalformedError", "NotSerializableError", "deserialize", "serialize"]

"""Programs as bytes, without pickle: JSON for everything but the values of constants.

What is read is checked completely: only registered operators and a fixed table of functions are
called, and no name from the bytes is imported or looked up elsewhere. An outline is a program
without its graphs.
"""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.compiler.serialization import arguments as arguments, fields as fields
    from penstock.compiler.serialization.constants import (
        read_constants as read_constants,
        write_constants as write_constants,
    )
    from penstock.compiler.serialization.fields import (
        MalformedError as MalformedError,
        NotSerializableError as NotSerializableError,
    )
    from penstock.compiler.serialization.outlines import (
        read_outline as read_outline,
        write_outline as write_outline,
    )
    from penstock.compiler.serialization.programs import (
        deserialize as deserialize,
        serialize as serialize,
    )
    from penstock.compiler.serialization.targets import (
        operator_name as operator_name,
        operator_of as operator_of,
    )

__getattr__ = lazily(__name__, __file__)

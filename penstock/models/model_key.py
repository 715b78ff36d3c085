"""The key of a model that is remembered between processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelKey:
    """What identifies a model of a configuration, without its modules.

    Attributes:
        digest: of the configuration, of the versions of the libraries, and of this package's code.
        classes: a description of the code of each class of the model's modules, when it was
            recorded: libraries can be changed at run time.
    """

    digest: str
    classes: Mapping[str, str] = field(repr=False)

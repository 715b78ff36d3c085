"""From the name of a user's function and its arguments to a recorded model."""

import inspect
from collections.abc import Mapping
from typing import Any

from penstock.errors import CompileError, ConfigError, PenstockError
from penstock.models.deferred import Deferred, record
from penstock.models.reference import load_reference


def recorded_factory(reference: str, args: Mapping[str, Any]) -> Deferred:
    """Record the model that a user's function builds.

    Args:
        reference: `package.module:function`.
        args: keyword arguments of the function.

    Raises:
        ConfigError: no such module or function, or unknown arguments.
        CompileError: the function fails or cannot be replayed.
    """
    factory = load_reference(reference)
    try:
        inspect.signature(factory).bind(**args)
    except TypeError as error:
        raise ConfigError(f"{reference} does not take these args: {error}") from None
    except ValueError:
        pass  # builtins have no signature; the call reports the error
    try:
        return record(lambda: factory(**args))
    except PenstockError:
        raise
    except Exception as error:
        kind = type(error).__name__
        raise CompileError(f"{reference} failed to build a model: {kind}: {error}") from error

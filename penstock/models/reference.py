"""A user function by name: `package.module:function`."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from penstock.errors import ConfigError, did_you_mean


def load_reference(reference: str) -> Callable[..., Any]:
    """Import `package.module:function`, also from the current folder, as `python -m` would.

    Raises:
        ConfigError: the module or the function does not exist, or is not callable.
    """
    module_name, colon, attribute = reference.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"expected package.module:function, got {reference!r}")
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"cannot import {module_name} for {reference!r}: {error}; looked in the current "
            f"folder {folder} and on PYTHONPATH"
        ) from error
    except Exception as error:
        kind = type(error).__name__
        raise ConfigError(f"importing {module_name} failed: {kind}: {error}") from error
    found = getattr(module, attribute, None)
    if found is None:
        raise ConfigError(
            f"{module_name} has no {attribute!r}{did_you_mean(attribute, vars(module))}"
        )
    if not callable(found):
        raise ConfigError(f"{reference} is a {type(found).__name__}, expected a function")
    return found

"""A description of a model that determines what it computes, for a key of the cache.

The classes of all modules must be those of PyTorch, `transformers` and this package, unchanged: the
versions of these libraries then determine their code. Every attribute of every module must have a
complete description. A model of which something else can be said has none.
"""

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from penstock.planning.program_cache.versions import file_digest

_LIBRARIES = frozenset({"torch", "transformers", "penstock"})
# Further libraries whose functions and classes these modules import.
_IMPORTED = frozenset(
    {
        "accelerate",
        "huggingface_hub",
        "numpy",
        "packaging",
        "safetensors",
        "tqdm",
        "typing_extensions",
    }
)
_KNOWN = _LIBRARIES | _IMPORTED | sys.stdlib_module_names
# Their functions make masks and attention; models find those by name.
_FINDERS = ("transformers.masking_utils", "transformers.integrations.sdpa_attention")
# What models and constructors call of PyTorch, besides the classes of modules; and the packages
# that its functions are from.
_CALLED = (torch.nn.init, torch.nn.functional, torch.Tensor, torch)
_OWN_OF_TORCH = {"torch", "numpy", "typing_extensions"} | sys.stdlib_module_names
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)
# A generation configuration keeps its `hash`, which differs from process to process.
_OF_THE_PROCESS = frozenset({"_original_object_hash"})
_TABLES = ("_parameters", "_buffers", "_modules")


class UndescribedError(Exception):
    """A model has a part that its description cannot contain; the text names it."""


def describe(module: nn.Module) -> Iterator[str]:
    """Yield lines that determine what a module on fake tensors computes, but for its buffers'
    values.

    Raises:
        UndescribedError: a part of the module is not covered by the versions of libraries.
    """
    refuse_changed_torch()
    modules: dict[int, int] = {}
    tensors: dict[int, int] = {}
    classes: dict[type, str] = {}
    values = _Values()
    for name in _FINDERS:
        if name in sys.modules:
            yield f"{name} {_module_digest(name)}"
    for path, child in module.named_modules(remove_duplicate=False):
        if id(child) in modules:
            yield f"{path} is {modules[id(child)]}"
            continue
        modules[id(child)] = len(modules)
        if type(child) not in classes:
            classes[type(child)] = _class(type(child))
        yield f"{path}: {classes[type(child)]}"
        for table in ("_parameters", "_buffers"):
            for name, tensor in getattr(child, table).items():
                place = tensors.setdefault(id(tensor), len(tensors))
                yield f"{name} {place} {_tensor(tensor)}"
        lasting = child._non_persistent_buffers_set
        yield f"{sorted(lasting)}"
        for name, value in vars(child).items():
            if name not in _TABLES and name != "_non_persistent_buffers_set":
                yield f"{name}={values.describe(value)}"


def describe_classes(module: nn.Module) -> dict[str, str]:
    """Return descriptions of the code of a model's classes, by their full names, and of the modules
    that models find masks and attention in.

    Raises:
        UndescribedError: a class is not covered by the versions of libraries.
    """
    classes = {type(child) for child in module.modules()}
    found = {f"{each.__module__}.{each.__qualname__}": _class(each) for each in classes}
    finders = {name: _module_digest(name) for name in _FINDERS if name in sys.modules}
    return dict(sorted({**found, **finders}.items()))


def refuse_changed_torch() -> None:
    """Raise `UndescribedError` if a function of PyTorch that models and constructors call was
    replaced by other code."""
    for owner in _CALLED:
        for name, value in vars(owner).items():
            if _root(value) not in _OWN_OF_TORCH:
                raise UndescribedError(f"{owner.__name__}.{name} was replaced")


def has_same_class(name: str, description: str) -> bool:
    """Whether a class of PyTorch is as described; True for classes of other libraries.

    **Arguments:** `name` and `description` as of `describe_classes`.
    """
    if name.split(".")[0] != "torch":
        return True
    place, _, qualified = name.rpartition(".")
    found = getattr(sys.modules.get(place), qualified, None)
    try:
        return isinstance(found, type) and _class(found) == description
    except UndescribedError:
        return False


class _Values:
    """Descriptions of attributes; a configuration, which many modules share, is described once."""

    def __init__(self) -> None:
        self._configs: dict[int, str] = {}

    def describe(self, value: Any) -> str:
        """Return a text that differs for values that differ."""
        if type(value) in _PLAIN:
            return repr(value)
        if isinstance(value, (list, tuple)):
            return f"{type(value).__name__}({','.join(map(self.describe, value))})"
        if isinstance(value, dict):
            pairs = (f"{self.describe(k)}:{self.describe(v)}" for k, v in value.items())
            return f"{{{','.join(pairs)}}}"
        if isinstance(value, (set, frozenset)):
            return f"set({','.join(sorted(map(self.describe, value)))})"
        if isinstance(value, torch.Tensor):
            return _tensor(value)
        if isinstance(value, functools.partial):
            return f"partial{self.describe((value.func, value.args, value.keywords))}"
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
            return _global(value)
        if hasattr(value, "to_dict") and _is_of_library(type(value)):
            if id(value) not in self._configs:
                fields = {k: v for k, v in vars(value).items() if k not in _OF_THE_PROCESS}
                self._configs[id(value)] = f"{type(value).__qualname__}{self.describe(fields)}"
            return self._configs[id(value)]
        raise UndescribedError(f"{type(value)}")


def _tensor(value: torch.Tensor | None) -> str:
    if value is None:
        return "None"
    return f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.requires_grad}"


def _is_of_library(value: Any) -> bool:
    return (value.__module__ or "").split(".")[0] in _LIBRARIES


def _global(value: Any) -> str:
    """Return the name of a function or class that a library defines."""
    module, name = value.__module__ or "", value.__qualname__
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not value or not (_is_of_library(value) or module == "builtins"):
        raise UndescribedError(f"{module}.{name}")
    return f"{module}.{name}"


def _class(owner: type) -> str:
    """Return the names of a class and its bases, with digests of the files of their code."""
    lines = []
    for base in owner.__mro__:
        module = base.__module__
        if base is object or module == "typing" or module == "abc":
            continue
        if not _is_of_library(base):
            raise UndescribedError(f"class {module}.{base.__qualname__}")
        for name, method in vars(base).items():
            if _root(method) not in _KNOWN:
                raise UndescribedError(f"{module}.{base.__qualname__}.{name} was replaced")
        lines.append(f"{module}.{base.__qualname__} {_module_digest(module)}")
    return " ".join(lines)


def _module_digest(name: str) -> str:
    """Return a digest of a module's file, and the functions of attention that it finds by name.

    Raises:
        UndescribedError: a global function or class of the module was replaced by another
            library's code.
    """
    module = sys.modules[name]
    chosen = []
    for attribute, value in vars(module).items():
        if isinstance(value, (types.FunctionType, type)):
            _refuse_foreign(name, attribute, value)
            continue
        for mapping in ("_global_mapping", "_local_mapping"):
            for key, function in getattr(value, mapping, {}).items():
                _refuse_foreign(name, f"{attribute}[{key!r}]", function)
                written = getattr(function, "__qualname__", type(function).__qualname__)
                chosen.append(f"{attribute}[{key!r}]={function.__module__}.{written}")
    digest = file_digest(str(module.__file__)) if module.__file__ else ""
    return " ".join([digest, *sorted(chosen)])


def _refuse_foreign(module: str, name: str, value: Any) -> None:
    if (root := _root(value)) not in _KNOWN:
        raise UndescribedError(f"{module}.{name} is {root}'s")


def _root(value: Any) -> str:
    """Return the package in which a function or class is written; of a function that wraps others,
    the first that is unknown. `functools.wraps` gives a wrapper the names of what it wraps."""
    if isinstance(value, property):
        value = value.fget
    while isinstance(function := getattr(value, "__func__", value), types.FunctionType):
        root = str(function.__globals__.get("__name__")).split(".")[0]
        if root not in _KNOWN or not hasattr(function, "__wrapped__"):
            return root
        value = function.__wrapped__
    return (getattr(value, "__module__", None) or "builtins").split(".")[0]

"""Deferred initialisation: a model's weights, one at a time, bit-identical to a complete build.

`record(build)` runs `build()` on fake tensors, which takes no memory, whatever the model's size.
`Deferred.materialise(seed)` then replays the constructor's operations and yields each tensor as
soon as it is final. The result is bit-identical to `torch.manual_seed(seed); build()` on the CPU.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from penstock.errors import CompileError, ConfigError, did_you_mean
from penstock.garbage_collection import collection_disabled
from penstock.models.constructor_log import RecordedOperation, Window
from penstock.models.recording import recording
from penstock.models.replay import Replay, plan
from penstock.models.shared_memory import refuse_shared_memory

if TYPE_CHECKING:
    from penstock.sparsity import PackedIndex


@dataclass(frozen=True)
class TensorNames:
    """The tensors of a module by name; a tensor with several names is listed under its first name.

    `parameters` and `buffers` map names to tensors in module order; `buffers` also holds tensors
    that are plain attributes of a module. `aliases` maps every further name to the first one.
    """

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    aliases: dict[str, str]

    @classmethod
    def of(cls, module: nn.Module) -> "TensorNames":
        """Collect the names of all tensors of `module`."""
        first: dict[int, str] = {}
        aliases: dict[str, str] = {}

        def distinct(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
            found = {}
            for name, tensor in named:
                if first.setdefault(id(tensor), name) == name:
                    found[name] = tensor
                else:
                    aliases[name] = first[id(tensor)]
            return found

        attributes = [
            (f"{path}.{name}" if path else name, value)
            for path, owner in module.named_modules()
            for name, value in vars(owner).items()
            if isinstance(value, torch.Tensor)
        ]
        parameters = distinct(module.named_parameters(remove_duplicate=False))
        buffers = distinct([*module.named_buffers(remove_duplicate=False), *attributes])
        return cls(parameters, buffers, aliases)


class Deferred:
    """A module on fake tensors, and the recipe for its real tensors.

    `module` can be traced but not computed. `fake_mode` is the mode of its tensors. `names` lists
    them. `aliases` maps further names of tied tensors to the listed name.
    """

    def __init__(
        self,
        module: nn.Module,
        fake_mode: FakeTensorMode,
        names: TensorNames,
        windows: dict[str, Window],
        operations: list[RecordedOperation],
        storage_bytes: list[int],
        generator_states: list[torch.Tensor | None],
    ) -> None:
        self.module = module
        self.fake_mode = fake_mode
        self.names = names
        self.aliases = names.aliases
        self.bfloat16 = frozenset[str]()  # a constructor creates float32
        self.stored = frozenset[str]()
        self._windows = windows
        self._operations = operations
        self._storage_bytes = storage_bytes
        self._generator_states = generator_states

    def materialise(
        self, seed: int, names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for parameters, buffers and tensor attributes, each when final.

        Args:
            seed: the argument of `torch.manual_seed` before an ordinary build.
            names: only these (first names); all by default. Random numbers of other tensors are
                still drawn if later tensors depend on them.

        At any time about two tensors of the model are in memory, besides those that the caller
        keeps. Memory that the constructor never wrote (`torch.empty`) is zero. The global random
        state is unchanged.

        Raises:
            ConfigError: a name that the model does not have.
        """
        wanted = list(self._windows) if names is None else list(dict.fromkeys(names))
        for name in wanted:
            if name not in self._windows:
                raise ConfigError(
                    f"the model has no tensor {name!r}{did_you_mean(name, self._windows)}"
                )
        return self._replay(seed, wanted)

    def mask(self, name: str) -> "PackedIndex | None":
        """Return None: a constructor makes no masks."""
        return None

    def draws(self, names: Iterable[str]) -> bool:
        """Return whether the constructor draws random numbers for these tensors."""
        storages = {self._windows[name].storage for name in names}
        return any(step.operation.draw for step in plan(self._operations, storages))

    def _replay(self, seed: int, wanted: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        names_of: dict[int, list[str]] = {}
        for name in wanted:
            names_of.setdefault(self._windows[name].storage, []).append(name)
        replay = Replay(self._storage_bytes, self._generator_states, seed)
        for step in plan(self._operations, names_of):
            replay.run(step)
            for storage in step.finished:
                yield from self._hand_out(replay, names_of.pop(storage, []))
                replay.release(storage)
        for storage in list(names_of):
            yield from self._hand_out(replay, names_of.pop(storage))
            replay.release(storage)

    def _hand_out(self, replay: Replay, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = [replay.tensor(self._windows[name]) for name in names]
        if names:
            replay.release(self._windows[names[0]].storage)
        for name in names:
            yield name, tensors.pop(0)


def record(build: Callable[[], nn.Module]) -> Deferred:
    """Run `build()` on fake tensors and record how it fills them.

    Args:
        build: creates the module on the CPU. Random numbers must come from torch (the global
            generator or a `torch.Generator`); numbers from elsewhere are fixed when recorded.

    Returns:
        The module on fake tensors and the recipe for its weights.

    Raises:
        CompileError: `build` needs the values of random tensors (`.item()`, `.numpy()`, `if`),
            writes tensors that existed before, or leaves the CPU.
    """
    with collection_disabled(), recording() as recorder, warnings.catch_warnings():
        # `copy.deepcopy` of a layer reads the address of its weights, which is harmless.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        try:
            module = build()
        except (UnsupportedFakeTensorException, UnsupportedOperatorException) as error:
            raise CompileError(_cannot_replay(str(error))) from error
        except RuntimeError as error:
            if "tensor subclass" in str(error) or "FakeTensor" in str(error):
                raise CompileError(_cannot_replay(str(error))) from error
            raise
        if not isinstance(module, nn.Module):
            raise CompileError(
                f"expected a constructor that returns a torch.nn.Module, it returned "
                f"{type(module).__name__}"
            )
        refuse_shared_memory(module)
        names = TensorNames.of(module)
        windows = {}
        for name, tensor in {**names.parameters, **names.buffers}.items():
            if not isinstance(tensor, FakeTensor):
                raise CompileError(
                    f"{name} existed before the constructor ran, so its value cannot be made from "
                    f"a seed; pass the built nn.Module instead"
                )
            if tensor.device.type != "cpu":
                raise CompileError(
                    f"{name} is made on device {tensor.device}; build on the CPU, engines choose "
                    f"their own device"
                )
            windows[name] = recorder.window(tensor)
    return Deferred(
        module,
        recorder.fake_mode,
        names,
        windows,
        recorder.operations,
        recorder.storage_bytes(),
        recorder.generator_states,
    )


def _cannot_replay(reason: str) -> str:
    first_line = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
    return (
        f"the constructor cannot be replayed weight by weight ({first_line}); build the model "
        "yourself and pass the nn.Module instead"
    )

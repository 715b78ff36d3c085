"""Capture: a PyTorch module and example inputs become one flat ATen graph.

`torch.export` runs on fake tensors, so no weight is ever allocated. This module adds the meaning of
each placeholder (weight, buffer or input), the precision of the stream, and errors that name the
module and the line that cannot be captured.
"""

import io
import linecache
import logging
import sys
import threading
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind, OutputKind

from penstock.compiler.custom_functions import Context, custom_functions_traced
from penstock.compiler.equal_blocks import BlockTracing, expand_equal_blocks
from penstock.compiler.fake_parameters import simple_copies
from penstock.compiler.hooks import gradient_hooks_refused
from penstock.compiler.lean_tracing import lean_tracing
from penstock.compiler.mixed_types import MixedTypes, lowered_arguments
from penstock.compiler.nodes import arguments_by_name, source_line
from penstock.compiler.regions import inline_regions
from penstock.compiler.unsupported import advice_on, first_line
from penstock.errors import CompileError

Precision = Literal["fp32", "bf16"]
STREAM_DTYPE: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}

_ONE_EXPORT = threading.RLock()  # an export of ours replaces functions of PyTorch

# The arguments that make a norm update its running statistics.
_UPDATES_STATISTICS = ("training", "train", "use_input_stats")


@dataclass(frozen=True)
class Capture:
    """A flat ATen graph and the meaning of its placeholders.

    `weights` maps placeholder names to parameter names, `buffers` to names of buffers and of
    tensors that are plain attributes of modules, `inputs` to the keyword arguments of the module's
    forward; `constants` maps placeholder names to tensors that the forward creates from literals.
    `differentiable` are the placeholders of weights that require a gradient. `whole_window_reason`
    is that of `Program`.
    """

    graph: fx.Graph
    weights: Mapping[str, str]
    buffers: Mapping[str, str]
    inputs: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    differentiable: frozenset[str]
    whole_window_reason: str = ""

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The nodes that the module returns."""
        (output,) = self.graph.find_nodes(op="output")
        return tuple(output.args[0])


def capture(
    module: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    precision: Precision = "fp32",
    training: bool = True,
) -> Capture:
    """Export `module(**inputs)` to a graph.

    **Arguments:** `module` with fake (or real) parameters; `inputs` by keyword, fake or real;
    `precision`: with "bf16", floating parameters are bfloat16 and products whose operands mix types
    run in bfloat16, as under autocast; `training`: gradients are needed: the backwards of the
    module's custom functions are traced, and hooks on gradients are rejected.

    **Raises:** `CompileError` naming the module and line that cannot be captured.
    """
    blocks = BlockTracing(module)
    lowered = _lowered_parameters(module) if precision == "bf16" else nullcontext()
    mode = MixedTypes() if precision == "bf16" else nullcontext()
    try:
        with (
            _ONE_EXPORT,
            lowered,
            mode,
            _gradients(training, blocks),
            _quiet_torch(),
            lean_tracing(),
            simple_copies(),
            # Autograd within a forward would follow the results of another block.
            blocks.active() if training else nullcontext(),
        ):
            exported = torch.export.export(module, (), dict(inputs), strict=False)
    except CompileError:
        raise
    except Exception as error:  # any error of the user's forward must be explained
        raise CompileError(_explain(module, error)) from error
    parameters = module.named_parameters(remove_duplicate=False)
    differentiable = {name for name, value in parameters if value.requires_grad and training}
    return _read_signature(exported, differentiable, tensor_attributes(module), blocks)


def tensor_attributes(module: nn.Module) -> set[str]:
    """Return the names of tensors that are plain attributes of modules."""
    return {
        f"{path}.{name}" if path else name
        for path, owner in module.named_modules()
        for name, value in vars(owner).items()
        if isinstance(value, torch.Tensor)
    }


def _read_signature(
    exported: torch.export.ExportedProgram,
    differentiable: Collection[str],
    attributes: Collection[str],
    blocks: BlockTracing,
) -> Capture:
    signature = exported.graph_signature
    weights: dict[str, str] = {}
    buffers: dict[str, str] = {}
    inputs: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    for spec in signature.input_specs:
        name, target = spec.arg.name, spec.target
        if spec.kind is InputKind.PARAMETER:
            weights[name] = str(target)
        elif spec.kind is InputKind.BUFFER:
            buffers[name] = str(target)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            value = exported.constants[str(target)]
            if not isinstance(value, FakeTensor):
                constants[name] = value
            elif target in attributes:
                buffers[name] = str(target)
            else:
                raise _refused_data(exported.graph, name)
        elif spec.kind is InputKind.USER_INPUT:
            inputs[name] = name
        else:
            raise CompileError(f"the model takes an input of kind {spec.kind.name} ({name})")
    graph = inline_regions(exported.graph_module)
    expand_equal_blocks(graph, blocks)
    for buffer in _written_statistics(graph, buffers):
        raise refused_buffer_write(buffer)
    # By index: after inlining a region, its results have other names than in the signature.
    (output,) = graph.find_nodes(op="output")
    for out, result in zip(signature.output_specs, output.args[0], strict=True):
        if out.kind is OutputKind.BUFFER_MUTATION:
            raise refused_buffer_write(str(out.target))
        returned = out.kind in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)
        if returned and not isinstance(result, fx.Node):
            raise CompileError(f"the model must return tensors; it returns {result!r}")
    trained = frozenset(name for name, weight in weights.items() if weight in differentiable)
    return Capture(graph, weights, buffers, inputs, constants, trained)


def _written_statistics(graph: fx.Graph, buffers: Mapping[str, str]) -> Iterator[str]:
    """Yield the running statistics that norms write; the schemas of norms do not declare them."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        arguments = arguments_by_name(node)
        if any(arguments.get(flag) for flag in _UPDATES_STATISTICS):
            statistics = (arguments.get("running_mean"), arguments.get("running_var"))
            given = [n.name for n in statistics if isinstance(n, fx.Node)]
            yield from (buffers[name] for name in given if name in buffers)


def _refused_data(graph: fx.Graph, name: str) -> CompileError:
    """Return the error for a tensor that the forward computed outside the graph."""
    reader = next((n for n in graph.nodes if any(i.name == name for i in n.all_input_nodes)), None)
    place = source_line(reader) if reader is not None else "the forward"
    return CompileError(
        f"{place} reads a tensor that the module does not register and the forward does not "
        "create, such as weight.data or a tensor in a list: the program would use one value for "
        "ever. Use .detach() instead of .data; keep weights in nn.ParameterList, layers in "
        "nn.ModuleList and constants in register_buffer instead of a list or mapping."
    )


def refused_buffer_write(buffer: str) -> CompileError:
    """Return the error of a forward that writes a buffer."""
    return CompileError(
        f"the forward writes its buffer {buffer!r} (running statistics of a norm, a cache): an "
        "engine keeps no state between steps, so a replayed step would differ. Use LayerNorm "
        "or GroupNorm, or call .eval() on that module alone: a whole model in eval mode is put in "
        "train mode to train."
    )


@contextmanager
def _gradients(training: bool, blocks: BlockTracing) -> Iterator[None]:
    """Trace the user's code for gradients; a program without gradients just runs the forward."""
    if training:
        with gradient_hooks_refused(), custom_functions_traced(blocks.trace_running_block):
            yield
    else:
        yield


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Keep PyTorch from printing graphs and tracebacks for an error that our message explains."""
    loggers = [
        logging.getLogger(name) for name in ("torch.fx", "torch._subclasses", "torch.export")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            yield
        with suppress(OSError):  # a closed stderr is no error of the model
            sys.stderr.write(printed.getvalue())  # from user code: the export succeeded
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _lowered_parameters(module: nn.Module) -> Iterator[None]:
    """Replace every floating parameter by bfloat16, with the same shapes and ties, then restore
    it. Recurrent modules, which reject inputs of another type, get theirs in bfloat16."""
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    lowered: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is None or parameter.dtype != torch.float32:
                continue
            if id(parameter) not in lowered:
                with torch.no_grad():
                    cast = parameter.detach().to(torch.bfloat16)
                lowered[id(parameter)] = nn.Parameter(cast, parameter.requires_grad)
            replaced.append((child, name, parameter))
            child._parameters[name] = lowered[id(parameter)]
    recurrent = [child for child in module.modules() if isinstance(child, nn.RNNBase)]
    hooks = [child.register_forward_pre_hook(lowered_arguments) for child in recurrent]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for child, name, parameter in replaced:
            child._parameters[name] = parameter


def _explain(module: nn.Module, error: Exception) -> str:
    """Return the message: the module and line of the user's code that could not be captured, and
    advice."""
    names = {id(child): name or type(module).__name__ for name, child in module.named_modules()}
    where, line = "the model's forward", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        first = frame.f_code.co_varnames[:1] if frame.f_code.co_argcount else ()
        owner = frame.f_locals.get(*first) if first else None
        inside_torch = "/torch/" in frame.f_code.co_filename.replace("\\", "/")
        known = isinstance(owner, nn.Module) and id(owner) in names
        if (known or isinstance(owner, Context)) and not inside_torch:
            file = frame.f_code.co_filename
            if known:
                where = f"{names[id(owner)]} ({type(owner).__name__})"
            line = f" at {file}:{number}: {linecache.getline(file, number).strip()!r}"
    reason = first_line(error)
    if "doesn't match mode" in reason:
        reason = "it writes a tensor that is neither its input nor made in the forward"
    return f"cannot capture {where}{line}: {reason}. {advice_on(error)}"

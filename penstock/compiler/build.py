"""Compile a module into a program: capture, rewrite, cut, and one kind per distinct stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from penstock.compiler.capture import STREAM_DTYPE, Capture
from penstock.compiler.custom_gradients import CustomGradient, fold_custom_gradients
from penstock.compiler.cut import CutPiece, cut, weight_free_nodes
from penstock.compiler.decoding import decoding_form
from penstock.compiler.digests import digest_of, lines_of, lines_of_nodes
from penstock.compiler.executables import executable
from penstock.compiler.forward_state import capture_repeatable
from penstock.compiler.graph_digest import graph_digest
from penstock.compiler.hooks import refuse_gradient_hooks
from penstock.compiler.joint import StageSignature, computes_gradients, make_kind
from penstock.compiler.nodes import source_line, value_of
from penstock.compiler.options import DEFAULTS, CompileOptions
from penstock.compiler.retarget_devices import move, on_device
from penstock.compiler.rewrites import (
    count_dropouts_from_first,
    key_of,
    rewrite,
    share_equal,
)
from penstock.compiler.sparse_substitution import require_weights, sparse_sizes, substitute_products
from penstock.compiler.tensors import with_contiguous_strides
from penstock.compiler.weight_conversion import open_weight
from penstock.compiler.weight_names import WeightNames
from penstock.errors import CompileError, NoTrainingError, few
from penstock.garbage_collection import collection_disabled
from penstock.program import Kind, Program, Stage, TensorSpec, ValueSpec, WeightSpec, verify
from penstock.weight_formats import format_of


def compile_module(
    module: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    options: CompileOptions = DEFAULTS,
    *,
    name: str = "model",
    buffers: Callable[[], Mapping[str, torch.Tensor]] | None = None,
    known: Program | None = None,
) -> Program:
    """Compile `module(**inputs)` into a program.

    **Arguments:** `module`, whose parameters may be fake; `inputs`, one micro-batch by keyword,
    fake or real; `buffers` returns the real values of the module's buffers by name, and may be
    omitted for a program that is only inspected; `known` is returned unchanged if it was compiled
    from the same graph.

    **Raises:** `CompileError` for code that cannot be captured, `ConfigError` for a pattern that
    matches nothing, `NoTrainingError` for trainable weights that the result does not depend on,
    `BudgetError` for a stage that does not fit `slot_bytes`.
    """
    # Graphs are traced from one form to the next, and the code of most of them never runs.
    with collection_disabled(), _use_lazy_graph_module(True):
        return _compile(module, inputs, options, name, buffers, known)


def _compile(
    module: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    options: CompileOptions,
    name: str,
    buffers: Callable[[], Mapping[str, torch.Tensor]] | None,
    known: Program | None,
) -> Program:
    names = WeightNames.of(module, options.weight_prefix)
    require_weights(options.sparse, names.aliases)
    trainable = names.trainable(options) if options.training else frozenset()
    if options.training:
        refuse_gradient_hooks(module, options.weight_prefix)
    with _gradients_of(module, names, trainable) if options.training else nullcontext():
        captured = capture_repeatable(module, inputs, options.precision, options.training)
    if options.training:  # the forward may have registered parameters
        refuse_gradient_hooks(module, options.weight_prefix)
    digest = graph_digest(captured, options.weight_prefix)
    if known is not None and known.graph_digest == digest:
        return known
    captured = rewrite(captured)
    if options.decoding is not None:
        captured = decoding_form(captured, options.decoding)
    fold_custom_gradients(captured.graph)
    key = key_of(captured.graph)
    assembly = _ProgramAssembly(module, captured, key, options, name, buffers, names, trainable)
    reason = captured.whole_window_reason
    return verify(replace(assembly.program(), graph_digest=digest, whole_window_reason=reason))


@contextmanager
def _gradients_of(
    module: nn.Module, names: WeightNames, trainable: frozenset[str]
) -> Iterator[None]:
    """Let only trained weights require gradients, since a forward or a backward may query
    `requires_grad`."""
    fixed = [
        parameter
        for full, parameter in module.named_parameters()
        if parameter.requires_grad and names.first[full] not in trainable
    ]
    for parameter in fixed:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in fixed:
            parameter.requires_grad_(True)


@dataclass(frozen=True)
class _StageNodes:
    """The nodes of a stage, those outside of it that it reads, and those that others read.

    `weight_nodes` maps the nodes of weights to the weights' names; a tied weight may have several.
    """

    nodes: Sequence[fx.Node]
    weight_nodes: Mapping[fx.Node, str]
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]

    @property
    def weights(self) -> list[str]:
        """The names of the weights that the stage reads, each once, in the order of their use."""
        return list(dict.fromkeys(self.weight_nodes.values()))


@dataclass
class _ProgramAssembly:
    """The state of one compilation, from the rewritten graph to the program."""

    module: nn.Module
    captured: Capture
    key: fx.Node
    options: CompileOptions
    name: str
    buffers: Callable[[], Mapping[str, torch.Tensor]] | None
    names: WeightNames
    trainable: frozenset[str]
    values: dict[str, ValueSpec] = field(default_factory=dict)
    weights: dict[str, WeightSpec] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    equal_stages: dict[str, tuple[Kind, int]] = field(default_factory=dict)  # by `_stage_text`
    weight_names: dict[str, str] = field(default_factory=dict)

    def program(self) -> Program:
        graph = self.captured.graph
        self._collect_weights()
        weight_nodes = {n for n in graph.nodes if n.name in self.weight_names}
        free = share_equal(graph, weight_free_nodes(graph, weight_nodes, self.key))
        results = self._results()
        for result in results:
            if result in free or result.op == "placeholder":
                raise NoTrainingError(
                    f"the model's result {result.name!r} depends on no weight: nothing can train"
                )
        body = [n for n in graph.nodes if n.op == "call_function" and n not in free]
        stream_bytes = {n: self._weight(n).stream_bytes for n in weight_nodes}
        pieces = cut(body, self.module, stream_bytes, self.options.slot_bytes)
        self._refuse_unused(weight_nodes)
        constants, per_batch = self._split_prelude(free)
        self._collect_outer_values(free, constants)
        stages = self._stages(pieces, results)
        prelude, prelude_inputs, prelude_outputs = self._prelude(per_batch, pieces)
        used = {name for stage in stages for name in stage.inputs} | set(prelude_inputs)
        return Program(
            name=self.name,
            stages=tuple(stages),
            weights=self.weights,
            values={n: v for n, v in self.values.items() if n in used or v.source != "constant"},
            inputs=tuple(self.captured.inputs.values()),
            constants={n: t for n, t in self._constant_values(constants).items() if n in used},
            prelude=prelude,
            prelude_inputs=prelude_inputs,
            prelude_outputs=prelude_outputs,
            results=tuple(node.name for node in results),
        )

    # Weights

    def _collect_weights(self) -> None:
        """Name the weights as in the user's module; a tied weight occurs once, by its first
        name."""
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        nodes = {n.name: n for n in self.captured.graph.nodes if n.op == "placeholder"}
        for placeholder, full in self.captured.weights.items():
            name = self.names.first[full]
            self.weight_names[placeholder] = name
            if placeholder not in nodes or name in self.weights:
                continue
            parameter = parameters[full]
            if parameter.dtype != torch.float32:
                raise CompileError(
                    f"weight {name!r} is {parameter.dtype}: the store keeps float32 masters; call "
                    ".float() on the model, precision: bf16 then streams bfloat16"
                )
            self.weights[name] = WeightSpec(
                name=name,
                shape=tuple(parameter.shape),
                format=format_of(
                    self._computed_dtype,
                    name in self.options.bfloat16,
                    is_sparse=name in self.options.sparse,
                ),
                trainable=name in self.trainable,
                aliases=tuple(self.names.aliases[name]),
                **sparse_sizes(name, parameter.numel(), self.options.sparse.get(name)),
            )
        if self.options.training and not any(w.trainable for w in self.weights.values()):
            raise NoTrainingError(
                "every weight is frozen: nothing can train; remove some from freeze, or set "
                "requires_grad"
            )

    @property
    def _computed_dtype(self) -> torch.dtype:
        """The type in which weights are computed with."""
        return STREAM_DTYPE[self.options.precision]

    def _public(self, full: str) -> str:
        return full.removeprefix(self.options.weight_prefix)

    def _weight(self, node: fx.Node) -> WeightSpec:
        return self.weights[self.weight_names[node.name]]

    def _refuse_unused(self, weight_nodes: set[fx.Node]) -> None:
        used = {self.weight_names[n.name] for n in weight_nodes if n.users}
        idle = [name for name in self.weights if name not in used]
        if idle and self.options.training:
            raise NoTrainingError(
                f"{len(idle)} weight(s) take no part in the model's result and would never train: "
                f"{few(idle)}. Remove them from the model, or use them in its loss."
            )
        for name in idle:
            del self.weights[name]

    # Values

    def _results(self) -> tuple[fx.Node, ...]:
        if self.options.training:
            if len(self.captured.results) != 1:
                raise CompileError(
                    f"the model must return one scalar loss; it returns "
                    f"{len(self.captured.results)} values"
                )
            shape = tuple(value_of(self.captured.results[0]).shape)
            if shape not in ((), (1,)):
                raise CompileError(
                    f"the model must return a scalar loss; it returns a tensor of shape {shape}. "
                    "Reduce it (mean or sum), or name a loss function in model.loss."
                )
        return self.captured.results

    def _split_prelude(self, free: set[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Divide weight-free nodes into those that depend on no input (constants) and those of the
        batch."""
        inputs = {n for n in self.captured.graph.nodes if n.name in self.captured.inputs}
        from_inputs = set(inputs)
        constants, per_batch = [], []
        for node in self.captured.graph.nodes:
            if node not in free:
                continue
            if any(n in from_inputs for n in node.all_input_nodes):
                from_inputs.add(node)
                per_batch.append(node)
            else:
                constants.append(node)
        return constants, per_batch

    def _collect_outer_values(self, free: set[fx.Node], constants: Sequence[fx.Node]) -> None:
        fixed = {*self.captured.buffers, *self.captured.constants}
        made_once = set(constants)
        for node in self.captured.graph.nodes:
            if node.name in self.captured.inputs:
                self._add_value(node, "input")
            elif node.name in fixed or node in made_once:
                if isinstance(node.meta.get("val"), torch.Tensor):
                    self._add_value(node, "constant")
            elif node in free and isinstance(node.meta.get("val"), torch.Tensor):
                self._add_value(node, "prelude")

    def _add_value(self, node: fx.Node, source: str, requires_grad: bool = False) -> None:
        tensor = value_of(node)
        spec = TensorSpec(tuple(tensor.shape), tensor.dtype)
        self.values[node.name] = ValueSpec(node.name, spec, source, requires_grad)  # type: ignore[arg-type]

    def _constant_values(self, constants: Sequence[fx.Node]) -> dict[str, torch.Tensor]:
        """Compute the values that depend on no weight and no input; they stay fake without real
        buffers."""
        graph = self.captured.graph
        names = {n.name: n for n in graph.nodes if n.op == "placeholder"}
        if self.buffers is None:
            return {
                name: with_contiguous_strides(value_of(node))
                for name, node in [*names.items(), *((n.name, n) for n in constants)]
                if name in self.values and self.values[name].source == "constant"
            }
        real = self.buffers()
        env: dict[fx.Node, Any] = {}
        for placeholder, buffer in self.captured.buffers.items():
            if placeholder in names:
                env[names[placeholder]] = real[self._public(buffer)]
        for placeholder, tensor in self.captured.constants.items():
            if placeholder in names:
                env[names[placeholder]] = tensor
        with torch.no_grad():
            for node in constants:
                args, kwargs = fx.node.map_arg(on_device(node, "cpu"), lambda n: env[n])
                env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return {
            node.name: with_contiguous_strides(value.to(self.options.device))
            for node, value in env.items()
            if isinstance(value, torch.Tensor)
        }

    def _prelude(
        self, per_batch: Sequence[fx.Node], pieces: Sequence[CutPiece]
    ) -> tuple[fx.GraphModule | None, tuple[str, ...], tuple[str, ...]]:
        """Gather the weight-free nodes that stages read into one executable per micro-batch."""
        inside = set(per_batch)
        body = {node for piece in pieces for node in piece.nodes}
        outputs = [n for n in per_batch if any(user in body for user in n.users)]
        outputs = [n for n in outputs if isinstance(n.meta.get("val"), torch.Tensor)]
        for name in [n for n, v in self.values.items() if v.source == "prelude"]:
            if name not in {n.name for n in outputs}:
                del self.values[name]
        if not outputs:
            return None, (), ()
        given: dict[fx.Node, None] = {}
        for node in per_batch:
            for source in node.all_input_nodes:
                if source not in inside:
                    given[source] = None
        graph = fx.Graph()
        made = {node: graph.placeholder(node.name) for node in given}
        for node in per_batch:
            made[node] = graph.node_copy(node, lambda n: made[n])
            move(made[node], self.options.device)
        # Stages are traced for contiguous values.
        dense = [
            graph.call_function(torch.ops.aten.contiguous.default, (made[n],)) for n in outputs
        ]
        graph.output(tuple(dense))
        graph.eliminate_dead_code()
        names = tuple(n.name for n in given), tuple(n.name for n in outputs)
        return executable(graph, "prelude"), *names

    # Stages

    def _stages(self, pieces: Sequence[CutPiece], results: Sequence[fx.Node]) -> list[Stage]:
        stages = []
        for index, piece in enumerate(pieces):
            inside = set(piece.nodes)
            outputs = [
                node
                for node in piece.nodes
                if node in results or any(user not in inside for user in node.users)
            ]
            outputs = [
                n for n in outputs if not all(u.op == "output" for u in n.users) or n in results
            ]
            stages.append(self._stage(index, piece, outputs))
        return stages

    def _stage(self, index: int, piece: CutPiece, outputs: Sequence[fx.Node]) -> Stage:
        for node in outputs:
            if not isinstance(node.meta.get("val"), torch.Tensor):
                raise CompileError(f"{source_line(node)}: {node.name} would cross stages")
        nodes = self._stage_nodes(piece, outputs)
        text = self._stage_text(nodes)
        if text not in self.equal_stages:
            graph, signature, first_dropout = self._stage_graph(nodes)
            self.equal_stages[text] = self._kind(piece.name, graph, signature), first_dropout
        kind, first_dropout = self.equal_stages[text]
        has_gradients = computes_gradients(kind)
        for node, takes_gradient in zip(outputs, kind.outputs_grad, strict=True):
            self._add_value(node, "stage", takes_gradient and has_gradients)
        return Stage(
            index=index,
            name=self._public(piece.name),
            kind=kind,
            weights=tuple(nodes.weights),
            inputs=tuple(n.name for n in nodes.inputs),
            outputs=tuple(n.name for n in outputs),
            first_dropout=first_dropout,
        )

    def _stage_nodes(self, piece: CutPiece, outputs: Sequence[fx.Node]) -> _StageNodes:
        inside = set(piece.nodes)
        weights: dict[fx.Node, str] = {}
        inputs: dict[fx.Node, None] = {}
        for node in piece.nodes:
            for source in node.all_input_nodes:
                if source in inside or source is self.key:
                    continue
                if source.name in self.weight_names:
                    weights[source] = self.weight_names[source.name]
                else:
                    inputs[source] = None
        return _StageNodes(piece.nodes, weights, tuple(inputs), tuple(outputs))

    def _kind(self, stage: str, graph: fx.Graph, signature: StageSignature) -> Kind:
        digest = digest_of([*signature.lines, *lines_of(graph)])
        if digest not in self.kinds:
            label = _kind_name(stage, {k.name for k in self.kinds.values()})
            device, products = self.options.device, self.options.products
            self.kinds[digest] = make_kind(label, digest, graph, signature, device, products)
        return self.kinds[digest]

    def _stage_text(self, stage: _StageNodes) -> str:
        """Return what determines the kind of a stage and its first dropout.

        Most stages of a model are equal, and only the first of them needs a graph. Stages with
        dropouts have numbers of their own, and each has a graph.
        """
        places = {name: f"w{number}" for number, name in enumerate(stage.weights)}
        given = {node: places[name] for node, name in stage.weight_nodes.items()}
        given |= {node: f"x{number}" for number, node in enumerate(stage.inputs)}
        given[self.key] = "key"
        values = [self.values[node.name] for node in stage.inputs]
        return "\n".join(
            [
                *(repr(replace(self.weights[name], name="", aliases=())) for name in stage.weights),
                *(f"{value.tensor} {value.requires_grad}" for value in values),
                *lines_of_nodes(stage.nodes, given, lambda n: on_device(n, self.options.device)),
                repr([stage.nodes.index(node) for node in stage.outputs]),
            ]
        )

    def _stage_graph(self, stage: _StageNodes) -> tuple[fx.Graph, StageSignature, int]:
        graph = fx.Graph()
        by_name = {name: graph.placeholder(f"w{i}") for i, name in enumerate(stage.weights)}
        made = {node: by_name[name] for node, name in stage.weight_nodes.items()}
        for i, node in enumerate(stage.inputs):
            made[node] = graph.placeholder(f"x{i}")
        made[self.key] = graph.placeholder("key")
        for node, placeholder in made.items():
            placeholder.meta = dict(node.meta)
        for i, node in enumerate(stage.nodes):
            made[node] = graph.node_copy(node, lambda n: made[n])
            made[node].name = f"n{i}"
            move(made[node], self.options.device)
            if isinstance(node.target, CustomGradient):
                made[node].target = node.target.moved(self.options.device)
        graph.output(tuple(made[n] for n in stage.outputs))
        sparse = []
        for position, (name, weight) in enumerate(by_name.items()):
            spec = self.weights[name]
            if spec.is_sparse:
                sparse.append((position, substitute_products(graph, weight, spec)))
            elif spec.stream_dtype != self._computed_dtype:
                open_weight(graph, weight, self._computed_dtype)
        first_dropout = count_dropouts_from_first(graph)
        signature = StageSignature(
            weights=tuple(
                TensorSpec(self.weights[n].shape, self.weights[n].stream_dtype)
                for n in stage.weights
            ),
            trainable=tuple(self.weights[n].trainable for n in stage.weights),
            inputs=tuple(self.values[n.name].tensor for n in stage.inputs),
            inputs_grad=tuple(self.values[n.name].requires_grad for n in stage.inputs),
            sparse=tuple(sparse),
            one_token=self.options.decoding is not None,
        )
        return graph, signature, first_dropout


def _kind_name(stage: str, taken: set[str]) -> str:
    """Name a kind after its first stage: `h.0` gives `h`; a second kind of that name gets `h'`."""
    parts = [p for p in stage.split(".") if not p.split("@")[0].isdigit()]
    name = parts[-1] if parts else "block"
    while name in taken:
        name += "'"
    return name

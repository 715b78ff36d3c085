"""The programs of incremental decoding, derived from a captured graph of a whole window.

`prefill` computes the keys and values of all positions of a window, and the result at one of them.
`decode` computes one position: the keys and values of the positions before it are inputs, into
which it writes its own. `whole_window` computes the result at one position and keeps nothing. All
read from the input `POSITION` which position it is.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import fx

from penstock.compiler.capture import Capture
from penstock.compiler.nodes import source_line, value_of
from penstock.compiler.ops import with_row
from penstock.compiler.position_forms import (
    All,
    Computed,
    Form,
    MixedPositionsError,
    One,
    PositionForms,
    position_forms,
    replaced,
)
from penstock.compiler.unsupported import first_line
from penstock.errors import CompileError

aten = torch.ops.aten

Decoding = Literal["prefill", "decode", "whole_window"]

POSITION = "penstock_position"
"""The input that names the computed position, int64 [1]."""
CACHE = "penstock_cache_{}"
"""The inputs of `decode` with the results that are kept, in the order of the results of `prefill`
after the model's own. A step writes into them."""


def decoding_form(captured: Capture, decoding: Decoding) -> Capture:
    """Return the graph of one of the programs of incremental decoding.

    **Arguments:** `captured` is a rewritten graph of a causal language model, for one row of
    tokens, whose only result has positions in dimension 1.

    A model with an operator that may mix positions otherwise than attention (`position_forms.py`)
    keeps nothing: its prefill has only the model's own result, and names the operator as the
    reason.

    **Raises:** `MixedPositionsError` for the `decode` program of such a model, `CompileError` for
    a model with several results.
    """
    if len(captured.results) != 1:
        raise CompileError(
            f"a model that generates text has one result, its logits; got {len(captured.results)}"
        )
    if decoding == "whole_window":
        return _Derivation(captured, None, decoding).whole_window()
    try:
        forms = position_forms(captured)
        decode = _Derivation(captured, forms, "decode").run()
        # A prefill keeps keys and values only if there is a program that can use them.
        return decode if decoding == "decode" else _Derivation(captured, forms, decoding).run()
    except MixedPositionsError as error:
        if decoding == "decode":
            raise
        whole = _Derivation(captured, None, decoding).whole_window()
        return replace(whole, whole_window_reason=str(error))


class _Derivation:
    """Builds the graph of one program: copies of nodes of the captured graph for one position, for
    all positions, or for both."""

    def __init__(self, captured: Capture, forms: PositionForms | None, decoding: Decoding) -> None:
        self._captured, self._decoding = captured, decoding
        self._forms = dict(forms.forms) if forms else {}
        self._kept = forms.kept if forms else ()
        self._window = forms.window if forms else 0
        self._graph = fx.Graph()
        self._one: dict[fx.Node, fx.Node] = {}
        self._all: dict[fx.Node, fx.Node] = {}
        placeholders = captured.graph.find_nodes(op="placeholder")
        self._fake_mode = value_of(placeholders[0]).fake_mode  # type: ignore[attr-defined]
        for node in placeholders:
            self._all[node] = self._graph.node_copy(node)
        self._position = self._placeholder(POSITION, (1,), torch.int64)
        self._inputs = {**captured.inputs, POSITION: POSITION}

    def run(self) -> Capture:
        """Return the graph of a model whose every node has a form."""
        caches = self._caches() if self._decoding == "decode" else {}
        at_all_positions = self._read_at_all_positions()
        for node in self._captured.graph.nodes:
            if node.op != "call_function":
                continue
            form = self._forms.get(node)
            if form is None:
                self._all[node] = self._copied(node)
                continue
            if node in at_all_positions and node not in caches:
                self._all[node] = self._copied(node)
            self._one[node] = self._at_position(node, form)
            if node in caches:
                written = (caches[node], self._one[node], form.dim, self._position)
                self._all[node] = self._call(node, with_row, written)
        kept = [] if caches else [self._all[node] for node in self._kept]
        return self._finished([self._one[result] for result in self._captured.results] + kept)

    def whole_window(self) -> Capture:
        """Return the captured graph, whose results are those of one position."""
        for node in self._captured.graph.nodes:
            if node.op == "call_function":
                self._all[node] = self._copied(node)
        ones = [
            self._call(result, aten.index_select.default, (self._all[result], 1, self._position))
            for result in self._captured.results
        ]
        return self._finished(ones)

    def _finished(self, results: list[fx.Node]) -> Capture:
        self._graph.output(tuple(results))
        self._graph.eliminate_dead_code()
        return replace(self._captured, graph=self._graph, inputs=self._inputs)

    def _placeholder(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
        node = self._graph.placeholder(name)
        with self._fake_mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def _caches(self) -> dict[fx.Node, fx.Node]:
        caches = {}
        for number, node in enumerate(self._kept):
            name, value = CACHE.format(number), value_of(node)
            caches[node] = self._placeholder(name, tuple(value.shape), value.dtype)
            self._inputs[name] = name
        return caches

    def _read_at_all_positions(self) -> set[fx.Node]:
        """Return the nodes with positions that the graph needs at all of them."""
        wanted = set(self._kept) if self._decoding == "prefill" else set()
        for form in self._forms.values():
            _each(form, lambda each: wanted.add(each.node) if isinstance(each, All) else None)
        for node in reversed(self._captured.graph.nodes):
            ends = self._decoding == "decode" and node in self._kept
            if node in wanted and node in self._forms and not ends:
                wanted.update(node.all_input_nodes)
        return wanted

    def _copied(self, node: fx.Node) -> fx.Node:
        return self._graph.node_copy(node, self._all.__getitem__)

    def _call(
        self, like: fx.Node, target: Callable[..., Any], args: Any, kwargs: Any = None
    ) -> Any:
        node = self._graph.call_function(target, args, kwargs or {})
        node.meta = dict(like.meta)
        operands = fx.node.map_arg((args, kwargs or {}), lambda n: n.meta["val"])
        with self._fake_mode:
            node.meta["val"] = target(*operands[0], **operands[1])
        return node

    def _at_position(self, node: fx.Node, form: Form) -> fx.Node:
        """Return a node's result at the computed position."""
        if node in self._all and isinstance(node.meta["val"], torch.Tensor):
            return self._selected(node, node, form.dim)

        def operand(value: Any) -> Any:
            if isinstance(value, One):
                known = self._one.get(value.node)
                return known or self._selected(node, value.node, value.dim)
            if isinstance(value, All):
                return self._all[value.node]
            return self._position if isinstance(value, Computed) else value

        args, kwargs = replaced(form.args, operand), replaced(form.kwargs, operand)
        try:
            made = self._call(node, form.target or node.target, args, kwargs)  # type: ignore[arg-type]
        except RuntimeError as error:  # sizes among its arguments are those of the whole window
            raise MixedPositionsError(
                f"{source_line(node)}: {node.target} cannot compute one position: "
                f"{first_line(error)}"
            ) from error
        expected = node.meta["val"]
        if isinstance(expected, torch.Tensor):
            shape = list(expected.shape)
            shape[form.dim] = 1
            if list(value_of(made).shape) != shape:
                raise MixedPositionsError(
                    f"{source_line(node)}: {node.target} has another shape at one position"
                )
        return made

    def _selected(self, like: fx.Node, node: fx.Node, dim: int | None) -> fx.Node:
        operands = (self._all[node], dim, self._position)
        return self._call(like, aten.index_select.default, operands)


def _each(form: Form, function: Callable[[Any], Any]) -> None:
    replaced((form.args, form.kwargs), function)

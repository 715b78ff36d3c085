"""Programs as bytes: what is read computes the same, and nothing but a program is ever read."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from custom_functions import CALLS, net
from grids import quick_first
from sparse_steps import pruned_case
from sweeps import compiled, sweep, weights_of
from tiny_models import LENGTH, VOCABULARY, deepseek, language_model
from torch import nn
from torch.nn import functional as F
from written_programs import assert_same_program

from penstock.compiler.serialization import (
    MalformedError,
    NotSerializableError,
    arguments,
    deserialize,
    serialize,
)
from penstock.engine import EnginePlan, TorchEngine
from penstock.models import ModelSource
from penstock.planning import builders
from penstock.program import Program

_LENGTH_BYTES = 8


def program_of(source: ModelSource, **options: Any) -> Program:
    return builders.compile_source(
        source, **{"micro_batch": 2, "length": LENGTH, "precision": "fp32", **options}
    )


def of_family(family: str, **options: Any) -> Callable[[], Program]:
    return lambda: program_of(language_model(family).source(0), **options)


def _mixtral() -> Program:
    fields = {
        "model_type": "mixtral",
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
    }
    return program_of(ModelSource.from_hf_config(fields))


def _adapted() -> Program:
    source = language_model("llama").source(0)
    targets = ["*q_proj.weight", "*down_proj.weight"]
    return program_of(source.with_adapters(rank=2, alpha=4, targets=targets, dropout=0.1))


def _sparse(**options: Any) -> Callable[[], Program]:
    case = language_model("llama")
    return lambda: pruned_case(case, lambda name, p: p.dim() == 2, **options).program


def _custom_function() -> Program:
    module, rows = net(CALLS["nested"])
    return compiled(module, rows)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "gpt2": of_family("gpt2"),
    "llama": of_family("llama"),
    "bert": of_family("bert"),
    "opt": of_family("opt"),
    "gptj": of_family("gptj"),
    "qwen3": of_family("qwen3"),
    "mixture of experts": _mixtral,
    "deepseek": lambda: program_of(deepseek().source(0)),
    "bfloat16": of_family("llama", precision="bf16"),
    "frozen": of_family("gpt2", freeze=("transformer.wte.weight", "transformer.h.0.*")),
    "stored as bfloat16": of_family(
        "gpt2",
        freeze=("transformer.wpe.weight",),
        bfloat16=frozenset({"transformer.wpe.weight"}),
    ),
    "cut stages": of_family("gpt2", slot_bytes=20_000),
    "evaluation": of_family("gpt2", goal="evaluate"),
    "logits": of_family("llama", goal="logits"),
    "oneDNN": of_family("gpt2", products="onednn", micro_batch=16),
    "dropout": lambda: program_of(language_model("gpt2", resid_pdrop=0.1).source(0)),
    "without values": of_family("llama", with_buffers=False),
    "adapters": _adapted,
    "sparse": _sparse(),
    "sparse bfloat16": _sparse(precision="bf16"),
    "custom function": _custom_function,
}
QUICK = (
    "llama",
    "cut stages",
    "sparse",
    "custom function",
)


class Phases(nn.Module):
    """A layer whose outputs are multiplied by complex literals."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, 4] to the loss []."""
        turned = self.layer(rows) * complex(0.25, -0.5) + 1j
        return torch.view_as_real(turned).square().mean()


class Fills(nn.Module):
    """Two tensors filled with a complex literal, one before and one after the first weight."""

    def __init__(self, literal: complex) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.literal = literal

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, 4] to the loss [], a sum that differs with the sign and class of every part."""
        parts = []
        for each in (rows, self.layer(rows)):
            filled = torch.complex(each, each).masked_fill(rows < 2, self.literal)
            parts += torch.view_as_real(filled)[0, 0].unbind()
        filled = torch.stack(parts).detach()
        weights = 2.0 ** torch.arange(4)
        kinds = torch.copysign(weights, filled) + 16 * weights * filled.isnan()
        return self.layer(rows).sum() + kinds.sum() + filled.nan_to_num(posinf=3, neginf=5).sum()


LITERALS = (0.0, -0.0, 0.5, float("nan"), float("-inf"))


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("imaginary", LITERALS)
@pytest.mark.parametrize("real", LITERALS)
def test_executable_computes_with_every_bit_of_a_complex_literal(real, imaginary, written):
    module, rows = Fills(complex(real, imaginary)), {"rows": torch.rand(3, 4)}
    program = compiled(module, rows)
    program = deserialize(serialize(program)) if written else program
    plan = EnginePlan()
    step = sweep(TorchEngine(program, plan), plan, weights_of(module, program), [rows])
    assert struct.pack("d", step.losses[0]) == struct.pack("d", float(module(**rows).detach()))


def test_program_with_complex_literals_is_the_same_in_every_field():
    program = compiled(Phases(), {"rows": torch.rand(3, 4)})
    assert_same_program(deserialize(serialize(program)), program)


@pytest.mark.parametrize("real", [0.0, -0.0, 0.1, float("nan"), float("-inf")])
@pytest.mark.parametrize("imaginary", [0.0, -0.0, 5e-324, float("nan"), float("inf")])
def test_complex_argument_keeps_every_bit_of_its_parts(real, imaginary):
    value = complex(real, imaginary)
    found = arguments.read(json.loads(json.dumps(arguments.written(value, {}))), ())
    assert type(found) is complex
    assert struct.pack("2d", found.real, found.imag) == struct.pack("2d", real, imaginary)


@pytest.mark.parametrize("name", quick_first(PROGRAMS, QUICK))
def test_a_program_read_from_its_bytes_is_the_same_in_every_field(name):
    program = PROGRAMS[name]()
    found = deserialize(serialize(program))
    assert_same_program(found, program)
    assert serialize(found) == serialize(program)


class Layers(nn.Module):
    """Weights that two layers share, a buffer, dropout, and constants of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight
        self.register_buffer("scale", torch.tensor([0.5, float("inf"), -0.0, 3.0]).clamp(max=2.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[rows, 4] to the loss []."""
        x = self.table(tokens) * self.scale[:, None] + torch.tensor([0.25, -1.0] * 4)
        for layer in self.layers:
            x = x + F.dropout(torch.tanh(layer(x)), 0.2, self.training)
        return x.masked_fill(x < 0, float("-inf")).logsumexp(-1).mean()


@pytest.fixture(scope="module")
def small() -> tuple[nn.Module, Program, bytes]:
    torch.manual_seed(0)
    module = Layers()
    program = compiled(module, rows_of(0))
    return module, program, serialize(program)


def rows_of(seed: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.randint(11, (3, 4), generator=torch.Generator().manual_seed(seed))}


@pytest.mark.parametrize("recompute", [(), (0, 1)])
def test_an_engine_computes_the_same_bits_from_a_read_program(small, recompute):
    module, program, data = small
    plan = EnginePlan(recompute=frozenset(recompute))
    micro_batches = [rows_of(seed) for seed in (1, 2)]
    steps = [
        sweep(TorchEngine(one, plan), plan, weights_of(module, one), micro_batches)
        for one in (program, deserialize(data))
    ]
    assert steps[0].losses == steps[1].losses
    for name, gradient in steps[0].gradients.items():
        assert torch.equal(gradient, steps[1].gradients[name]), name


def test_a_program_with_an_unknown_function_has_no_written_form(small):
    program = deserialize(small[2])  # its kinds belong to no other test
    for stage in program.stages:
        for node in stage.kind.graphs["infer"].nodes:
            if node.op == "call_function":
                node.target = print
    with pytest.raises(NotSerializableError, match="print"):
        serialize(program)


def test_a_program_with_an_object_as_argument_has_no_written_form(small):
    program = deserialize(small[2])
    nodes = program.stages[0].kind.graphs["turn"].nodes
    node = next(node for node in nodes if node.op == "call_function")
    node.kwargs = {"generator": torch.Generator()}
    with pytest.raises(NotSerializableError, match="Generator"):
        serialize(program)


@pytest.mark.long
def test_flipped_bits_never_read_as_anything_but_a_program(small):
    """Without a checksum a flipped digit can be another valid program; no other error may arise."""
    _, _, data = small
    draw = random.Random(0)
    malformed = 0
    for _ in range(100):
        damaged = bytearray(data)
        damaged[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        try:
            deserialize(bytes(damaged))
        except MalformedError:
            malformed += 1
    assert malformed > 30


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_truncated_bytes_are_malformed(small, share):
    data = small[2]
    with pytest.raises(MalformedError):
        deserialize(data[: int(share * len(data))])


def forged(data: bytes, change: Callable[[Any], None]) -> bytes:
    """Return the bytes of a program with its JSON changed."""
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    content = json.loads(data[_LENGTH_BYTES:end])
    change(content)
    text = json.dumps(content).encode()
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + data[end:]


def _first_graph(content: Any) -> list[Any]:
    return content["kinds"][0]["graphs"][0]


def _set_target(name: str) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        content["tables"]["targets"][0] = name

    return change


def _rename(name: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        _first_graph(content)[0][1:3] = [name, name]

    return change


def _call(content: Any) -> list[Any]:
    return next(line for line in _first_graph(content) if line[0] == 1)


def _first_cost(content: Any) -> list[Any]:
    return next(cost for costs in content["kinds"][0]["costs"] for cost in costs)


FORGERIES: dict[str, Callable[[Any], None]] = {
    "a Python function": _set_target("os.system"),
    "a builtin": _set_target("builtins.eval"),
    "an attribute of a namespace": _set_target("aten::__class__.default"),
    "another namespace": _set_target("ops::load_library.default"),
    "an operator that writes": _set_target("aten::add_.Tensor"),
    "an operator that reads a file": _set_target("aten::from_file.default"),
    "an operator of a library": _set_target("mkldnn::_linear_pointwise.default"),
    "an unknown operator": _set_target("aten::nothing.default"),
    "an unknown overload": _set_target("aten::add.__init__"),
    "code as a node's name": _rename("x = __import__('os')"),
    "a keyword as a node's name": _rename("import"),
    "a number as a node's name": _rename(3),
    "code as an option's name": lambda c: _call(c).__setitem__(4, [3, ["a=1)#", 1]]),
    "a node that comes later": lambda c: _call(c).__setitem__(3, [2, [0, 10**6]]),
    "a complex number of one part": lambda c: _call(c).__setitem__(3, [2, [8, 1.0]]),
    "a complex number of texts": lambda c: _call(c).__setitem__(3, [2, [8, "1.0", "0.0"]]),
    "an unknown code": lambda c: _call(c).__setitem__(3, [2, [17, 0]]),
    "arguments that are no tuple": lambda c: _call(c).__setitem__(3, [1]),
    "a function that is not there": lambda c: _call(c).__setitem__(2, 10**6),
    "no output": lambda c: _first_graph(c).pop(),
    "an input too many": lambda c: _first_graph(c).insert(0, [0, "more", "more", None]),
    "two nodes of one name": lambda c: _first_graph(c)[1].__setitem__(1, _first_graph(c)[0][1]),
    "a result of another shape": lambda c: c["tables"]["tensors"][0].__setitem__(0, [1 << 70]),
    "a truth value as a number": lambda c: c["kinds"][0].__setitem__("forward_flops", True),
    "a negative number": lambda c: c["kinds"][0].__setitem__("turn_transient_bytes", -1),
    "a missing field": lambda c: c["kinds"][0].pop("digest"),
    "a further field": lambda c: c.__setitem__("more", 1),
    "an unknown product with a weight": lambda c: _first_cost(c).__setitem__(8, "backward"),
    "an unknown format": lambda c: c["weights"][0].__setitem__(2, "pickle"),
    "a stage of no kind": lambda c: c["stages"][0].__setitem__(1, 10**6),
    "a weight of another shape": lambda c: c["weights"][0].__setitem__(1, [5]),
    "a constant that is too large": lambda c: c["constants"][0][1].__setitem__(0, [1 << 40]),
    "a device that is none": lambda c: c["constants"][0].__setitem__(2, "meta"),
    "stages that read nothing": lambda c: c["stages"][-1].__setitem__(3, []),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_bytes_are_malformed(small, name):
    data = small[2]
    deserialize(forged(data, lambda content: None))
    with pytest.raises(MalformedError):
        deserialize(forged(data, FORGERIES[name]))


def test_json_of_any_depth_is_malformed():
    text = b"[" * 200_000
    with pytest.raises(MalformedError):
        deserialize(len(text).to_bytes(_LENGTH_BYTES, "little") + text)

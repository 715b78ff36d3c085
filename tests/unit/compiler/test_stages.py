"""How a model becomes stages: where it is cut, what stages share, and what a stage may save."""

import pytest
import torch
from grids import quick_first
from sweeps import compiled, one_step, weights_of
from tiny_models import FIELDS, LENGTH, language_model
from torch import nn

from penstock.planning import builders
from penstock.program import verify


def program_of(family, precision="fp32", freeze=(), goal="train", **changes):
    source = language_model(family, **changes).source(0)
    return verify(
        builders.compile_source(
            source, micro_batch=2, length=LENGTH, precision=precision, freeze=freeze, goal=goal
        )
    )


EXPECTED = {
    "gpt2": ["embed", "transformer.h.#", "head"],
    "gptj": ["embed", "transformer.h.#", "head"],
    "opt": ["embed", "model.decoder.layers.#", "head"],
    "llama": ["embed", "model.layers.#", "head"],
    "qwen3": ["embed", "model.layers.#", "head"],
    "bert": ["embed", "bert.encoder.layer.#", "head"],
}


@pytest.mark.parametrize("family", quick_first(sorted(FIELDS), ["gpt2", "llama"]))
def test_blocks_are_stages_and_equal_blocks_share_a_kind(family):
    depth = {"n_layer": 4} if "n_layer" in FIELDS[family] else {"num_hidden_layers": 4}
    program = program_of(family, **depth)
    embed, block, head = EXPECTED[family]
    blocks = [block.replace("#", str(number)) for number in range(4)]
    assert [stage.name for stage in program.stages] == [embed, *blocks, head]
    kinds = {stage.kind.digest for stage in program.stages[1:-1]}
    assert len(kinds) == 1
    assert len({id(stage.kind) for stage in program.stages[1:-1]}) == 1
    for number, stage in enumerate(program.stages[1:-1]):
        assert all(f".{number}." in name for name in stage.weights)


@pytest.mark.parametrize("family", quick_first(sorted(FIELDS), ["gpt2", "llama"]))
def test_every_parameter_is_a_weight_once_by_its_first_name(family):
    program = program_of(family)
    model = language_model(family).plain(0)
    parameters = dict(model.named_parameters())
    assert {n: w.shape for n, w in program.weights.items()} == {
        name: tuple(parameter.shape) for name, parameter in parameters.items()
    }
    every_name = dict(model.named_parameters(remove_duplicate=False))
    aliases = {alias for spec in program.weights.values() for alias in spec.aliases}
    assert aliases == every_name.keys() - parameters.keys()


def test_tied_weight_is_one_weight_of_two_stages():
    program = program_of("gpt2")
    users = [s.name for s in program.stages if "transformer.wte.weight" in s.weights]
    assert users == ["embed", "head"]
    assert program.weights["transformer.wte.weight"].aliases == ("lm_head.weight",)
    assert program.home("transformer.wte.weight") == 0
    untied = program_of("gpt2", tie_word_embeddings=False)
    assert "lm_head.weight" in untied.weights


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", quick_first(sorted(FIELDS), ["gpt2", "llama"]))
def test_nothing_saved_shares_memory_with_a_weight(family, precision):
    """Looked at where it matters: in the storages of a real forward."""
    case = language_model(family)
    program = program_of(family, precision)
    model = case.plain(0)
    weights = weights_of(model, program)
    rows = {name: torch.from_numpy(value[:2]) for name, value in case.arrays(0).items()}
    values = {name: rows[name] for name in program.inputs if name in program.values}
    values |= program.constants
    if program.prelude is not None:
        made = program.prelude(*(values[name] for name in program.prelude_inputs))
        values |= dict(zip(program.prelude_outputs, made, strict=True))
    of_weights = {tensor.untyped_storage().data_ptr() for tensor in weights.values()}
    saved_some = False
    for stage in program.stages:
        kind = stage.kind
        given = [weights[name] for name in stage.weights]
        inputs = [values[name] for name in stage.inputs]
        with torch.no_grad():
            results = kind.forward(*given, *inputs, torch.tensor([0, 0]))
        values |= dict(zip(stage.outputs, results, strict=False))
        saved = list(results[len(kind.outputs) :])
        assert len(saved) == sum(spec.input is None for spec in kind.saved)
        specs = [spec.tensor for spec in kind.saved if spec.input is None]
        assert [(tuple(t.shape), t.dtype) for t in saved] == [(s.shape, s.dtype) for s in specs]
        assert not of_weights & {tensor.untyped_storage().data_ptr() for tensor in saved}
        known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
        assert kind.saved_bytes == sum(size for ptr, size in own.items() if ptr not in known)
        saved_some |= bool(saved)
    assert saved_some


@pytest.mark.parametrize("family", quick_first(sorted(FIELDS), ["gpt2", "llama"]))
def test_masks_and_positions_are_computed_once_outside_of_stages(family):
    program = program_of(family)
    bound = {name for stage in program.stages for name in stage.outputs}
    for stage in program.stages:
        for name in stage.inputs:
            value = program.values[name]
            assert (value.source == "stage") == (name in bound)
            # What comes from stages is what gradients flow through.
            assert value.requires_grad == (value.source == "stage")
    graphs = [stage.kind.graphs["infer"] for stage in program.stages]
    targets = {str(node.target) for graph in graphs for node in graph.nodes}
    made_from_nothing = ("arange", "tril", "triu", "cos.default", "sin.default")
    assert not [t for t in targets if any(word in t for word in made_from_nothing)]


@pytest.mark.long
def test_frozen_weights_have_no_gradient_and_no_gradient_memory():
    program = program_of("llama", freeze=("model.layers.0.*", "model.embed_tokens.*"))
    assert {n for n, w in program.weights.items() if not w.trainable} == {
        name for name in program.weights if ".0." in name or "embed_tokens" in name
    }
    embed, first, second, *_ = program.stages
    assert not any(embed.kind.trainable)
    assert not any(first.kind.trainable)
    assert not any(first.kind.outputs_grad)  # nothing below it trains, so nothing flows back
    assert first.kind.saved_bytes == 0
    assert all(second.kind.trainable)
    assert first.kind.digest != second.kind.digest


def test_a_program_for_logits_has_no_gradients():
    program = program_of("gpt2", goal="logits")
    assert not any(spec.trainable for spec in program.weights.values())
    assert [program.values[name].tensor.shape for name in program.results] == [(2, LENGTH, 96)]


class Chain(nn.Module):
    """Layers under some structure, and a loss."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Nested(nn.Module):
    """A container of containers: the outer one is the natural boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(
            nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stack in self.stacks:
            for layer in stack:
                x = torch.tanh(layer(x))
        return x


X = {"x": torch.randn(5, 8, generator=torch.Generator().manual_seed(0))}


def stage_names(module, **options):
    return [stage.name for stage in compiled(module, X, **options).stages]


def test_containers_are_found_in_any_structure():
    mixed = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3))
    assert stage_names(Chain(mixed)) == ["layers.0", "layers.2", "layers.3", "head"]
    assert stage_names(Chain(Nested())) == [
        "layers.stacks.0",
        "layers.stacks.1",
        "layers.stacks.2",
        "head",
    ]


def test_a_model_without_containers_is_cut_too():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            return self.c(torch.relu(self.b(torch.relu(self.a(x))))).square().mean()

    program = compiled(Bare(), X)
    assert len(program.stages) == 3
    assert [set(stage.weights) for stage in program.stages] == [
        {f"{name}.weight", f"{name}.bias"} for name in "abc"
    ]


@pytest.mark.parametrize("slot_bytes", [300, 600, 1200, 10_000])
def test_stages_fit_a_slot_and_results_are_equal(slot_bytes):
    torch.manual_seed(0)
    module = Chain(Nested())
    program = compiled(module, X, slot_bytes=slot_bytes)
    assert all(program.stage_stream_bytes(stage) <= slot_bytes for stage in program.stages)
    whole, cut = one_step(module, [X]), one_step(module, [X], slot_bytes=slot_bytes)
    assert cut.losses == whole.losses
    for name, gradient in whole.gradients.items():
        assert torch.equal(cut.gradients[name], gradient)


class Transposing(nn.Module):
    """Weights that are transposed long before they are used, as `x @ w.t()` may be."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.randn(8, 8)) for _ in range(4))

    def forward(self, x):
        turned = [weight.t() for weight in (self.a, self.b, self.c, self.d)]
        for weight in turned:
            x = torch.tanh(x @ weight)
        return x.square().mean()


@pytest.mark.parametrize("slot_bytes", [None, 300])
def test_weight_is_transposed_where_it_is_used(slot_bytes):
    torch.manual_seed(0)
    module = Transposing()
    program = compiled(module, X, slot_bytes=slot_bytes)
    assert [stage.weights for stage in program.stages] == [("a",), ("b",), ("c",), ("d",)]
    crossing = {name for stage in program.stages for name in stage.inputs}
    assert all(program.values[name].tensor.shape == (5, 8) for name in crossing)
    found = one_step(module, [X], slot_bytes=slot_bytes)
    module(**X).backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad)


class CrossAttention(nn.Module):
    """Queries from one side, keys and values from the other: one weight in two parts."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        y = self.before(x)
        return self.attention(x, y.flip(0), y, need_weights=False)[0].square().mean()


@pytest.mark.parametrize("slot_bytes", [None, 1_000])
def test_parts_of_a_weight_may_be_read_in_different_stages(slot_bytes):
    torch.manual_seed(0)
    module = CrossAttention()
    found = one_step(module, [X], slot_bytes=slot_bytes)
    module(**X).backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad)

"""Incremental decoding: each position computed from the keys and values of those before it."""

import math
import weakref

import pytest
import torch
from grids import quick_first
from tiny_models import FIELDS, LENGTH, VOCABULARY, deepseek, language_model

from penstock.compiler import CACHE, POSITION
from penstock.compiler.cached_attention import write_row
from penstock.compiler.serialization import NotSerializableError, deserialize, serialize
from penstock.engine import Batch, EnginePlan, TorchEngine, compute
from penstock.errors import BudgetError, DataError
from penstock.models import ModelSource
from penstock.planning import builders
from penstock.step_schedule import StepSchedule
from penstock.training.next_token import NextToken

START = 5
SLIDING = {
    "sliding_window": 4,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
ATTENTION = {
    "mistral": SLIDING,
    "gemma2": {**SLIDING, "query_pre_attn_scalar": 8},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"num_attention_heads": 4},
}
EQUAL_SIZES = {"hidden_size": LENGTH, "intermediate_size": LENGTH, "num_attention_heads": LENGTH}


def program_of(source, goal, precision="fp32"):
    return builders.compile_source(
        source, micro_batch=1, length=LENGTH, precision=precision, goal=goal
    )


def weights_for(program, plain):
    named = dict(plain.named_parameters())
    return {n: named[n].detach().to(w.stream_dtype) for n, w in program.weights.items()}


def logits_of_window(source, weights, ids, precision="fp32"):
    engine = TorchEngine(program_of(source, "logits", precision), EnginePlan())
    engine.begin(Batch([{"input_ids": ids}], 0, 1, 0, 0))
    for operation in StepSchedule.forward_only(engine.program).operations:
        engine.load(operation.stage, [weights[n] for n in operation.weights])
        compute(engine, operation)
    return engine.results()[0][0][0]


def check(source, plain, precision="fp32", tolerance=2e-6):
    """Compare the logits of each position with those of the whole window; return the goals of the
    programs that were compiled."""
    weights = weights_for(program_of(source, "logits", precision), plain)
    goals = []

    def make_engine(goal):
        goals.append(goal)
        return TorchEngine(program_of(source, goal, precision), EnginePlan())

    ids = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(3))
    wanted = logits_of_window(source, weights, ids, precision)
    following = NextToken(make_engine, lambda names: [weights[n] for n in names], LENGTH)
    text = ids[0].tolist()
    scale = wanted.abs().max()
    for end in range(START, LENGTH + 1):
        found = following.logits(text[:end])
        assert (found - wanted[end - 1]).abs().max() <= tolerance * scale, end
    return goals


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", quick_first(sorted(FIELDS.keys() - {"bert"}), ["gpt2", "llama"]))
def test_each_position_has_the_logits_of_the_whole_window(family, precision):
    case = language_model(family)
    tolerance = 2e-6 if precision == "fp32" else 2e-2
    goals = check(case.source(0), case.plain(0).eval(), precision, tolerance)
    assert goals == ["prefill", "decode"]


@pytest.mark.parametrize("changes", [EQUAL_SIZES, {"num_key_value_heads": 4}])
def test_sizes_that_equal_the_window(changes):
    case = language_model("llama", **changes)
    assert check(case.source(0), case.plain(0).eval()) == ["prefill", "decode"]


def plain_and_source(model_type, fields):
    from transformers import AutoConfig, AutoModelForCausalLM

    known = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    fields = {**known, **ends, **fields}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **fields)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return plain, ModelSource.from_hf_config({"model_type": model_type, **fields})


@pytest.mark.parametrize("model_type", quick_first(sorted(ATTENTION), ["mistral"]))
def test_masks_and_biases_of_attention(model_type):
    plain, source = plain_and_source(model_type, ATTENTION[model_type])
    assert check(source, plain) == ["prefill", "decode"]


def test_latent_attention_with_experts():
    case = deepseek()
    check(case.source(0), case.plain(0).eval(), tolerance=1e-5)


def test_recurrent_layers_compute_the_window_for_each_token():
    plain, source = plain_and_source("mamba", {"state_size": 4})
    assert check(source, plain, tolerance=1e-5) == ["prefill"]


def test_program_that_keeps_nothing_names_the_operator():
    program = program_of(plain_and_source("mamba", {"state_size": 4})[1], "prefill")
    assert "aten.conv1d.default may mix positions" in program.whole_window_reason
    written = deserialize(serialize(program))
    assert written.whole_window_reason == program.whole_window_reason
    assert not program_of(language_model("gpt2").source(0), "prefill").whole_window_reason


def test_keys_are_kept_once_for_the_heads_that_share_them():
    program = program_of(language_model("llama").source(0), "decode")
    shape = program.values[CACHE.format(0)].tensor.shape
    assert shape == (1, 2, LENGTH, 8)
    assert program.values[POSITION].tensor.shape == (1,)


def test_another_text_does_not_see_the_last_one():
    case = language_model("gpt2")
    source, plain = case.source(0), case.plain(0).eval()
    weights = weights_for(program_of(source, "logits"), plain)

    def make_engine(goal):
        return TorchEngine(program_of(source, goal), EnginePlan())

    def fetch(names):
        return [weights[n] for n in names]

    used = NextToken(make_engine, fetch, LENGTH)
    for text in ([1, 2, 3], [1, 2, 3, 4], [9, 8, 7, 6, 5], [1, 2], list(range(LENGTH + 3))):
        fresh = NextToken(make_engine, fetch, LENGTH).logits(text)
        assert torch.allclose(used.logits(text), fresh, rtol=0, atol=2e-6), text


def test_a_token_is_written_into_the_kept_keys_and_nothing_is_copied():
    case = language_model("gpt2")
    source, plain = case.source(0), case.plain(0).eval()
    weights = weights_for(program_of(source, "logits"), plain)
    following = NextToken(
        lambda goal: TorchEngine(program_of(source, goal), EnginePlan()),
        lambda names: [weights[n] for n in names],
        LENGTH,
    )
    following.logits([1, 2, 3])
    kept = [(tensor.data_ptr(), tensor.clone()) for tensor in following._kept]
    assert len(kept) == 2 * 2
    following.logits([1, 2, 3, 4])
    for now, (address, before) in zip(following._kept, kept, strict=True):
        assert now.data_ptr() == address
        changed = (now != before).flatten(0, 1).any(dim=2).any(dim=0)
        assert changed.nonzero().flatten().tolist() == [3]


def test_weights_that_have_changed_between_two_tokens():
    case = language_model("gpt2")
    source, plain = case.source(0), case.plain(0).eval()
    weights = weights_for(program_of(source, "logits"), plain)
    version = 0

    def make_engine(goal):
        return TorchEngine(program_of(source, goal), EnginePlan())

    def fetch(names):
        return [weights[n] * (1 + version) for n in names]

    used = NextToken(make_engine, fetch, LENGTH, lambda: version)
    before = used.logits([1, 2, 3])
    version = 1
    fresh = NextToken(make_engine, fetch, LENGTH, lambda: version)
    assert torch.equal(used.logits([1, 2, 3, 4]), fresh.logits([1, 2, 3, 4]))
    assert not torch.allclose(before, fresh.logits([1, 2, 3]))


def gpt2():
    case = language_model("gpt2")
    source, plain = case.source(0), case.plain(0).eval()
    weights = weights_for(program_of(source, "logits"), plain)
    return source, lambda names: [weights[n] for n in names]


def test_without_memory_for_keys_the_window_is_computed_for_each_token():
    source, fetch = gpt2()
    programs = {goal: program_of(source, goal) for goal in ("prefill", "decode", "whole_window")}
    peaks = {}
    for goal in ("prefill", "whole_window"):
        engine = TorchEngine(programs[goal], EnginePlan())
        NextToken(lambda _: engine, fetch, LENGTH).logits([1, 2, 3])  # noqa: B023
        peaks[goal] = engine.memory.peak_bytes
    assert peaks["whole_window"] < peaks["prefill"]
    goals = []

    def make_engine(goal):
        goals.append(goal)
        return TorchEngine(programs[goal], EnginePlan(), budget_bytes=peaks["whole_window"])

    told = []
    small = NextToken(make_engine, fetch, LENGTH, notice=told.append)
    large = NextToken(lambda goal: TorchEngine(programs[goal], EnginePlan()), fetch, LENGTH)
    for text in ([1, 2, 3], [1, 2, 3, 4]):
        assert torch.allclose(small.logits(text), large.logits(text), atol=2e-6)
    assert goals == ["prefill", "whole_window"]
    (notice,) = told
    assert "the engine has no memory for keys and values" in notice
    assert "raise engine.memory" in notice

    def too_small(goal):
        return TorchEngine(programs[goal], EnginePlan(), budget_bytes=peaks["whole_window"] // 2)

    with pytest.raises(BudgetError, match=r"engine\.memory"):
        NextToken(too_small, fetch, LENGTH).logits([1, 2, 3])


def test_keys_are_released_at_the_end_of_a_text():
    source, fetch = gpt2()
    following = NextToken(
        lambda goal: TorchEngine(program_of(source, goal), EnginePlan()), fetch, LENGTH
    )
    following.logits([1, 2, 3])
    following.logits([1, 2, 3, 4])
    kept = [weakref.ref(tensor) for tensor in following._kept]
    following.forget()
    assert all(reference() is None for reference in kept)
    assert [engine.memory.current_bytes for engine in following.engines] == [0, 0]


def test_kept_inputs_are_checked():
    program = program_of(language_model("gpt2").source(0), "decode")
    engine = TorchEngine(program, EnginePlan())
    inputs = {
        "input_ids": torch.zeros((1, LENGTH), dtype=torch.int64),
        POSITION: torch.tensor([0]),
    }
    names = [name for name in program.inputs if name not in inputs]
    kept = {name: torch.zeros(program.values[name].tensor.shape) for name in names}
    engine.begin(Batch([inputs], 0, 1, 0, 0, kept=kept))
    wrong = {**kept, names[1]: kept[names[1]][..., :1]}
    with pytest.raises(DataError, match=r"'penstock_cache_1' must be float32"):
        engine.begin(Batch([inputs], 0, 1, 0, 0, kept=wrong))
    with pytest.raises(ValueError, match="kept inputs are those of one micro-batch, got 2"):
        engine.begin(Batch([inputs, inputs], 0, 2, 0, 0, kept=kept))


def test_written_program_decodes_and_may_write_into_kept_values_only():
    program = deserialize(serialize(program_of(language_model("gpt2").source(0), "decode")))
    block = next(stage for stage in program.stages if CACHE.format(0) in stage.inputs)
    graph = block.kind.graphs["infer"]
    (first, *_) = graph.find_nodes(op="call_function", target=write_row)
    first.args = (graph.find_nodes(op="placeholder")[0], *first.args[1:])
    with pytest.raises(NotSerializableError, match=f"stage {block.name} writes into"):
        serialize(program)


def test_kept_values_are_written_in_place_and_cost_a_row():
    program = program_of(language_model("gpt2").source(0), "decode")
    block = next(stage for stage in program.stages if CACHE.format(0) in stage.inputs)
    shape = program.values[CACHE.format(0)].tensor.shape
    (write,) = (cost for cost in block.kind.costs["infer"] if cost.name == "with_row")
    assert write.calls == 2
    assert write.bytes == 2 * 4 * math.prod(shape) // LENGTH
    outputs = sum(math.prod(spec.shape) * 4 for spec in block.kind.outputs)
    assert block.kind.forward_transient_bytes < 20 * outputs + scratch_of_products(block)


def scratch_of_products(block):
    widest = max(max(spec.shape) for spec in block.kind.weights)
    return 4 * 20 * widest
